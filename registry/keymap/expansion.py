"""A key map's rules, applied to a set of model names: exact links, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.link import Link, Term
from slipcast.registry.keymap.matching import Match, RuleTree
from slipcast.registry.keymap.place import IndexHole, Place, Where, WordHole
from slipcast.registry.keymap.rules import Rule


class Fault(Enum):
    """Why names have no link; the values are (found, expected, to do)."""

    AMBIGUOUS = (
        "rules of which none is more special than the others take the same names in the model",
        "for each name one rule that refines all others that take it",
        "make one of the places more special, or give the names a line of their own",
    )
    INCOMPLETE = (
        "tensors of the model that a sum needs are missing while others of the same sum are there",
        "all terms of a sum, or none of them",
        "the names below are missing; correct the places of the sum, or give the tensors lines of their own",
    )
    SHARED = (
        "two tensors of the model have the same name in the file",
        "one tensor of the file for each, or a sum",
        "correct the place in the file, or write 'a + b' where the rows of both stand in one tensor",
    )
    DOUBLED = (
        "the file has a tensor of the model under two of its spellings",
        "one of the spellings",
        "the file mixes two versions of its names; drop one of them",
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault, the rules' entries and the names that it concerns."""

    fault: Fault
    where: Where
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The links of a set of names in the model, and the problems of those that have none."""

    links: tuple[Link, ...]
    problems: tuple[Problem, ...]

    def raise_problems(self) -> None:
        """Raise the first problem, with the names of all that are like it."""
        if not self.problems:
            return
        first = self.problems[0]
        alike = [problem for problem in self.problems if (problem.fault, problem.where) == (first.fault, first.where)]
        found, expected, hint = first.fault.value
        items = tuple(dict.fromkeys(item for problem in alike for item in problem.items))
        raise KeyMapError(found, expected=expected, hint=hint, items=items, where=first.where)


@dataclass(slots=True)
class _Draft:
    """A link while its terms are gathered."""

    match: Match | None
    files: tuple[tuple[str, ...], ...]
    terms: list[Term | None]
    tail: str = ""
    where: Where = ()
    link: Link | None = field(default=None)


def expand(
    rules: tuple[Rule, ...], tree: RuleTree, names: Iterable[str], file_names: Collection[str] | None
) -> Expansion:
    """Apply the rules to names in the model.

    Args:
        rules: the rules.
        tree: the same rules as a tree.
        names: the model's names, or those of a header in the model's names.
        file_names: names in the file, to choose between spellings; None chooses the first.

    Returns:
        Links in the order of the names, only complete ones that contradict nothing, and the problems.
    """
    problems: list[Problem] = []
    drafts = _drafts(rules, tree, names, problems)
    complete = [draft for draft in drafts if _is_complete(draft, rules, problems)]
    owners: dict[str, list[_Draft]] = {}
    for draft in complete:
        files = _spelled(draft, file_names, problems)
        if files is not None:
            draft.link = Link(files, tuple(term for term in draft.terms if term is not None))
            for file in files:
                owners.setdefault(file, []).append(draft)
    for file, sharing in owners.items():
        if len(sharing) > 1:
            problems.append(_shared(file, sharing))
            for draft in sharing:
                draft.link = None
    return Expansion(tuple(draft.link for draft in complete if draft.link is not None), tuple(problems))


def _drafts(rules: tuple[Rule, ...], tree: RuleTree, names: Iterable[str], problems: list[Problem]) -> list[_Draft]:
    drafts: list[_Draft] = []
    sums: dict[object, _Draft] = {}
    for name, match in tree.match(dict.fromkeys(names)):
        if match is None:
            drafts.append(_Draft(None, ((name,),), [Term(name)]))
        elif match.term is None:
            problems.append(Problem(Fault.AMBIGUOUS, _first_where(rules, match), (name,)))
        else:
            number, position = match.term
            rule, tail = rules[number], name[match.length :]
            term = Term(name, rule.terms[position].operation)
            if len(rule.terms) == 1:
                drafts.append(_Draft(match, match.files, [term], tail, rule.where))
                continue
            key = number, match.holes, tail
            draft = sums.get(key)
            if draft is None:
                draft = sums[key] = _Draft(match, match.files, [None] * len(rule.terms), tail, rule.where)
                drafts.append(draft)
            draft.terms[position] = term
    return drafts


def _is_complete(draft: _Draft, rules: Sequence[Rule], problems: list[Problem]) -> bool:
    if None not in draft.terms or draft.match is None or draft.match.term is None:
        return True
    holes = dict(draft.match.holes)
    terms = rules[draft.match.term[0]].terms
    missing = tuple(
        _name_of(term.place, holes) + draft.tail
        for term, there in zip(terms, draft.terms, strict=True)
        if there is None
    )
    problems.append(Problem(Fault.INCOMPLETE, draft.where, missing))
    return False


def _spelled(draft: _Draft, file_names: Collection[str] | None, problems: list[Problem]) -> tuple[str, ...] | None:
    files: list[str] = []
    for spellings in draft.files:
        there = [name for text in spellings if (name := text + draft.tail) in file_names] if file_names else []
        if len(spellings) > 1 and len(there) > 1:
            problems.append(Problem(Fault.DOUBLED, draft.where, tuple(there)))
            return None
        files.append(there[0] if there else spellings[0] + draft.tail)
    return tuple(files)


def _shared(file: str, drafts: Sequence[_Draft]) -> Problem:
    models = [term.model for draft in drafts for term in draft.terms if term is not None]
    where = next((draft.where for draft in drafts if draft.where), ())
    return Problem(Fault.SHARED, where, (*models, f"in the file: {file}"))


def _first_where(rules: Sequence[Rule], match: Match) -> Where:
    """The entry of one rival, the same whatever the order of the rules."""
    return min((rules[number].where for number, _ in match.rivals), key=lambda where: tuple(map(str, where)))


def _name_of(place: Place, holes: dict[str, str]) -> str:
    return ".".join(
        holes[segment.name] if isinstance(segment, IndexHole | WordHole) else str(segment) for segment in place.segments
    )
