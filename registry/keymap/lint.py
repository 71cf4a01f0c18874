"""Faults of a key map that show before any checkpoint is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.place import (
    LAST,
    ArithmeticHole,
    IndexHole,
    LiteralSegment,
    Place,
    Segment,
    Where,
    WordHole,
)
from slipcast.registry.keymap.rules import Rule

_MAX_VARIANTS = 256


class Finding(NamedTuple):
    """One fault of a key map.

    Attributes:
        message: what is wrong and what to do, as a sentence.
        where: path of the entry in the document.
    """

    message: str
    where: Where


def lint(key_map: KeyMap) -> tuple[Finding, ...]:
    """Find what is wrong with a key map whatever the model's names are.

    Overlaps that none of the rules resolves, rules that can never act or change nothing, two rules for one tensor of
    the file, holes on one side only, sums that can't be read backwards, and rules for what is dropped or contained.
    """
    rules = key_map.rules
    return (
        *_overlaps(rules),
        *_dead(rules),
        *_idle(rules),
        *_same_sources(rules),
        *_one_sided_holes(rules),
        *_sums_without_inverse(rules),
        *_hidden(key_map),
    )


def lint_all(key_map: KeyMap, naming_maps: Mapping[str, KeyMap]) -> tuple[Finding, ...]:
    """The faults of a family's key map, and of those of its other names."""
    others = (
        Finding(finding.message, ("namings", name, *finding.where))
        for name, other in naming_maps.items()
        for finding in lint(other)
    )
    return (*lint(key_map), *others)


def _targets(rules: Sequence[Rule]) -> list[tuple[Rule, Place]]:
    return [(rule, term.place) for rule in rules for term in rule.terms]


def _overlaps(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Pairs of places in the model that some name could match, of which neither refines the other.

    Two scopes may share a prefix: each of their children needs an entry then, and one without is an error when the
    map is expanded.
    """
    for (rule, place), (rival, other) in combinations(_targets(rules), 2):
        if not place.meets(other) or place.refines(other) is not other.refines(place):
            continue
        if rule.scope and rival.scope and place.refines(other):
            continue
        yield Finding(
            f"{place} (of {_shown(rule)}) and {other} (of {_shown(rival)}) can match the same name in the model, and "
            "neither is more special; make one of them more special, or write the common names out",
            rule.where,
        )


def _dead(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Rules whose every name goes to more special rules."""
    targets = _targets(rules)
    for rule, place in targets:
        rivals = [
            other
            for _, other in targets
            if len(other.segments) == len(place.segments) and other.refines(place) and not place.refines(other)
        ]
        variants = _variants(place)
        if variants and all(any(variant.refines(other) for other in rivals) for variant in variants):
            yield Finding(
                f"{place} can never match: {', '.join(map(str, rivals))} take all of its names; remove it", rule.where
            )


def _variants(place: Place) -> list[Place]:
    """The place with each choice of its words, as literals; empty if there are too many."""
    choices: list[tuple[Segment, ...]] = [
        tuple(map(LiteralSegment, segment.words)) if isinstance(segment, WordHole) else (segment,)
        for segment in place.segments
    ]
    count = 1
    for choice in choices:
        count *= len(choice)
    return [Place(segments) for segments in product(*choices)] if count <= _MAX_VARIANTS else []


def _idle(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Single names without an operation that would be the same without their rule."""
    targets = _targets(rules)
    for rule in rules:
        term = rule.terms[0]
        if rule.scope or len(rule.terms) > 1 or len(rule.files) > 1 or term.operation:
            continue
        wider = [(other, place) for other, place in targets if other is not rule and term.place.refines(place)]
        nearest = [pair for pair in wider if all(pair[1].refines(place) for _, place in wider)]
        if len(nearest) > 1 or (wider and not nearest):
            continue
        if (_carried(*nearest[0], term.place) if nearest else term.place) == rule.files[0]:
            yield Finding(f"{_shown(rule)} says what holds without it; remove it", rule.where)


def _carried(rule: Rule, place: Place, target: Place) -> Place | None:
    """The place in the file that a wider rule gives to a target, or None where it can't be written down."""
    if len(rule.terms) > 1 or len(rule.files) > 1 or rule.terms[0].operation:
        return None
    holes = {
        hole.name: segment
        for hole, segment in zip(place.segments, target.segments, strict=False)
        if isinstance(hole, IndexHole | WordHole)
    }
    segments: list[Segment] = []
    for segment in rule.files[0].segments:
        if isinstance(segment, ArithmeticHole) and not _keeps_names(segment, holes):
            return None
        segments.append(holes[segment.name] if isinstance(segment, IndexHole | WordHole) else segment)
    return Place((*segments, *target.segments[len(place.segments) :]))


def _keeps_names(segment: ArithmeticHole, holes: dict[str, Segment]) -> bool:
    """Whether arithmetic means the same in the wider and in the narrower rule."""
    return all(isinstance(hole := holes.get(name), IndexHole) and hole.name == name for name in segment.names - {LAST})


def _same_sources(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Tensors of the file that two rules give to different tensors of the model."""
    seen: dict[object, Rule] = {}
    for rule in rules:
        if rule.scope:
            continue
        for file in rule.files:
            other = seen.setdefault(_without_names(file), rule)
            if other is not rule:
                yield Finding(f"{_shown(rule)} and {_shown(other)} name the same place in the file", rule.where)


def _without_names(place: Place) -> tuple[object, ...]:
    """A place such that two that differ in the names of their holes alone are equal."""
    numbers: dict[str, int] = {}
    parts: list[object] = []
    for segment in place.segments:
        if isinstance(segment, IndexHole):
            parts.append(numbers.setdefault(segment.name, len(numbers)))
        elif isinstance(segment, WordHole):
            parts.append(frozenset(segment.words))
        else:
            parts.append(segment)
    return tuple(parts)


def _one_sided_holes(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Holes of the model's place that the file's lacks: they are lost on the way to the file."""
    for rule in rules:
        for term, file in product(rule.terms, rule.files):
            used = {segment.name for segment in file.segments if isinstance(segment, IndexHole | WordHole)}
            for segment in file.segments:
                used |= segment.names if isinstance(segment, ArithmeticHole) else set()
            for segment in term.place.segments:
                if isinstance(segment, IndexHole | WordHole) and segment.name not in used:
                    yield Finding(
                        f"{segment} stands in {term.place} and not in {file}: all its values would have one name in "
                        "the file; name it on both sides",
                        rule.where,
                    )


def _sums_without_inverse(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Operations in a sum that can't be undone, since nothing says which rows are whose.

    Where the file is apart and the model fused, the operation would be on the whole, and each of the file's tensors
    some rows of it; no checkpoint needs that, and joining takes the rows as they are.
    """
    for rule in rules:
        if len(rule.terms) == 1 and len(rule.files) == 1:
            continue
        for term in rule.terms:
            if term.operation is not None and len(rule.files) > 1:
                yield Finding(
                    f"{_shown(rule)} has an operation on a sum of the file's tensors, which are joined by rows as they "
                    f"are; leave out {term.operation}",
                    rule.where,
                )
            elif term.operation == "reshape":
                yield Finding(
                    f"{term} in a sum: a tensor of any shape has no rows to be told apart by; leave out reshape",
                    rule.where,
                )


def _hidden(key_map: KeyMap) -> Iterator[Finding]:
    """Rules for tensors that the file's side gives away."""
    for rule in key_map.rules:
        for file in rule.files:
            for drop in key_map.drops:
                if file.refines(drop.place):
                    yield Finding(f"{_shown(rule)} is for what drop: {drop.place} leaves out", rule.where)
            for prefix, family in key_map.contents:
                if f"{file}.".startswith(prefix):
                    yield Finding(f"{_shown(rule)} is for what belongs to {family} ({prefix})", rule.where)


def _shown(rule: Rule) -> str:
    return f"'{rule}'"
