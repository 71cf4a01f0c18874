"""Expressions of family files: constructor arguments and conditions, computed from the names and shapes of a header.

They are evaluated by walking a parsed tree: no code of a file is run, and every number and list is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipcast.registry.errors import ExpressionError
from slipcast.registry.expression_evaluation import Evaluation, Shapes, unknown_name
from slipcast.registry.expression_syntax import Expression, names_used, parse_expression
from slipcast.registry.header import Shape
from slipcast.registry.keymap.place import Where

MAX_NESTING = 16
MAX_ENTRIES = 1024

Config = dict[str, object]


def evaluate_config(config: Mapping[str, object], let: Mapping[str, object], shapes: Mapping[str, Shape]) -> Config:
    """The constructor arguments that a header shows.

    Strings are expressions; numbers, true, false and null stand for themselves; lists and mappings are evaluated
    item by item. An entry may use the names before it: all of ``let``, and those of ``config`` above it; inside a
    nested mapping also the ones above it there.

    Args:
        config: the section ``config:`` of a family file.
        let: the section ``let:``, helper values.
        shapes: logical shapes by native name.

    Returns:
        Argument to value, in the order of ``config``.

    Raises:
        ExpressionError: if an expression can't be read, a tensor or name is missing, a division doesn't come out
            even, or a value has the wrong kind or is out of bounds.
    """
    _check_extent(let, ("let",))
    _check_extent(config, ("config",))
    header = Shapes(shapes)
    names: dict[str, object] = {}
    _evaluate_mapping(let, names, header, ("let",))
    return _evaluate_mapping(config, names, header, ("config",))


def check_config(config: Mapping[str, object], let: Mapping[str, object], where: Where = ("config",)) -> None:
    """Read every expression of the two sections, and see that each name in them is defined before it is used.

    Args:
        config: the section ``config``.
        let: the section ``let``.
        where: the place of ``config`` in its file.

    Raises:
        ExpressionError: as :func:`evaluate_config` does, for all that can be said without a header.
    """
    _check_extent(let, ("let",))
    _check_extent(config, where)
    names = _check_entries(let, frozenset(), ("let",))
    _check_entries(config, names, where)


def parse_condition(condition: str, where: Where = ()) -> Expression:
    """Read a condition on a header, such as ``size(x_embedder.weight, 0) == 3840``.

    Raises:
        ExpressionError: if it can't be read, or uses a name: there are none beside tensors.
    """
    expression = parse_expression(condition, where)
    _check_names(expression, frozenset(), condition, where)
    return expression


def holds(condition: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether a condition is true of a header.

    A header that can't answer (a tensor is missing or has too few dimensions, blocks are not numbered from 0) does not
    satisfy it.

    Args:
        condition: an expression that is true or false.
        shapes: logical shapes by native name.

    Raises:
        ExpressionError: if the condition itself can't be read.
    """
    expression = parse_condition(condition)
    try:
        return Evaluation({}, Shapes(shapes), condition, ()).value(expression) is True
    except ExpressionError:
        return False


def _evaluate_mapping(entries: Mapping[str, object], names: dict[str, object], header: Shapes, where: Where) -> Config:
    """Evaluate entries in order; ``names`` takes up each one as it is known."""
    values: Config = {}
    for key, entry in entries.items():
        values[key] = names[key] = _evaluate_entry(entry, names, header, (*where, key))
    return values


def _evaluate_entry(entry: object, names: dict[str, object], header: Shapes, where: Where) -> object:
    if isinstance(entry, str):
        return Evaluation(names, header, entry, where).value(parse_expression(entry, where))
    if isinstance(entry, Mapping):
        return _evaluate_mapping(entry, dict(names), header, where)
    if isinstance(entry, Sequence):
        return [_evaluate_entry(item, names, header, (*where, number)) for number, item in enumerate(entry)]
    return _scalar(entry, where)


def _check_entries(entries: Mapping[str, object], names: frozenset[str], where: Where) -> frozenset[str]:
    for key, entry in entries.items():
        _check_entry(entry, names, (*where, key))
        names |= {key}
    return names


def _check_entry(entry: object, names: frozenset[str], where: Where) -> None:
    if isinstance(entry, str):
        _check_names(parse_expression(entry, where), names, entry, where)
    elif isinstance(entry, Mapping):
        _check_entries(entry, names, where)
    elif isinstance(entry, Sequence):
        for number, item in enumerate(entry):
            _check_entry(item, names, (*where, number))
    else:
        _scalar(entry, where)


def _check_extent(section: Mapping[str, object], where: Where) -> None:
    """Refuse what aliases can blow up: too many values, or nested too deep."""
    waiting: list[tuple[int, object]] = [(1, section)]
    for count in range(MAX_ENTRIES + 1):
        if not waiting:
            return
        depth, entry = waiting.pop()
        if depth > MAX_NESTING or count == MAX_ENTRIES:
            break
        if isinstance(entry, Mapping):
            waiting += [(depth + 1, value) for value in entry.values()]
        elif isinstance(entry, Sequence) and not isinstance(entry, str):
            waiting += [(depth + 1, value) for value in entry]
    raise ExpressionError(
        f"more than {MAX_ENTRIES} values, or values nested more than {MAX_NESTING} deep",
        expected="the arguments of one model class",
        hint="shorten the section; an alias may not contain itself, and counts twice where it stands twice",
        where=where,
    )


def _scalar(entry: object, where: Where) -> object:
    if entry is None or isinstance(entry, bool | int | float):
        return entry
    raise ExpressionError(
        f"a value of the kind {type(entry).__name__}",
        expected="a number, true, false, null, an expression, a list or a mapping",
        hint="write it as an expression; text(...) is for words",
        where=where,
    )


def _check_names(expression: Expression, names: frozenset[str], text: str, where: Where) -> None:
    for name in sorted(names_used(expression) - names):
        raise unknown_name(name, names, text, where)
