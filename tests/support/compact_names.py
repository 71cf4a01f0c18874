"""Names of tensors with runs of indices written as ranges: ``layers.{0-29}.attention.qkv.weight``.

Names that have equal dtype and shape, and differ only in integers between dots or underscores, become one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

Description = tuple[str | None, tuple[int, ...] | None]
Tensors = dict[str, Description]

_INDEX = re.compile(r"(?:(?<=[._])|^)(?:0|[1-9][0-9]*)(?=[._]|$)")
_HOLE = re.compile(r"\{([0-9,-]+)\}")


def collapse(tensors: Mapping[str, Description]) -> Tensors:
    """The same tensors under compact names; ``expand`` is the inverse, up to order."""
    groups: dict[tuple[tuple[str, ...], Description], set[tuple[int, ...]]] = defaultdict(set)
    for name, description in tensors.items():
        if "{" in name or "}" in name:
            raise ValueError(f"{name!r} holds a brace")
        groups[tuple(_INDEX.split(name)), description].add(tuple(map(int, _INDEX.findall(name))))
    compact = {}
    for (texts, description), indices in groups.items():
        for box in _boxes(indices):
            holes = [*map(_written, box), ""]
            compact["".join(text + hole for text, hole in zip(texts, holes, strict=True))] = description
    return dict(sorted(compact.items(), key=lambda item: natural(item[0])))


def expand(compact: Mapping[str, Description]) -> Tensors:
    """Every tensor under its own name, in natural order (``layers.2`` before ``layers.10``)."""
    tensors: Tensors = {}
    for pattern, description in compact.items():
        texts = _HOLE.split(pattern)
        choices = [[text] if position % 2 == 0 else _read(text) for position, text in enumerate(texts)]
        for parts in itertools.product(*choices):
            name = "".join(parts)
            if name in tensors:
                raise ValueError(f"{pattern!r} gives {name!r} a second time")
            tensors[name] = description
    return dict(sorted(tensors.items(), key=lambda item: natural(item[0])))


def digest(tensors: Mapping[str, Description]) -> str:
    """The SHA-256 of names, dtypes and shapes, independent of order."""
    lines = sorted([name, dtype, None if shape is None else list(shape)] for name, (dtype, shape) in tensors.items())
    return hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which numbers inside names count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _boxes(indices: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """A set of index tuples as disjoint products: for each place, the indices that it takes."""
    if () in indices:
        return [()]
    rests: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *rest in indices:
        rests[first].add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first in sorted(rests):
        alike[frozenset(rests[first])].append(first)
    return [(tuple(firsts), *box) for rest, firsts in alike.items() for box in _boxes(set(rest))]


def _written(indices: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if text.isdigit() else f"{{{text}}}"


def _read(text: str) -> list[str]:
    indices: list[str] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        indices += map(str, range(int(first), int(last or first) + 1))
    return indices
