"""Ways to break a family file that its proofs must notice: misspelt names, numbers that are off, parts exchanged."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slipcast.registry.keymap.operations import OPERATIONS

Data = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mutation:
    """A broken family file.

    Attributes:
        what: what is wrong with it.
        data: what it holds.
    """

    what: str
    data: Data


EXCHANGED, LEFT_OUT = "exchanged", "without its operation"
"""What some mutations are called: those that no shape may show, where a rule names its source."""

WAYS = 10
"""In how many ways each section is broken, where it holds enough for that."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_INDEX = re.compile(r"(?<![\w-])\d+(?![\w-])")
"""A segment that is a number, of a name; also a number in a hole, such as {3*b+1}."""
_EXPRESSION_NAME = re.compile(r"[A-Za-z_][\w-]*(?:\.(?:[\w-]+|\{[^{}]*\}))+|(?<=\()[A-Za-z_][\w-]*(?=[,)])")
_NUMBER = re.compile(r"(?<![\w.{*+])(?<![<>] )(?<![<>]= )(?:(?<! in )\d+|(?<= in )\d+(?! if ))(?![\w.])")
"""A number, but for a bound, of a comparison or of a search with a condition: its neighbours mean the same as long as
what is known lies on the same sides."""
_OPERATION = re.compile(rf"(?:{'|'.join(OPERATIONS)})\((.*?)(?:, \d+)?\)")


def misspelt(place: str, way: int) -> str:
    """The place with one character wrong in one of its words: one too many, one missing, or another.

    Holes for indices stay as they are.
    """
    words = [word for word in _WORD.finditer(place) if not _is_hole(place, word)]
    if not words:
        return place + "x"
    word = words[way % len(words)]
    at = word.start() + min(1 + way % len(word[0]), len(word[0]) - 1)
    kind = (way // len(words)) % 3 if len(word[0]) > 2 else 0
    if kind == 0:
        return place[: word.end()] + "x" + place[word.end() :] if len(word[0]) == 1 else place[:at] + "x" + place[at:]
    return place[:at] + ("" if kind == 1 else "y" if place[at] == "x" else "x") + place[at + 1 :]


def _is_hole(place: str, word: re.Match[str]) -> bool:
    """Whether a word is the name of a hole: {i}, {last-i}, or stack in {stack=layers|blocks}."""
    opened = place.rfind("{", 0, word.start())
    closed = place.find("}", opened)
    if opened < 0 or closed < word.start():
        return False
    inside = place[opened + 1 : closed]
    return "|" not in inside or place[word.end() : word.end() + 1] == "="


def keep_mutations(data: Data) -> Iterator[Mutation]:
    """A misspelt module of precision.keep, and of forward_needs where it stands there too."""

    def found(way: int) -> Iterator[Mutation]:
        for role, places in data.get("precision", {}).get("keep", {}).items():
            for number, old in enumerate(places):  # a list of them, or a mapping to reasons
                new = misspelt(old, way)
                reasoned = isinstance(places, dict)
                path = ("precision", "keep", role, old if reasoned else number)
                changed = _with(data, path, new if reasoned else number, places[old] if reasoned else new)
                needed = changed["precision"].get("forward_needs", [])
                if old in needed:
                    needed[needed.index(old)] = new
                yield Mutation(f"keep {old} -> {new}", changed)

    yield from _chosen((), found)


def identify_mutations(data: Data) -> Iterator[Mutation]:
    """A wrong name or number in a condition of identify.where, or a misspelt name of has or hasnt."""
    identify = data.get("identify", {})

    def conditions() -> Iterator[Mutation]:
        for number, old in enumerate(identify.get("where", [])):
            for what, new in _wrong_expressions(old, 0):
                yield Mutation(f"where {what}: {old} -> {new}", _with(data, ("identify", "where", number), number, new))

    def names(way: int) -> Iterator[Mutation]:
        for section in ("has", "hasnt"):
            for number, old in enumerate(identify.get(section, [])):
                new = misspelt(old, way)
                yield Mutation(f"{section} {old} -> {new}", _with(data, ("identify", section, number), number, new))

    yield from _chosen(conditions(), names)


def config_mutations(data: Data) -> Iterator[Mutation]:
    """A wrong name or number in an expression of config or let, or a constant that is another."""

    def found(way: int) -> Iterator[Mutation]:
        for section in ("let", "config"):
            for path, value in _leaves(data.get(section, {}), (section,)):
                for what, new in _wrong_values(value, way):
                    changed = _with(data, path, path[-1], new)
                    yield Mutation(f"{'.'.join(map(str, path))} {what}: {value!r} -> {new!r}", changed)

    yield from _chosen((), found)


def _wrong_values(value: Any, way: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield "flag", not value
    elif isinstance(value, int | float):
        yield "number", value + way + 1
    elif isinstance(value, str):
        yield from _wrong_expressions(value, way)


def _wrong_expressions(text: str, way: int) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(_EXPRESSION_NAME.finditer(text)):
        yield "name", text[: name.start()] + misspelt(name[0], way + number + len(text)) + text[name.end() :]
    for found in _NUMBER.finditer(text):
        yield "number", f"{text[: found.start()]}{int(found[0]) + way + 1}{text[found.end() :]}"


def keys_mutations(data: Data) -> Iterator[Mutation]:
    """Parts exchanged, an operation left out, a wrong index, or a misspelt place, on either side."""
    leaves = list(_leaves(data.get("keys", {}), ("keys",)))

    def parts() -> Iterator[Mutation]:
        for path, value in leaves:
            where = ".".join(map(str, path))
            plain = _OPERATION.sub(r"\1", str(value))
            if plain != value:
                yield Mutation(f"{where} {LEFT_OUT}: {plain}", _with(data, path, path[-1], plain))
            terms = str(value).split(" + ")
            for at in range(len(terms) - 1):
                new = " + ".join([*terms[:at], terms[at + 1], terms[at], *terms[at + 2 :]])
                yield Mutation(f"{where} {EXCHANGED}: {new}", _with(data, path, path[-1], new))
            for found in _INDEX.finditer(str(path[-1])):
                key = f"{path[-1][: found.start()]}{int(found[0]) + 1}{path[-1][found.end() :]}"
                yield Mutation(f"{where} index: {key}: {value}", _with(data, path, key, value))

    def names(way: int) -> Iterator[Mutation]:
        for number, (path, value) in enumerate(leaves):
            where = ".".join(map(str, path))
            key = misspelt(str(path[-1]), way + number)
            yield Mutation(f"{where} file name: {key}: {value}", _with(data, path, key, value))
            new = misspelt_value(str(value), way + number)
            yield Mutation(f"{where} model name: {path[-1]}: {new}", _with(data, path, path[-1], new))

    yield from _chosen(parts(), names)


def misspelt_value(value: str, way: int) -> str:
    """A value of the key map in which one place is misspelt."""
    terms = value.split(" + ")
    number = way % len(terms)
    operation = _OPERATION.fullmatch(terms[number])
    old = operation[1] if operation is not None else terms[number]
    terms[number] = terms[number].replace(f"({old}", f"({misspelt(old, way)}") if operation else misspelt(old, way)
    return " + ".join(terms)


def _leaves(entries: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """All scalars of nested mappings and lists."""
    if isinstance(entries, dict):
        for key, value in entries.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(entries, list):
        for number, value in enumerate(entries):
            yield from _leaves(value, (*path, number))
    else:
        yield path, entries


def _with(data: Data, path: Path, key: Any, value: Any) -> Data:
    """A copy in which an entry has another key and value."""
    changed = copy.deepcopy(data)
    around: Any = changed
    for step in path[:-1]:
        around = around[step]
    if isinstance(around, list):
        around[key] = value
        return changed
    entries = {key if old == path[-1] else old: value if old == path[-1] else around[old] for old in around}
    around.clear()
    around.update(entries)
    return changed


def _chosen(first: Iterable[Mutation], names: Callable[[int], Iterator[Mutation]]) -> Iterator[Mutation]:
    """``WAYS`` of them that differ: of the first ones half as many at most, and of the others those from all over.

    Args:
        first: those that are rarer.
        names: those of one way of misspelling; more ways are asked for until there are enough.
    """
    rare = _spread({mutation.what: mutation for mutation in first}, WAYS // 2)
    found: dict[str, Mutation] = {}
    for way in range(WAYS):
        if len(found) < WAYS - len(rare):
            found |= {mutation.what: mutation for mutation in names(way)}
    yield from (*rare, *_spread(found, WAYS - len(rare)))


def _spread(found: dict[str, Mutation], number: int) -> list[Mutation]:
    """So many of them at most, from all over."""
    mutations, step = list(found.values()), max(1, len(found) / number)
    return [mutations[int(at * step)] for at in range(min(number, len(mutations)))]
