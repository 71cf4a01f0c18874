"""The fewest names that tell one checkpoint from all others that are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from slipcast.registry.family import Family
from slipcast.registry.keymap.place import ArithmeticHole, LastHole, Place
from slipcast.registry.templates import collapsed

Known = Callable[[str], bool]
"""Whether something known has a tensor of this name."""

_SAFE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TRIED = 3
_MOST_CANDIDATES = 80
_PLACE = re.compile(r"(?:size|count|has)\(\s*([A-Za-z0-9_.{}=|-]+)")


def distinguishing_names(names: Iterable[str], known: Mapping[str, Known]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The smallest set of names of which each known thing lacks one.

    Of sets that are equally small the first is taken, in an order that puts names near the root before those in
    blocks, and weights before biases.

    Args:
        names: native names of the checkpoint.
        known: what is to be told from it, by name.

    Returns:
        The names, at least one; and what no set can tell from the checkpoint, since it has all of its names.
    """
    candidates = _candidates(names)
    lacking = {
        name: sum(1 << number for number, has in enumerate(known.values()) if not has(name)) for name in candidates
    }
    possible = 0
    for mask in lacking.values():
        possible |= mask
    inseparable = tuple(name for number, name in enumerate(known) if not possible >> number & 1)
    return _smallest_cover(lacking, possible), inseparable


def _candidates(names: Iterable[str]) -> list[str]:
    """One name of each kind, as far as they can stand in a family file as they are."""
    first: dict[str, str] = {}
    for name in names:
        if _SAFE.fullmatch(name):
            first.setdefault(collapsed(name), name)
    return sorted(first.values(), key=_rank)[:_MOST_CANDIDATES]


def _rank(name: str) -> tuple[bool, int, str]:
    return not name.endswith(".weight"), name.count("."), name


def _smallest_cover(masks: Mapping[str, int], wanted: int) -> tuple[str, ...]:
    names: Sequence[str] = tuple(masks)
    for size in range(1, _TRIED + 1):
        for chosen in combinations(names, size):
            covered = 0
            for name in chosen:
                covered |= masks[name]
            if covered == wanted:
                return chosen
    return _greedy_cover(masks, wanted)


def _greedy_cover(masks: Mapping[str, int], wanted: int) -> tuple[str, ...]:
    chosen: list[str] = []
    covered = 0
    while covered != wanted:
        best = max(masks, key=lambda name: (masks[name] & ~covered).bit_count())
        chosen.append(best)
        covered |= masks[best]
    return tuple(chosen)


def mentioned_by(family: Family) -> Known:
    """Whether a family file speaks of a tensor: as evidence, in its key map, or in an expression."""
    evidence = set(family.identify.has)
    for text in _texts([*family.let.values(), *family.config.values()]):
        evidence.update(_PLACE.findall(text))
    places = [place for rule in family.key_map.rules for place in rule.files if _is_plain(place)]

    def has(name: str) -> bool:
        segments = tuple(name.split("."))
        return any(name == one or name.startswith(one + ".") for one in evidence) or any(
            place.takes(segments) for place in places
        )

    return has


def _is_plain(place: Place) -> bool:
    return not any(isinstance(segment, ArithmeticHole | LastHole) for segment in place.segments)


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _texts(value.values())
        elif isinstance(value, list | tuple):
            yield from _texts(value)
