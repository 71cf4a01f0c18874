"""Names of tensors with their indices collapsed: ``layers.{i}.attention.qkv`` for thirty blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipcast.registry.header import Shape
from slipcast.registry.keymap.place import index_value

_HOLES = "ijklmn"


@dataclass(frozen=True, slots=True)
class Template:
    """Modules, or parameters that hang on none, that are alike but for indices.

    Attributes:
        place: their name, with ``{i}``, ``{j}``, ... for indices.
        leaves: the last parts of their tensors' names ("weight", "bias") and the shape of each in the first of them.
        count: how many there are.
    """

    place: str
    leaves: Mapping[str, Shape]
    count: int


def templates(shapes: Mapping[str, Shape]) -> tuple[Template, ...]:
    """Collapse names.

    Args:
        shapes: shapes by name.

    Returns:
        In the order in which the first name of each comes.
    """
    leaves: dict[str, dict[str, Shape]] = {}
    modules: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        module, dot, leaf = name.rpartition(".")
        place = collapsed(module if dot else leaf)
        leaves.setdefault(place, {}).setdefault(leaf if dot else "", shape)
        modules.setdefault(place, set()).add(module if dot else leaf)
    return tuple(Template(place, leaves[place], len(modules[place])) for place in leaves)


def collapsed(name: str) -> str:
    """A name with holes for its indices."""
    segments = name.split(".")
    depth = 0
    for number, segment in enumerate(segments):
        if index_value(segment) is not None:
            segments[number] = "{" + (_HOLES[depth] if depth < len(_HOLES) else f"i{depth}") + "}"
            depth += 1
    return ".".join(segments)


def block_lists(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Lists of blocks: the name before a first index, and how many indices follow it; only where they count from 0."""
    found: dict[str, set[int]] = {}
    for name in shapes:
        segments = name.split(".")
        first = next((n for n, segment in enumerate(segments) if index_value(segment) is not None), 0)
        if first:
            found.setdefault(".".join(segments[:first]), set()).add(int(segments[first]))
    return {
        place: len(indices)
        for place, indices in found.items()
        if indices == set(range(len(indices))) and len(indices) > 1
    }
