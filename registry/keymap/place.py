"""Places: dotted names with holes, as key maps and expressions write them.

A place is matched segment by segment from the left; what follows it in a name is carried over. Nothing is ever
matched inside a segment, and no regular expression sees a name of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from slipcast.registry.errors import KeyMapError

Where = tuple[str | int, ...]

LAST = "last"
MAX_SEGMENTS = 32
MAX_WORDS = 64
_MAX_INDEX_DIGITS = 9
_LITERAL = re.compile(r"[A-Za-z0-9_-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBERED = re.compile(r"((?:[A-Za-z0-9_-]*[A-Za-z_-])?)\{([^{}]*)\}")
_ARITHMETIC = re.compile(r"\d{1,9}|[A-Za-z_][A-Za-z0-9_]*|[+*-]")


@dataclass(frozen=True, slots=True)
class LiteralSegment:
    """Exactly this text."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class IndexHole:
    """``{i}``: any decimal number without leading zeros."""

    name: str

    def __str__(self) -> str:
        return f"{{{self.name}}}"


@dataclass(frozen=True, slots=True)
class WordHole:
    """``{s=a|b}``: one of these words."""

    name: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{{{self.name}={'|'.join(self.words)}}}"


@dataclass(frozen=True, slots=True)
class LastHole:
    """``{last}``: the greatest index that the model has at this place."""

    def __str__(self) -> str:
        return "{last}"


@dataclass(frozen=True, slots=True)
class ArithmeticHole:
    """``{3*b+1+n}``: an index computed from other holes; ``block{i}``: one behind a word.

    Attributes:
        text: the expression as it was written.
        products: the summands, each a factor and the names that it is multiplied with.
        before: what the index stands behind in its segment.
    """

    text: str
    products: tuple[tuple[int, tuple[str, ...]], ...]
    before: str = ""

    def __str__(self) -> str:
        return f"{self.before}{{{self.text}}}"

    @property
    def names(self) -> frozenset[str]:
        """The holes, and ``last``, that the expression needs."""
        return frozenset(name for _, names in self.products for name in names)

    def value(self, values: Mapping[str, int]) -> int:
        """The sum for these values of the names."""
        total = 0
        for factor, names in self.products:
            product = factor
            for name in names:
                product *= values[name]
            total += product
        return total

    def filled(self, values: Mapping[str, int]) -> str:
        """The segment for these values of the names."""
        return f"{self.before}{self.value(values)}"

    def takes(self, text: str) -> bool:
        """Whether a segment could be this one, whatever the values."""
        return text.startswith(self.before) and index_value(text.removeprefix(self.before)) is not None


@dataclass(frozen=True, slots=True)
class SpellingHole:
    """``{scale|weight}``: spellings of one name; the file decides, and the first is written."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{{{'|'.join(self.words)}}}"


Segment = LiteralSegment | IndexHole | WordHole | LastHole | ArithmeticHole | SpellingHole


@dataclass(frozen=True, slots=True)
class Place:
    """A dotted name with holes; it takes every name that begins with it, at a dot."""

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return ".".join(map(str, self.segments))

    def refines(self, other: Place) -> bool:
        """Whether every name that this place takes is taken by ``other`` too."""
        return len(self.segments) >= len(other.segments) and all(
            _includes(general, special) for general, special in zip(other.segments, self.segments, strict=False)
        )

    def meets(self, other: Place) -> bool:
        """Whether some name could be taken by both places."""
        return all(_can_meet(mine, theirs) for mine, theirs in zip(self.segments, other.segments, strict=False))

    def takes(self, names: tuple[str, ...]) -> bool:
        """Whether a name, split at its dots, lies at or below this place. Not for ``{last}`` and arithmetic."""
        return len(names) >= len(self.segments) and all(
            (text in texts) if (texts := _texts(segment)) is not None else index_value(text) is not None
            for segment, text in zip(self.segments, names, strict=False)
        )


def index_value(text: str) -> int | None:
    """The number that a segment is, or None where it is none. ``007`` is none, since it would not come back."""
    if not text.isdecimal() or not text.isascii() or len(text) > _MAX_INDEX_DIGITS:
        return None
    return int(text) if text[0] != "0" or text == "0" else None


def parse_place(text: str, where: Where = (), error: type[KeyMapError] = KeyMapError) -> Place:
    """Read one place.

    Args:
        text: for example ``"blocks.{i}.attn"``.
        where: path of the entry in its document, for the error.
        error: the class of the error.

    Raises:
        KeyMapError: if a segment is neither a literal nor one of the holes.
    """
    pieces = text.split(".")
    if len(pieces) > MAX_SEGMENTS:
        raise error(
            f"a place of {len(pieces)} segments: {_shortened(text)}",
            expected=f"at most {MAX_SEGMENTS} segments",
            hint="name a module nearer to the root; what follows is carried over",
            where=where,
        )
    return Place(tuple(_parse_segment(piece, text, where, error) for piece in pieces))


def _parse_segment(piece: str, text: str, where: Where, error: type[KeyMapError]) -> Segment:
    if _LITERAL.fullmatch(piece):
        return LiteralSegment(piece)
    numbered = _NUMBERED.fullmatch(piece)
    before, inner = numbered.groups() if numbered is not None else ("", "")
    if before and (products := _parse_arithmetic(inner)):
        return ArithmeticHole(inner, products, before)
    if inner and not before:
        if inner == LAST:
            return LastHole()
        if _NAME.fullmatch(inner):
            return IndexHole(inner)
        if "|" in inner or "=" in inner:
            name, equals, words = inner.rpartition("=")
            if _are_words(words) and (not equals or (_NAME.fullmatch(name) and name != LAST)):
                return WordHole(name, tuple(words.split("|"))) if equals else SpellingHole(tuple(words.split("|")))
        elif products := _parse_arithmetic(inner):
            return ArithmeticHole(inner, products)
    raise error(
        f"{_shortened(piece)!r} in the place {_shortened(text)!r}",
        expected="segments of letters, digits, _ and -, parted by dots, or a hole as a whole segment: {i}, {s=a|b}, "
        "{last}, {a|b}, {2*n+1}; an index also behind a word: block{i}",
        hint="correct the segment; ' + ' and ' -> ' take a space on both sides, and holes have no spaces in them",
        where=where,
    )


def _are_words(text: str) -> bool:
    words = text.split("|")
    return len(words) <= MAX_WORDS and len(set(words)) == len(words) and all(map(_LITERAL.fullmatch, words))


def _parse_arithmetic(text: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The summands of an expression of numbers and names with ``+ - *``; empty where it is not one."""
    tokens = _ARITHMETIC.findall(text)
    operators = [token in "+-*" for token in tokens]
    alternating = all(one != other for one, other in pairwise(operators))
    if "".join(tokens) != text or not tokens or operators[0] or operators[-1] or not alternating:
        return ()
    products: list[tuple[int, tuple[str, ...]]] = []
    for operator, operand in zip(["+", *tokens[1::2]], tokens[::2], strict=True):
        factor, names = products.pop() if operator == "*" else (-1 if operator == "-" else 1, ())
        products.append((factor * int(operand), names) if operand.isdecimal() else (factor, (*names, operand)))
    return tuple(products)


def _texts(segment: Segment) -> frozenset[str] | None:
    """The texts that a segment can be, or None where it is any index."""
    if isinstance(segment, LiteralSegment):
        return frozenset((segment.text,))
    if isinstance(segment, WordHole | SpellingHole):
        return frozenset(segment.words)
    return None


def _includes(general: Segment, special: Segment) -> bool:
    wide, narrow = _texts(general), _texts(special)
    if isinstance(special, ArithmeticHole) and special.before:
        return general == special
    if wide is not None:
        return narrow is not None and narrow <= wide
    if isinstance(general, LastHole):
        return isinstance(special, LastHole)
    return narrow is None or all(index_value(text) is not None for text in narrow)


def _can_meet(one: Segment, other: Segment) -> bool:
    mine, theirs = _texts(one), _texts(other)
    if mine is not None and theirs is not None:
        return not mine.isdisjoint(theirs)
    texts = theirs if mine is None else mine
    return texts is None or any(index_value(text) is not None for text in texts)


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
