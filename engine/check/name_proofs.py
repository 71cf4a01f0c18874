"""The proof of where names come from: what no recorded header and no converter shows has a source that is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from slipcast.engine.check.converter_proof import conversions
from slipcast.engine.check.header_proofs import NO_RECORDS
from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.subject import Case, Subject
from slipcast.engine.check.value_proofs import differing
from slipcast.registry.errors import CheckError
from slipcast.registry.expression import parse_condition
from slipcast.registry.expression_syntax import Has
from slipcast.registry.family import NATIVE_NAMES
from slipcast.registry.keymap.matching import RuleTree
from slipcast.registry.keymap.operations import word_of
from slipcast.registry.keymap.place import (
    IndexHole,
    LiteralSegment,
    Place,
    Segment,
    SpellingHole,
    WordHole,
    parse_place,
)
from slipcast.registry.keymap.rules import Rule
from slipcast.registry.names import Names
from slipcast.registry.strict_yaml import Where

_ORDERED = frozenset({"swap_halves", "transpose", "interleave", "deinterleave", "plus_one", "minus_one"})
"""Operations that no shape shows: without them a rule would fit as well."""

_LENIENT = frozenset({"reshape", "flat"})
"""Operations that also take the model's shape: what needs them is a file with another."""


Spelt = tuple[int, int, int]
"""The number of a rule, of one of its places in the file, and of a spelling of that."""


@dataclass(frozen=True)
class Doubt:
    """What nothing shows but the family file itself.

    Attributes:
        where: the entry that says it.
        place: a place in the file, in one of its spellings.
        what: ``name``; ``order`` where the name is shown, but not which part lies where; ``shape`` where nothing has
            another shape in the file than in the model.
        excused: whether the file says, with the reason, that the converter has it wrong.
    """

    where: Where
    place: Place
    what: str
    excused: bool = False


def prove_names(subject: Subject) -> Outcome:
    """Names, and orders of parts, that the family file states are shown by a header or a converter, or have a source.

    That is every name of the key map, every name that speaks against a claim, and every one that a condition asks for.
    """
    if subject.records is None:
        return skipped(NO_RECORDS)
    rules = subject.family.key_map.rules
    try:
        doubts = (*doubts_of(subject), *_unknown_evidence(subject))
    except CheckError:
        return skipped("diffusers' converter fails; see the proof 'converter'")
    sourced = {text: [doubt for doubt in doubts if covers(text, doubt)] for text in subject.family.sources}
    open_ = [
        doubt for doubt in doubts if not doubt.excused and not any(doubt in covered for covered in sourced.values())
    ]
    if open_:
        raise _refuted(subject, open_)
    own = subject.documents[0].lines  # the sources of the family that it extends are needed there
    for text, covered in sourced.items():
        if not covered and ("sources", text) in own:
            raise subject.refuted(
                f"what {text!r} covers is shown by a recorded header or by diffusers' converter",
                expected="names, or orders of parts, that nothing else shows",
                hint="remove the entry",
                where=("sources", text),
            )
    named = sum(map(len, sourced.values()))
    others = f"; {named} by the file's sources" if named else ""
    if not rules:
        return proved(f"the file's names are the model's{others}")
    return proved(f"{len(rules)} rules, shown by recorded headers and diffusers' converter{others}")


def _refuted(subject: Subject, doubts: list[Doubt]) -> CheckError:
    first = doubts[0]
    what = {"name": "the name", "order": "the order of the parts of", "shape": "another shape in the file of"}
    return subject.refuted(
        f"nothing shows {what[first.what]} {str(first.place)!r}: neither a recorded header nor diffusers' converter",
        expected="a header or a converter that shows it, or a source",
        hint="correct it, add an example, or say under sources: where it comes from",
        where=first.where,
        items=[f"{subject.at(doubt.where)}: the {doubt.what} {doubt.place}" for doubt in doubts[1:]],
    )


def _is_excused(subject: Subject, rule: Rule) -> bool:
    """Whether the file says of a rule's tensors, with the reason, that the converter has them wrong."""
    texts = subject.family.tiny.converter_differs if subject.family.tiny is not None else ()
    places = [(parse_place(text), term.place) for text in texts for term in rule.terms]
    return any(excused.refines(place) or place.refines(excused) for excused, place in places)


def covers(text: str, doubt: Doubt) -> bool:
    """Whether a source settles a doubt: of a name one that spells the whole of it, else also the beginning of it."""
    source = parse_place(text)
    return doubt.place.refines(source) and (doubt.what != "name" or len(doubt.place.segments) == len(source.segments))


def doubts_of(subject: Subject) -> tuple[Doubt, ...]:
    """What neither a recorded native header nor diffusers' converter shows of the rules of a family's own file."""
    rules = subject.family.key_map.rules
    tree = RuleTree(rules)
    seen = {seen for case in subject.cases for seen in _seen(case, tree)}
    reshaped = {number for case in subject.cases for number in _reshaped(case, tree)}
    agreed = set(_agreed(subject, tree))
    own = subject.documents[0].lines
    doubts: list[Doubt] = []
    for number, rule in enumerate(rules):
        if rule.where[:2] not in own or rule.scope:
            continue
        excused = _is_excused(subject, rule)
        for file, place in enumerate(rule.files):
            for spelling, spelt in enumerate(_spellings(place)):
                # The converter knows the first spelling; that of another is shown by a header alone.
                if (
                    (number, file, spelling) not in seen
                    and (spelling or number not in agreed)
                    and not _is_recorded(subject, spelt)
                ):
                    doubts.append(Doubt(rule.where, spelt, "name", excused))
                elif not spelling and number not in agreed and _has_order(rule):
                    doubts.append(Doubt(rule.where, spelt, "order", excused))
                elif not spelling and number not in reshaped and _is_lenient(rule, number in agreed):
                    doubts.append(Doubt(rule.where, spelt, "shape", excused))
    return tuple(doubts)


def _unknown_evidence(subject: Subject) -> Iterator[Doubt]:
    """Names that speak against a claim and that no recorded header has, and those asked for that no model has."""
    family, own = subject.family, subject.documents[0].lines
    for number, name in enumerate(family.identify.hasnt if ("identify", "hasnt") in own else ()):
        if not _is_recorded(subject, parse_place(name)):
            yield Doubt(("identify", "hasnt", number), parse_place(name), "name")
    models = [Names({**family.key_map.native_view(one.built.shapes), **one.beside}) for one in subject.small]
    for number, condition in enumerate(family.identify.where if ("identify", "where") in own else ()):
        for place in _asked_for(parse_condition(condition)):
            if not any(model.is_there(str(place)) for model in models):
                yield Doubt(("identify", "where", number), place, "name")


def _is_recorded(subject: Subject, place: Place) -> bool:
    """Whether recorded headers of any family, under its prefix, have a place's names, of blocks those of the first."""
    assert subject.records is not None  # the proof is skipped without
    headers = [subject.records.shapes(name) for name in subject.records.names]
    names = _names_in(place.segments)
    prefixes = {prefix for family in subject.catalogue.values() for prefix in family.prefixes}
    return bool(names) and all(
        any(header.is_there(prefix + name) for header in headers for prefix in prefixes) for name in names
    )


def _names_in(segments: tuple[Segment, ...]) -> list[str]:
    """The names that a place takes, of blocks the first ones; none where an index is reckoned."""
    names = [""]
    for segment in segments:
        match segment:
            case LiteralSegment():
                words: tuple[str, ...] = (segment.text,)
            case WordHole():
                words = segment.words
            case IndexHole():
                words = ("0",)
            case _:
                return []
        names = [f"{name}.{word}" if name else word for name in names for word in words]
    return names


def _asked_for(expression: object) -> Iterator[Place]:
    """The places in ``has()``, anywhere in an expression; a condition holds all the same where one is wrong."""
    if isinstance(expression, Has):
        yield expression.place
    elif isinstance(expression, tuple):
        for part in expression:
            yield from _asked_for(part)
    elif is_dataclass(expression):
        for field in fields(expression):
            yield from _asked_for(getattr(expression, field.name))


def _has_order(rule: Rule) -> bool:
    return len(rule.files) + len(rule.terms) > 2 or any(
        (term.operation or "").partition("/")[0] in _ORDERED for term in rule.terms
    )


def _is_lenient(rule: Rule, agreed: bool) -> bool:
    """Whether it takes a shape that nothing shows; a converter that agrees has read what ``flat`` writes."""
    words = {word_of(term.operation) for term in rule.terms}
    return bool(words & _LENIENT) and not (agreed and "reshape" not in words)


def _spellings(place: Place) -> list[Place]:
    """A place in each of its spellings."""
    for at, segment in enumerate(place.segments):
        if isinstance(segment, SpellingHole):
            before, after = place.segments[:at], place.segments[at + 1 :]
            return [
                one
                for word in segment.words
                for one in _spellings(Place((*before, *parse_place(word).segments, *after)))
            ]
    return [place]


def _seen(case: Case, tree: RuleTree) -> Iterator[Spelt]:
    """What a native example shows."""
    if case.match is not None and case.built is not None and case.match.layout == NATIVE_NAMES:
        for name, match in tree.match(case.built.shapes):
            if match is not None and match.term is not None:
                tail = name[match.length :]
                for file, spellings in enumerate(match.files):
                    for spelling, text in enumerate(spellings):
                        if text + tail in case.match.bundles:
                            yield match.term[0], file, spelling


def _reshaped(case: Case, tree: RuleTree) -> Iterator[int]:
    """The rules of which a native example has a tensor in another shape than the model."""
    if case.match is not None and case.built is not None and case.match.layout == NATIVE_NAMES:
        for name, match in tree.match(case.built.shapes):
            if match is not None and match.term is not None and len(match.files) == 1:
                files = [text + name[match.length :] for text in match.files[0]]
                have = [case.match.bundles[file].shape for file in files if file in case.match.bundles]
                if have and have[0] != case.built.shapes[name]:
                    yield match.term[0]


def _agreed(subject: Subject, tree: RuleTree) -> Iterator[int]:
    """The rules that diffusers' converter confirms."""
    for one in conversions(subject):
        differ = set(differing(one.values, one.theirs))
        for name, match in tree.match(one.values):
            if match is not None and match.term is not None and name not in differ:
                yield match.term[0]
