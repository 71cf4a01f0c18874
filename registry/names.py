"""Names and logical shapes under one prefix, with quick answers to "is there a tensor of this name, or below it?"."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property

from slipcast.registry.header import Shape


class Names(Mapping[str, Shape]):
    """Logical shapes by name; frozen.

    Args:
        shapes: what it holds, in the order of the file.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)

    def __getitem__(self, name: str) -> Shape:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._shapes)

    def is_there(self, name: str) -> bool:
        """Whether a tensor has this name, or begins with it at a dot."""
        if name in self._shapes:
            return True
        below = name + "."
        at = bisect_left(self._sorted, below)
        return at < len(self._sorted) and self._sorted[at].startswith(below)
