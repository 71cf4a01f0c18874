"""Collapses names that differ in indices only: ``layers.0.to_q``, ``layers.1.to_q`` become ``layers.{0…1}.to_q``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Label = TypeVar("Label", bound=Hashable)
Indices = tuple[int, ...]

_MOST_INDICES = 8
_LONGEST_INDEX = 9
"""Names may come from a file, which can hold any: what goes beyond these is no index."""


@dataclass(frozen=True, slots=True)
class Collapsed(Generic[Label]):
    """Names that are alike.

    Attributes:
        pattern: the name, with the indices that occur: ``{0…3,6}``.
        count: how many names it stands for.
        label: what they have in common.
    """

    pattern: str
    count: int
    label: Label


def collapse(names: Iterable[tuple[str, Label]]) -> list[Collapsed[Label]]:
    """Collapse names that bear the same label.

    Only whole dotted segments of digits are indices. A pattern of several indices stands for all their combinations,
    so it is split until that is so: the patterns stand for exactly the names given.

    Args:
        names: distinct names, each with its label.

    Returns:
        In the order in which the first name of each shape comes.
    """
    groups: dict[tuple[tuple[str | None, ...], Label], list[Indices]] = {}
    for name, label in names:
        template, indices = _taken_apart(name)
        groups.setdefault((template, label), []).append(indices)
    return [
        Collapsed(_pattern(template, box), _volume(box), label)
        for (template, label), found in groups.items()
        for box in _boxes(found)
    ]


def _taken_apart(name: str) -> tuple[tuple[str | None, ...], Indices]:
    """The segments of a name with None for each index, and the indices."""
    template: list[str | None] = []
    indices: list[int] = []
    for part in name.split("."):
        if _is_index(part) and len(indices) < _MOST_INDICES:
            indices.append(int(part))
            template.append(None)
        else:
            template.append(part)
    return tuple(template), tuple(indices)


def _is_index(part: str) -> bool:
    """Whether a segment is a number, written as its value is: ``07`` would be lost as 7."""
    return part.isascii() and part.isdigit() and len(part) <= _LONGEST_INDEX and (part == "0" or part[0] != "0")


def _boxes(found: list[Indices]) -> list[tuple[Indices, ...]]:
    """Sets of indices, one for each place, whose combinations are together exactly the tuples given."""
    if not found[0]:
        return [()]
    after: dict[int, list[Indices]] = {}
    for first, *rest in found:
        after.setdefault(first, []).append(tuple(rest))
    alike: dict[frozenset[Indices], list[int]] = {}
    for first, rests in after.items():
        alike.setdefault(frozenset(rests), []).append(first)
    return [(tuple(sorted(firsts)), *box) for firsts in alike.values() for box in _boxes(after[firsts[0]])]


def _volume(box: tuple[Indices, ...]) -> int:
    count = 1
    for indices in box:
        count *= len(indices)
    return count


def _pattern(template: tuple[str | None, ...], box: tuple[Indices, ...]) -> str:
    indices = iter(box)
    return ".".join(_ranges(next(indices)) if part is None else part for part in template)


def _ranges(indices: Indices) -> str:
    """Indices as ranges: 3, {0…29}, {0…3,6,8…9}; two neighbours are no range."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [[f"{run[0]}…{run[-1]}"] if len(run) > 2 else [str(index) for index in run] for run in runs]
    return "{" + ",".join(part for run in parts for part in run) + "}"
