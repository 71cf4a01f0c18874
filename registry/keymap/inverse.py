"""Rules read from the file's side: which of the model's tensors each name is, where the model is not known yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.operations import has_inverse, inverse
from slipcast.registry.keymap.place import (
    ArithmeticHole,
    LastHole,
    LiteralSegment,
    Place,
    Segment,
    SpellingHole,
)
from slipcast.registry.keymap.rules import Rule, RuleTerm


def inverted(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules with their sides exchanged.

    Raises:
        KeyMapError: a rule that only the model's names can tell: a sum, arithmetic, ``{last}``, or a view.
    """
    return tuple(other for rule in rules for other in _inverted(rule))


def _inverted(rule: Rule) -> Iterator[Rule]:
    (term, *terms), (file, *files) = rule.terms, rule.files
    holes = (ArithmeticHole, LastHole)
    computed = any(isinstance(segment, holes) for segment in (*file.segments, *term.place.segments))
    if terms or files or computed or not has_inverse(term.operation):
        raise KeyMapError(
            f"'{rule}' in a naming, which is read before the model is known",
            expected="a name for a name, with operations that keep the number of dimensions",
            hint="a sum, arithmetic, {last} and views belong in keys:",
            where=rule.where,
        )
    for place in _spelled(file):
        yield Rule((term.place,), (RuleTerm(place, inverse(term.operation)),), scope=rule.scope, where=rule.where)


def _spelled(place: Place) -> Iterator[Place]:
    """The place once for each choice of its spellings."""
    choices: list[tuple[Segment, ...]] = [
        tuple(map(LiteralSegment, segment.words)) if isinstance(segment, SpellingHole) else (segment,)
        for segment in place.segments
    ]
    return (Place(segments) for segments in product(*choices))
