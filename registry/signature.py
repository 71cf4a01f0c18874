"""What a header must hold at the least for a family to be worth asking: told without reading the whole family file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipcast.registry.family import Family
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.place import (
    ArithmeticHole,
    IndexHole,
    LastHole,
    LiteralSegment,
    Place,
    Segment,
    SpellingHole,
    WordHole,
    index_value,
)
from slipcast.registry.names import Names

Alternatives = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Names without which a family's evidence can't be complete.

    Attributes:
        prefixes: what may stand before every name.
        native: names, or their beginnings, that a file in native names has all of.
        model: for each of these the names, or beginnings, of which a file in the model's names has at least one; ""
            stands for any name.
        namings: for each naming of ``namings:`` the beginnings of its names.
    """

    prefixes: tuple[str, ...]
    native: tuple[str, ...]
    model: tuple[Alternatives, ...]
    namings: tuple[Alternatives, ...] = ()

    def allows(self, names: Names) -> bool:
        """Whether the family may claim these names, which have their prefix off."""
        return (
            all(map(names.is_there, self.native))
            or all(any(not name or names.is_there(name) for name in alternatives) for alternatives in self.model)
            or any(any(map(names.is_there, beginnings)) for beginnings in self.namings)
        )


def signature_of(family: Family) -> Signature:
    """The signature of a family."""
    model = tuple(tuple(dict.fromkeys(_in_the_model(name, family.key_map))) for name in family.identify.has)
    namings = tuple(tuple(dict.fromkeys(_beginnings(key_map))) for key_map in family.naming_maps.values())
    return Signature(family.prefixes, family.identify.has, model, namings)


def _beginnings(key_map: KeyMap) -> Iterator[str]:
    """The first segments of the file's places, whatever words they may be."""
    for rule in key_map.rules:
        for place in rule.files:
            first = place.segments[0]
            if isinstance(first, LiteralSegment):
                yield first.text
            elif isinstance(first, SpellingHole | WordHole):
                yield from first.words


def _in_the_model(name: str, key_map: KeyMap) -> Iterator[str]:
    """The names in the model, or their beginnings, that can be this name in the file, or lie below it there."""
    yield name
    segments = tuple(name.split("."))
    for rule in key_map.rules:
        for place in rule.files:
            values = _meet(place, segments)
            if values is not None:
                rest = segments[len(place.segments) :]
                yield from (_written(term.place, values, rest) for term in rule.terms)


def _meet(place: Place, segments: tuple[str, ...]) -> dict[str, str] | None:
    """The values of a place's holes, as far as a name or its beginning tells them; None where they can't be one."""
    values: dict[str, str] = {}
    for segment, text in zip(place.segments, segments, strict=False):
        match segment:
            case LiteralSegment(text=literal):
                fits = text == literal
            case SpellingHole(words=words):
                fits = text in words
            case WordHole(name=hole, words=words):
                fits = text in words and values.setdefault(hole, text) == text
            case IndexHole(name=hole):
                fits = index_value(text) is not None and values.setdefault(hole, text) == text
            case ArithmeticHole():
                fits = segment.takes(text)
            case LastHole():
                fits = index_value(text) is not None
        if not fits:
            return None
    return values


def _written(place: Place, values: dict[str, str], rest: tuple[str, ...]) -> str:
    """A place in the model with its holes filled, as far as they can be, and what follows it in the name."""
    written: list[str] = []
    for segment in place.segments:
        text = _text(segment, values)
        if text is None:
            return ".".join(written)
        written.append(text)
    return ".".join((*written, *rest))


def _text(segment: Segment, values: dict[str, str]) -> str | None:
    match segment:
        case LiteralSegment(text=text):
            return text
        case IndexHole(name=name) | WordHole(name=name):
            return values.get(name)
        case _:
            return None
