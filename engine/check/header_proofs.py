"""Proofs on recorded headers: whose they are, and whose they are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.subject import Case, Subject
from slipcast.registry.claims import ask
from slipcast.registry.errors import CheckError, SlipcastError
from slipcast.registry.header import Checkpoint
from slipcast.registry.identify import Match, identify
from slipcast.registry.names import Names
from slipcast.registry.quantisation import Bundle

NO_RECORDS = "the recorded headers are not here; name their folder with --headers"
NO_EXAMPLES = "the family file has no examples; they come once a header is recorded"
NO_MODEL = "the family file has neither examples nor a section tiny, which needs no recorded header"
NOTHING_BUILT = "no model could be built"


def why_no_cases(subject: Subject) -> str:
    """Why a subject has no examples."""
    return NO_RECORDS if subject.records is None else NO_EXAMPLES


def why_nothing_built(subject: Subject) -> str:
    """Why there is no model of a subject's class, neither of an example nor a small one."""
    if subject.cases or subject.tiny_problem is not None:
        return NOTHING_BUILT
    return NO_RECORDS if subject.records is None and subject.family.examples else NO_MODEL


def prove_recognised(subject: Subject) -> Outcome:
    """Each example is recognised as this family, as it is expected, and by no other."""
    if not subject.cases:
        return skipped(why_no_cases(subject))
    for case in subject.cases:
        _prove_recognised(subject, case)
    return proved(f"{len(subject.cases)} examples, each by this family alone")


def _prove_recognised(subject: Subject, case: Case) -> None:
    name = case.example.header
    if case.header is None:
        assert case.problem is not None  # a header that is missing has a reason
        raise _wrong(subject, case, "header", f"no record {name}: {case.problem.found}")
    try:
        matches = identify(Checkpoint(case.header.path, MappingProxyType({"": case.header})), subject.catalogue)
    except SlipcastError as problem:
        items = [*problem.items, f"expected: {problem.expected}"]
        raise _wrong(subject, case, "header", f"{name}: {problem.found}", items) from problem
    own = [match for match in matches if match.family.id == subject.family.id]
    if not own:
        others = ", ".join(match.family.id for match in matches)
        raise _wrong(subject, case, "header", f"{name} is recognised as {others}")
    expect = case.example.expect
    seen = {"layout": (own[0].layout, expect.layout), "format": (_format(own[0]), expect.format)}
    if expect.variant is not None:
        seen["variant"] = (own[0].variant, expect.variant)
    for field, (value, wanted) in seen.items():
        if value != wanted:
            raise _wrong(subject, case, f"expect.{field}", f"{name} has the {field} {value}, not {wanted}")


def _format(match: Match) -> str:
    """The format of most quantised elements, or plain; a file may have as many biases in another as weights in one."""
    counts: Counter[str] = Counter()
    for bundle in match.bundles.values():
        if not bundle.is_plain:
            counts[bundle.format] += prod(bundle.shape)
    return counts.most_common(1)[0][0] if counts else "plain"


def _wrong(subject: Subject, case: Case, field: str, found: str, items: Sequence[str] = ()) -> CheckError:
    return subject.refuted(
        found,
        expected="each example recognised as this family, as it is expected, and by no other",
        hint="correct the example, or identify:, variants: and prefixes:",
        where=("examples", case.number, *field.split(".")),
        items=items,
    )


def prove_others(subject: Subject) -> Outcome:
    """No other recorded header is claimed."""
    if subject.records is None:
        return skipped(NO_RECORDS)
    own = {example.header for example in subject.family.examples}
    others = [name for name in subject.records.names if name not in own]
    claimed = [name for name in others if _claims(subject, subject.records.bundles(name).weights)]
    if claimed:
        raise subject.refuted(
            f"the evidence is found in {len(claimed)} headers that are no examples of this family",
            expected="evidence that only checkpoints of this family have",
            hint="add a name that they lack to has, or one that only they have to hasnt; or name them as examples",
            where=("identify", "has"),
            items=claimed,
        )
    return proved(f"{len(others)} other headers, none of them claimed")


def _claims(subject: Subject, weights: Mapping[str, Bundle]) -> bool:
    (answer,) = ask(weights, {subject.family.id: subject.family})
    return answer.evidence.complete


def prove_layout(subject: Subject) -> Outcome:
    """The evidence tells the file's own names from the model's."""
    if not subject.built:
        return skipped(why_nothing_built(subject))
    if not subject.family.key_map.rules:
        return proved("the file's names are the model's")
    has = subject.family.identify.has
    for built in subject.built:
        names = Names(built.shapes)
        if all(names.is_there(name) for name in has):
            raise subject.refuted(
                "every name of the evidence is also a name of the model",
                expected="at least one name that the key map changes, else files in the model's names count as native",
                hint="add a native name that the model has otherwise",
                where=("identify", "has"),
                items=has,
            )
    changed = [name for name in has if not any(Names(built.shapes).is_there(name) for built in subject.built)]
    return proved(f"only native files have {', '.join(changed) or 'all of the evidence'}")
