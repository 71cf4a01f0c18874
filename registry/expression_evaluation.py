"""The evaluation of parsed expressions on the names and shapes of a header. Every number and list is bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from math import isqrt
from typing import NoReturn, TypeVar

from slipcast.registry.errors import ExpressionError
from slipcast.registry.expression_syntax import (
    Chain,
    Comparison,
    Conditional,
    Constant,
    Count,
    Each,
    Expression,
    Has,
    Item,
    Length,
    Name,
    Negative,
    Size,
    SquareRoot,
)
from slipcast.registry.header import Shape
from slipcast.registry.keymap.place import (
    ArithmeticHole,
    IndexHole,
    LiteralSegment,
    Place,
    SpellingHole,
    Where,
    index_value,
)

MAX_ITEMS = 1024
MAX_NUMBER = 10**18
_NEAREST_AMONG = 200

_Number = TypeVar("_Number", int, float)


class Shapes:
    """The names and shapes of a header, as expressions ask for them."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._indices: dict[str, frozenset[int]] = {}

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self._shapes)

    def get(self, name: str) -> Shape | None:
        """The shape of a tensor, or None where it is missing."""
        return self._shapes.get(name)

    def below(self, prefix: str) -> Iterator[str]:
        """The names below a dotted prefix, without it."""
        start = f"{prefix}." if prefix else ""
        for position in range(bisect_left(self._names, start), len(self._names)):
            name = self._names[position]
            if not name.startswith(start):
                return
            yield name[len(start) :]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, or one below it."""
        return name in self._shapes or next(self.below(name), None) is not None

    def indices(self, prefix: str) -> frozenset[int]:
        """The distinct numbers that follow a dotted prefix."""
        if prefix not in self._indices:
            values = (index_value(rest.partition(".")[0]) for rest in self.below(prefix))
            self._indices[prefix] = frozenset(value for value in values if value is not None)
        return self._indices[prefix]

    def numbers_behind(self, name: str) -> frozenset[int]:
        """The distinct numbers that stand right behind a dotted name, as in ``blocks.block0``."""
        parent, _, word = name.rpartition(".")
        texts = (rest.partition(".")[0] for rest in (self.below(parent) if parent else self._shapes))
        values = (index_value(text.removeprefix(word)) for text in texts if text.startswith(word))
        return frozenset(value for value in values if value is not None)

    def nearest(self, name: str) -> list[str]:
        """Up to three names that are there and look like this one."""
        prefix = name
        while prefix and not self.has(prefix):
            prefix = prefix.rpartition(".")[0]
        start = f"{prefix}." if prefix else ""
        candidates = [start + rest for rest, _ in zip(self.below(prefix), range(_NEAREST_AMONG), strict=False)]
        return get_close_matches(name, candidates, 3) or candidates[:3]


class Evaluation:
    """The evaluation of one entry: its tree is walked, and only the branches taken."""

    def __init__(self, names: Mapping[str, object], header: Shapes, text: str, where: Where) -> None:
        self._names = names
        self._header = header
        self._text = text
        self._where = where

    def value(self, expression: Expression) -> object:
        """What an expression is for this header and these names."""
        match expression:
            case Constant(value):
                return value
            case Name(name):
                return self._named(name)
            case Item(values, index):
                return self._item(values, index)
            case Size(place, axis):
                return self._size(place, axis)
            case Count(place):
                return self._count(place)
            case Has(place):
                return any(map(self._header.has, self._spellings(place)))
            case Length(values):
                return len(self._list(values))
            case SquareRoot(value):
                return self._square_root(value)
            case Negative(value):
                return self._bounded(-self._number(value))
            case Chain(first, rest):
                return self._chain(first, rest)
            case Comparison(left, operator, right):
                return self._compare(left, operator, right)
            case Conditional(value, condition, other):
                return self.value(value if self._is_true(condition) else other)
            case Each():
                return self._each(expression)

    def _named(self, name: str) -> object:
        if name not in self._names:
            raise unknown_name(name, tuple(self._names), self._text, self._where)
        return self._names[name]

    def _each(self, each: Each) -> list[object]:
        source = self.value(each.source)
        if isinstance(source, int) and not isinstance(source, bool):
            if not 0 <= source <= MAX_ITEMS:
                self._fail(f"a list of {source} items", f"from 0 to {MAX_ITEMS}", "no model has so many blocks")
            source = list(range(source))
        if not isinstance(source, list):
            self._fail(f"'for {each.name} in' {_kind(source)}", "a whole number or a list", "count(...) gives a number")
        items: list[object] = []
        for item in source:
            inner = Evaluation({**self._names, each.name: item}, self._header, self._text, self._where)
            if each.condition is None or inner._is_true(each.condition):
                items.append(inner.value(each.value))
        return items

    def _chain(self, first: Expression, rest: tuple[tuple[str, Expression], ...]) -> int | float:
        total = self._number(first)
        for operator, operand in rest:
            number = self._number(operand)
            if operator == "//":
                total = self._quotient(total, number)
            else:
                total = total * number if operator == "*" else total + (number if operator == "+" else -number)
            self._bounded(total)
        return total

    def _quotient(self, total: float, divisor: float) -> int:
        if not isinstance(total, int) or not isinstance(divisor, int) or divisor == 0 or total % divisor:
            self._fail(
                f"{total} // {divisor}, which doesn't come out even",
                "whole numbers, and a division without remainder",
                "the header is of another family or variant, or the divisor is wrong",
            )
        return total // divisor

    def _square_root(self, value: Expression) -> int:
        number = self._number(value)
        if not isinstance(number, int) or number < 0 or isqrt(number) ** 2 != number:
            self._fail(f"sqrt({number})", "a square number", "the header is of another family or variant")
        return isqrt(number)

    def _compare(self, left: Expression, operator: str, right: Expression) -> bool:
        if operator in ("==", "!="):
            return (self.value(left) == self.value(right)) is (operator == "==")
        one, other = self._number(left), self._number(right)
        if operator in ("<", ">="):
            return (one < other) is (operator == "<")
        return (one > other) is (operator == ">")

    def _size(self, place: Place, axis: Expression) -> int:
        names = self._spellings(place)
        shape = next((shape for name in names if (shape := self._header.get(name)) is not None), None)
        if shape is None:
            raise ExpressionError(
                f"no tensor {' or '.join(names)}, of which {self._text!r} asks the size",
                expected="a tensor of that name in the file",
                hint="correct the name; where it may be missing write 'size(x, 0) if has(x) else none'",
                items=self._header.nearest(names[0]),
                where=self._where,
            )
        number = self.value(axis)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(shape):
            self._fail(
                f"axis {number} of {names[0]}, whose shape is {list(shape)}",
                f"an axis from 0 to {len(shape) - 1}",
                "correct the axis, or the name",
            )
        return self._bounded(shape[number])

    def _count(self, place: Place) -> int:
        last = place.segments[-1]
        names = self._spellings(place)
        name = next((name for name in names if self._header.has(name)), names[0])
        behind = isinstance(last, ArithmeticHole) and bool(last.before)
        if behind:
            name = name.rstrip("0123456789")
        indices = self._header.numbers_behind(name) if behind else self._header.indices(name)
        if indices and max(indices) >= len(indices):
            missing = sorted(set(range(len(indices))) - indices)
            self._fail(
                f"blocks of {name} that are not numbered from 0 on: {len(indices)} of them, without {missing[0]}",
                f"{name}{'' if behind else '.'}0 to {name}{'' if behind else '.'}{len(indices) - 1}",
                "read all shards of a sharded file together; count(...) is for lists of blocks only",
            )
        return len(indices)

    def _spellings(self, place: Place) -> list[str]:
        choices: list[tuple[str, ...]] = []
        for segment in place.segments:
            if isinstance(segment, LiteralSegment):
                choices.append((segment.text,))
            elif isinstance(segment, SpellingHole):
                choices.append(segment.words)
            elif isinstance(segment, ArithmeticHole):
                values = {name: self._index(name) for name in segment.names}
                choices.append((segment.filled(values),))
            elif isinstance(segment, IndexHole):
                choices.append((str(self._index(segment.name)),))
        return [".".join(texts) for texts in product(*choices)]

    def _index(self, name: str) -> int:
        value = self._named(name)
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(f"{{{name}}}, which is {_kind(value)}", "a whole number", "take another name for the hole")
        return value

    def _item(self, values: Name, index: Expression) -> object:
        items, number = self._list(values), self.value(index)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(items):
            self._fail(
                f"{values.name}[{number}] of a list of {len(items)}", "an index from 0 on", "len(...) is its length"
            )
        return items[number]

    def _list(self, expression: Expression) -> list[object]:
        value = self.value(expression)
        if not isinstance(value, list):
            self._fail(f"{_kind(value)} where a list belongs", "a list", "a 'for' makes one")
        return value

    def _is_true(self, condition: Expression) -> bool:
        value = self.value(condition)
        if not isinstance(value, bool):
            self._fail(f"{_kind(value)} as a condition", "true or false", "compare it with something: count(x) > 0")
        return value

    def _number(self, expression: Expression) -> int | float:
        value = self.value(expression)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"{_kind(value)} where a number belongs", "a number", "'... if has(x) else 0' gives one always")
        return value

    def _bounded(self, number: _Number) -> _Number:
        if not -MAX_NUMBER <= number <= MAX_NUMBER:
            self._fail(f"the number {number:.3e}", f"at most {MAX_NUMBER:.0e}", "no size of a model is that great")
        return number

    def _fail(self, found: str, expected: str, hint: str) -> NoReturn:
        raise ExpressionError(f"{found}, in {self._text!r}", expected=expected, hint=hint, where=self._where)


def _kind(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the word {value!r}"
    return f"the number {value}" if isinstance(value, int | float) else "a list or a mapping"


def unknown_name(name: str, names: Collection[str], text: str, where: Where) -> ExpressionError:
    """The error of a name that nothing defines."""
    nearest = get_close_matches(name, sorted(names), 3)
    return ExpressionError(
        f"the name {name!r} in {text!r}",
        expected="a name that let: or config: defines before it"
        + (f", such as {', '.join(nearest)}" if nearest else ""),
        hint="define it above, correct it, or write text(...) for a word",
        where=where,
    )
