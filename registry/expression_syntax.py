"""The grammar of expressions in family files: text in, a tree of frozen values out. Nothing is evaluated here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

from slipcast.registry.errors import ExpressionError
from slipcast.registry.keymap.place import (
    LAST,
    ArithmeticHole,
    IndexHole,
    LastHole,
    Place,
    Where,
    WordHole,
    parse_place,
)

MAX_LENGTH = 1000
MAX_DEPTH = 32
COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
RESERVED = frozenset({"for", "in", "if", "else", "true", "false", "none", LAST})
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
_PLACE_FUNCTIONS = ("size", "count", "has")
_VALUE_FUNCTIONS = ("len", "sqrt")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![A-Za-z0-9_.])"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<symbol>//|==|!=|<=|>=|[-+*<>()\[\],]))"
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, a word, true, false or none."""

    value: int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Name:
    """A helper, an argument that stands before, or the name of a ``for``."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """``values[index]``."""

    values: Name
    index: Expression


@dataclass(frozen=True, slots=True)
class Size:
    """``size(PLACE, axis)``: rows, columns, ... of a tensor."""

    place: Place
    axis: Expression


@dataclass(frozen=True, slots=True)
class Count:
    """``count(PLACE)``: the number of blocks under a prefix."""

    place: Place


@dataclass(frozen=True, slots=True)
class Has:
    """``has(PLACE)``: whether a tensor of that name, or one below it, is there."""

    place: Place


@dataclass(frozen=True, slots=True)
class Length:
    """``len(list)``."""

    values: Expression


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """``sqrt(x)`` of a square number."""

    value: Expression


@dataclass(frozen=True, slots=True)
class Negative:
    """``-x``."""

    value: Expression


@dataclass(frozen=True, slots=True)
class Chain:
    """Operands with operators of one rank between them, evaluated from the left."""

    first: Expression
    rest: tuple[tuple[str, Expression], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """``left operator right``."""

    left: Expression
    operator: str
    right: Expression


@dataclass(frozen=True, slots=True)
class Conditional:
    """``value if condition else other``; only the branch taken is evaluated."""

    value: Expression
    condition: Expression
    other: Expression


@dataclass(frozen=True, slots=True)
class Each:
    """``value for name in source if condition``: a list."""

    value: Expression
    name: str
    source: Expression
    condition: Expression | None


Expression = (
    Constant
    | Name
    | Item
    | Size
    | Count
    | Has
    | Length
    | SquareRoot
    | Negative
    | Chain
    | Comparison
    | Conditional
    | Each
)


def parse_expression(text: str, where: Where = ()) -> Expression:
    """Read one expression.

    Args:
        text: for example ``"size(x_embedder.weight, 1) // 4"``.
        where: path of the entry in its document, for the error.

    Raises:
        ExpressionError: if the text is not an expression, is too long or nested too deep.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"an expression of {len(text)} characters",
            expected=f"at most {MAX_LENGTH}",
            hint="give its parts names under let:",
            where=where,
        )
    return _Parser(text, where).whole()


class _Parser:
    """Recursive descent over one text; it lives for one call of ``parse_expression``."""

    def __init__(self, text: str, where: Where) -> None:
        self._text = text
        self._where = where
        self._at = 0
        self._depth = 0

    def whole(self) -> Expression:
        value = self._each()
        if self._take("for"):
            name = self._name()
            self._expect("in")
            source = self._sum()
            value = Each(value, name, source, self._condition() if self._take("if") else None)
        if self._text[self._at :].strip():
            raise self._error("the end of the expression")
        return value

    def _each(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(
                f"an expression nested more than {MAX_DEPTH} deep: {self._text[:60]}...",
                expected="a few levels",
                hint="give its parts names under let:",
                where=self._where,
            )
        value = self._condition()
        if self._take("if"):
            condition = self._condition()
            self._expect("else")
            value = Conditional(value, condition, self._each())
        self._depth -= 1
        return value

    def _condition(self) -> Expression:
        left = self._sum()
        operator = self._take(*COMPARISONS)
        return Comparison(left, operator, self._sum()) if operator else left

    def _sum(self) -> Expression:
        first = self._product()
        rest = tuple(self._pairs(("+", "-"), self._product))
        return Chain(first, rest) if rest else first

    def _product(self) -> Expression:
        first = self._signed()
        rest = tuple(self._pairs(("*", "//"), self._signed))
        return Chain(first, rest) if rest else first

    def _pairs(self, operators: tuple[str, ...], operand: Callable[[], Expression]) -> Iterator[tuple[str, Expression]]:
        while operator := self._take(*operators):
            yield operator, operand()

    def _signed(self) -> Expression:
        return Negative(self._atom()) if self._take("-") else self._atom()

    def _atom(self) -> Expression:
        if self._take("("):
            value = self._each()
            self._expect(")")
            return value
        kind, token, end = self._peek()
        if kind == "number":
            self._at = end
            return Constant(self._number(token))
        if kind != "name" or token in RESERVED - _CONSTANTS.keys():
            raise self._error("a number, a name, a function or a bracket")
        self._at = end
        if token in _CONSTANTS:
            return Constant(_CONSTANTS[token])
        if self._take("("):
            return self._call(token)
        if self._take("["):
            index = self._each()
            self._expect("]")
            return Item(Name(token), index)
        return Name(token)

    def _call(self, function: str) -> Expression:
        if function == "text":
            return Constant(self._raw(")"))
        if function in _PLACE_FUNCTIONS:
            place = self._place(self._raw("," if function == "size" else ")"))
            if function == "size":
                axis = self._each()
                self._expect(")")
                return Size(place, axis)
            return Count(place) if function == "count" else Has(place)
        if function in _VALUE_FUNCTIONS:
            value = self._each()
            self._expect(")")
            return Length(value) if function == "len" else SquareRoot(value)
        raise ExpressionError(
            f"the function {function!r} in {self._text!r}",
            expected="one of size, count, has, len, sqrt, text",
            hint="take one of these; there are no others",
            where=self._where,
        )

    def _raw(self, closing: str) -> str:
        """The text up to the closing character, which is taken too."""
        end = self._text.find(closing, self._at)
        raw = self._text[self._at : end].strip() if end >= 0 else ""
        if not raw or any(character in raw for character in "(),"):
            raise self._error(f"a word or a place, and {closing!r} after it")
        self._at = end + 1
        return raw

    def _place(self, text: str) -> Place:
        place = parse_place(text, self._where, ExpressionError)
        for segment in place.segments:
            last = isinstance(segment, LastHole) or (isinstance(segment, ArithmeticHole) and LAST in segment.names)
            if last or isinstance(segment, WordHole):
                raise ExpressionError(
                    f"{segment} in the place {text!r} of an expression",
                    expected="literals, {name}, {2*name+1} and spellings {a|b}",
                    hint="count(...) - 1 is the last index; words need a line each",
                    where=self._where,
                )
        return place

    def _number(self, token: str) -> int | float:
        if len(token) <= 18:
            value = int(token) if token.isdecimal() else float(token)
            if isfinite(value):
                return value
        raise ExpressionError(
            f"the number {token[:24]} in {self._text[:60]!r}",
            expected="a finite number of at most 18 characters",
            hint="no size of a model is that great",
            where=self._where,
        )

    def _name(self) -> str:
        kind, token, end = self._peek()
        if kind != "name" or token in RESERVED:
            raise self._error("a name")
        self._at = end
        return token

    def _peek(self) -> tuple[str | None, str, int]:
        match = _TOKEN.match(self._text, self._at)
        return (match.lastgroup, match[match.lastgroup or 0], match.end()) if match else (None, "", self._at)

    def _take(self, *tokens: str) -> str:
        """The next token if it is one of these, else an empty text and nothing is taken."""
        _, token, end = self._peek()
        if token not in tokens:
            return ""
        self._at = end
        return token

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._error(repr(token))

    def _error(self, expected: str) -> ExpressionError:
        rest = self._text[self._at :].strip()
        found = f"{rest[:40]!r} in {self._text!r}" if rest else f"the end of {self._text!r}"
        return ExpressionError(
            found,
            expected=expected,
            hint="the expression can't be read from there on; see docs/key-map.md for the grammar",
            where=self._where,
        )


def names_used(expression: Expression) -> frozenset[str]:
    """The names that an expression takes from outside: helpers and arguments before it."""
    match expression:
        case Name(name):
            return frozenset((name,))
        case Constant():
            return frozenset()
        case Item(values, index):
            return names_used(values) | names_used(index)
        case Size(place, axis):
            return names_of(place) | names_used(axis)
        case Count(place) | Has(place):
            return names_of(place)
        case Length(value) | SquareRoot(value) | Negative(value):
            return names_used(value)
        case Chain(first, rest):
            return names_used(first).union(*(names_used(operand) for _, operand in rest))
        case Comparison(left, _, right):
            return names_used(left) | names_used(right)
        case Conditional(value, condition, other):
            return names_used(value) | names_used(condition) | names_used(other)
        case Each(value, name, source, condition):
            inner = names_used(value) | (names_used(condition) if condition else frozenset())
            return (inner - {name}) | names_used(source)


def names_of(place: Place) -> frozenset[str]:
    """The names that the holes of a place in an expression take their values from."""
    names: frozenset[str] = frozenset()
    for segment in place.segments:
        if isinstance(segment, IndexHole):
            names |= {segment.name}
        elif isinstance(segment, ArithmeticHole):
            names |= segment.names
    return names
