"""A mapping that can't be changed; unlike ``types.MappingProxyType`` it can be pickled and copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenMapping(Mapping[Key, Value]):
    """A read-only copy of a mapping, in the same order.

    Args:
        entries: what it holds. A later change of that mapping does not show here.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        self._entries: dict[Key, Value] = dict(entries or {})

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries!r})"
