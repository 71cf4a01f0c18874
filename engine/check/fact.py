"""A fact of a family file, and whether something that the file's authors did not write shows it, or its source does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.subject import Subject
from slipcast.registry.family import Family
from slipcast.registry.runtime import Sampling
from slipcast.registry.strict_yaml import Document, Where

_MANY = 4
"""How many of the facts that rest on a source are named."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a family file says.

    Attributes:
        where: its entry.
        said: it, in words.
        by: what shows it; empty where nothing does.
        against: what speaks against it, where something does.
        final: whether no source beside the entry outweighs that.
        value: of a number that nothing shows, it: its source has to state it as well, so that a slip in one is noticed.
    """

    where: Where
    said: str
    by: str = ""
    against: str = ""
    final: bool = False
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """What one place of a file, the family itself or one of its variants, says of drawing with it.

    Attributes:
        where: the place; empty for the family.
        variant: its name; None for the family.
        said: what stands there.
        sampling: what holds there, with what it leaves to the family.
        own: the companions that stand there.
        companions: those that hold there.
        model: the class that is built.
    """

    where: Where
    variant: str | None
    said: Sampling
    sampling: Sampling
    own: Mapping[str, str]
    companions: Mapping[str, str]
    model: str

    def states(self, *fields: str) -> bool:
        """Whether one of these fields of ``sampling`` stands here, and not null."""
        return any(name in self.said.model_fields_set and getattr(self.said, name) is not None for name in fields)


def drawings(family: Family) -> Iterator[Drawing]:
    """The places of a denoiser's file that say something of drawing with it."""
    base = family.sampling
    if base is None:
        return
    yield Drawing((), None, base, base, family.companions, family.companions, family.model)
    for name, variant in family.variants.items():
        if variant.sampling.model_fields_set or variant.companions or variant.model:
            yield Drawing(
                ("variants", name),
                name,
                variant.sampling,
                base.joined(variant.sampling),
                variant.companions,
                {**family.companions, **variant.companions},
                family.model_of(name),
            )


def judged(subject: Subject, facts: Iterable[Fact], nothing: str = "the file states none") -> Outcome:
    """What facts come to: each is shown, or rests on the source that a comment beside it names.

    Raises:
        CheckError: one is neither.
    """
    known = list(facts)
    unshown = [fact for fact in known if not fact.by]
    wrong = [fact for fact in unshown if fact.final or not has_source(subject, fact.where, fact.value)]
    wrong.sort(key=lambda fact: not fact.final)
    if wrong:
        raise subject.refuted(
            _told(wrong[0]),
            expected="what diffusers, transformers, the recorded headers and the other family files show",
            hint="correct it" if wrong[0].final else "correct it, or name its source in a comment beside the entry",
            where=wrong[0].where,
            items=[f"{subject.at(fact.where)}: {_told(fact)}" for fact in wrong[1:]],
        )
    if not known:
        return skipped(nothing)
    shown = Counter(fact.by for fact in known if fact.by)
    text = f"{sum(shown.values())} facts" + (f", shown by {', '.join(shown)}" if shown else " shown")
    if unshown:
        names = list(dict.fromkeys(fact.said for fact in unshown))
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        verb = "rests" if len(unshown) == 1 else "rest"
        text += f"; {len(unshown)} {verb} on the source named beside it: {', '.join(names[:_MANY])}{more}"
    return proved(text)


def _told(fact: Fact) -> str:
    return f"{fact.said}: {fact.against or 'nothing shows it'}"


def has_source(subject: Subject, where: Where, value: float | None = None) -> bool:
    """Whether a comment stands beside an entry, right above it, or beside or above the one that it belongs to.

    A comment of a whole section counts for a list of words alone, that of a variant for what stands on the same line.

    Args:
        subject: the family, with its file.
        where: the entry.
        value: a number that the comment has to state.
    """
    for document in subject.documents:
        line = document.lines.get(where)
        if line is not None:
            comments = [_beside(document, number) for number in _lines_around(document, where, line)]
            return any(comment and (value is None or _states(comment, value)) for comment in comments)
    return len(where) > 1 and has_source(subject, where[:-1], value)


def _states(comment: str, value: float) -> bool:
    return any(float(number) == value for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w]|\.\d)", comment))


def _lines_around(document: Document, where: Where, line: int) -> Iterator[int]:
    """The line of an entry, and those of the entries that it belongs to."""
    yield line
    for length in range(len(where) - 1, 0, -1):
        above = document.lines.get(where[:length], 0)
        whole = length == 1 and where[0] != "prefixes"
        if above == line or not (whole or (length == 2 and where[0] == "variants")):
            yield above


def _beside(document: Document, line: int) -> str:
    """The comment beside a line, and the lines of comments right above it."""
    lines = _lines(document.path or "")
    if not 0 < line <= len(lines):
        return ""
    above = list(takewhile(lambda text: text.startswith("#"), (text.lstrip() for text in lines[line - 2 :: -1])))
    return " ".join([*reversed(above if line > 1 else []), lines[line - 1].partition(" #")[2]]).strip()


@lru_cache(maxsize=256)
def _lines(path: str) -> tuple[str, ...]:
    file = Path(path)
    return tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
