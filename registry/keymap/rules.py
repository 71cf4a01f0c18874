"""The ``keys:`` section of a family file, read into flat rules.

A rule says what the file's tensors, or modules, are in terms of the model's. Scopes are flattened: the places of a
rule are whole. The grammar and its meaning stand in docs/key-map.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.link import Operation
from slipcast.registry.keymap.operations import NUMBERED, OPERATIONS
from slipcast.registry.keymap.place import (
    LAST,
    ArithmeticHole,
    IndexHole,
    LastHole,
    Place,
    Segment,
    SpellingHole,
    Where,
    WordHole,
    parse_place,
)

MAX_ENTRIES = 4096
MAX_DEPTH = 16
MAX_TERMS = 16
MAX_SPELLINGS = 16
_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(([^(),]*)(?:, ([1-9][0-9]{0,6}))?\)")


@dataclass(frozen=True, slots=True)
class RuleTerm:
    """A place in the model, and what the file's tensor is of the model's there."""

    place: Place
    operation: Operation | None = None

    def __str__(self) -> str:
        word, _, number = (self.operation or "").partition("/")
        return f"{word}({self.place}{f', {number}' if number else ''})" if word else str(self.place)


@dataclass(frozen=True, slots=True)
class Rule:
    """One flat rule: rows of the files' tensors are rows of the terms.

    Attributes:
        files: places in the file; more than one where the file is apart and the model fused.
        terms: places in the model; more than one where the file is fused and the model apart.
        scope: whether it stands for a scope's children that have no entry of their own.
        where: path of the entry in the document.
    """

    files: tuple[Place, ...]
    terms: tuple[RuleTerm, ...]
    scope: bool = field(default=False, compare=False)
    where: Where = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.files))}: {' + '.join(map(str, self.terms))}"


@dataclass(frozen=True, slots=True)
class _Scope:
    """What an entry inherits: the two prefixes, and the words of their holes."""

    file: tuple[Segment, ...] = ()
    model: tuple[Segment, ...] = ()
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse_rules(keys: Mapping[str, object]) -> tuple[Rule, ...]:
    """Read a ``keys:`` section.

    Args:
        keys: the section as it stands in the document: strings, and mappings for scopes.

    Returns:
        The flat rules, in the order of the document; the order has no meaning.

    Raises:
        KeyMapError: for anything that the grammar doesn't allow, with the path of the entry as ``where``.
    """
    rules: list[Rule] = []
    for entries, rule in enumerate(_flatten(keys, _Scope(), ("keys",))):
        if entries >= MAX_ENTRIES:
            raise KeyMapError(
                f"more than {MAX_ENTRIES} entries once scopes and aliases are written out",
                expected=f"at most {MAX_ENTRIES}",
                hint="shorten the section; a place with holes says in one line what many say",
                where=("keys",),
            )
        if rule is not None:
            rules.append(rule)
    return tuple(rules)


def _flatten(entries: Mapping[str, object], scope: _Scope, where: Where) -> Iterator[Rule | None]:
    """The rule of each entry, scopes before their children, and None for an entry that is no rule itself."""
    if len(where) > MAX_DEPTH:
        raise KeyMapError(
            f"scopes nested more than {MAX_DEPTH} deep",
            expected="a few levels",
            hint="write longer places instead; an alias may not contain itself",
            where=where,
        )
    for key, value in entries.items():
        here = (*where, key)
        if isinstance(value, Mapping):
            inner = _scope(str(key), scope, here)
            yield _scope_rule(inner, here)
            yield from _flatten(value, inner, here)
        else:
            yield _leaf_rule(str(key), value, scope, here)


def _scope(key: str, outer: _Scope, where: Where) -> _Scope:
    sides = key.split(" -> ")
    if len(sides) > 2 or " + " in key:
        raise KeyMapError(
            f"the scope {key!r}",
            expected="one place, or one place in the file and one in the model: 'blocks.{i} -> layers.{i}'",
            hint="a sum belongs to a single tensor or module: give it lines of its own",
            where=where,
        )
    places = [parse_place(side, where) for side in sides]
    places, words = _with_words(places, outer.words, where)
    inner = _Scope(outer.file + places[0].segments, outer.model + places[-1].segments, words)
    _check_model_place(Place(inner.model), where)
    return inner


def _scope_rule(scope: _Scope, where: Where) -> Rule | None:
    if scope.file == scope.model:
        return None
    return _checked(Rule((Place(scope.file),), (RuleTerm(Place(scope.model)),), scope=True, where=where))


def _leaf_rule(key: str, value: object, scope: _Scope, where: Where) -> Rule:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value or " -> " in key:
        raise KeyMapError(
            f"the entry {key!r} with the value {value!r}",
            expected="'place in the file: expression over places in the model', or a mapping for a scope",
            hint="only a scope has an arrow; quote a value that YAML would not read as text",
            where=where,
        )
    files = [parse_place(text.strip(), where) for text in key.split(" + ")]
    operations, targets = zip(*(_parse_term(text.strip(), where) for text in value.split(" + ")), strict=True)
    places, _ = _with_words([*files, *targets], scope.words, where)
    count = len(files)
    return _checked(
        Rule(
            tuple(Place(scope.file + place.segments) for place in places[:count]),
            tuple(
                RuleTerm(Place(scope.model + place.segments), operation)
                for place, operation in zip(places[count:], operations, strict=True)
            ),
            where=where,
        )
    )


def _parse_term(text: str, where: Where) -> tuple[Operation | None, Place]:
    call = _CALL.fullmatch(text)
    if call is None:
        return None, parse_place(text, where)
    word, place, number = call.groups()
    if word not in OPERATIONS:
        nearest = get_close_matches(word, OPERATIONS, 1)
        raise KeyMapError(
            f"the operation {word!r}",
            expected=f"one of {', '.join(OPERATIONS)}",
            hint=f"write {nearest[0]}(...)" if nearest else "take one of these, or leave the name as it is",
            where=where,
        )
    if (number is not None) != (word in NUMBERED):
        raise KeyMapError(
            f"{text!r}",
            expected=f"{word}(place, rows), the rows as a whole number" if word in NUMBERED else f"{word}(place)",
            hint="correct the operation",
            where=where,
        )
    return word if number is None else f"{word}/{number}", parse_place(place.strip(), where)


def _with_words(
    places: list[Place], outer: Mapping[str, tuple[str, ...]], where: Where
) -> tuple[list[Place], dict[str, tuple[str, ...]]]:
    """Let ``{s}`` stand for the words that ``{s=a|b}`` gave it, in the same entry or in a scope around it."""
    words = dict(outer)
    for place in places:
        for segment in place.segments:
            if isinstance(segment, WordHole):
                if segment.name in words:
                    raise KeyMapError(
                        f"the words of {{{segment.name}}} are given twice",
                        expected="once in a rule and the scopes around it",
                        hint=f"write {{{segment.name}}} in the other places, or choose another name",
                        where=where,
                    )
                words[segment.name] = segment.words
    return [Place(tuple(_with_its_words(segment, words) for segment in place.segments)) for place in places], words


def _with_its_words(segment: Segment, words: Mapping[str, tuple[str, ...]]) -> Segment:
    if isinstance(segment, IndexHole) and segment.name in words:
        return WordHole(segment.name, words[segment.name])
    return segment


def _checked(rule: Rule) -> Rule:
    """The rule, if it can be expanded at all."""
    if len(rule.files) > 1 and len(rule.terms) > 1:
        raise KeyMapError(
            f"sums on both sides of {rule}",
            expected="a sum in the key or in the value, not in both",
            hint="split the entry, or name the tensors one by one",
            where=rule.where,
        )
    if max(len(rule.files), len(rule.terms)) > MAX_TERMS:
        raise KeyMapError(
            f"a sum of {max(len(rule.files), len(rule.terms))} places",
            expected=f"at most {MAX_TERMS}",
            hint="split the entry",
            where=rule.where,
        )
    for term in rule.terms:
        _check_model_place(term.place, rule.where)
        for file in rule.files:
            _check_file_place(file, term.place, rule.where)
    return rule


def _check_model_place(place: Place, where: Where) -> None:
    for segment in place.segments:
        if isinstance(segment, ArithmeticHole | SpellingHole):
            raise KeyMapError(
                f"{segment} in the model's place {place}",
                expected="arithmetic and spellings in the file's place only",
                hint="a scope with such a hole needs both sides: 'a.{2*n} -> b.{n}'",
                where=where,
            )
    names = [segment.name for segment in place.segments if isinstance(segment, IndexHole | WordHole)]
    if len(set(names)) < len(names):
        raise KeyMapError(
            f"a hole that stands twice in the model's place {place}",
            expected="each hole once",
            hint="give the second hole a name of its own",
            where=where,
        )


def _check_file_place(file: Place, model: Place, where: Where) -> None:
    """Whether each hole of the file's place has a value wherever the model's place matches."""
    indices = {segment.name for segment in model.segments if isinstance(segment, IndexHole)}
    words = {segment.name for segment in model.segments if isinstance(segment, WordHole)}
    lasts = sum(isinstance(segment, LastHole) for segment in model.segments)
    spellings = 1
    for segment in file.segments:
        if isinstance(segment, SpellingHole):
            spellings *= len(segment.words)
        named = {segment.name} if isinstance(segment, IndexHole | WordHole) else set()
        computed = segment.names if isinstance(segment, ArithmeticHole) else frozenset()
        last = LAST in computed or isinstance(segment, LastHole)
        holes = computed - {LAST}
        if not (named <= indices | words and holes <= indices):
            raise KeyMapError(
                f"{segment} in the file's place {file} without its like in the model's place {model}",
                expected="each hole of the file's place also in the model's, and only indices in arithmetic",
                hint="name the hole on both sides; {last-i} needs {i}, and a word hole its words",
                where=where,
            )
        if last and (len(holes) > 1 or (not holes and lasts != 1)):
            raise KeyMapError(
                f"{segment} in the file's place {file}, where 'last' could be that of several holes or of none",
                expected="{last} with one {last} in the model's place, or one hole beside it: {last-i}",
                hint="say which hole is meant",
                where=where,
            )
    if spellings > MAX_SPELLINGS:
        raise KeyMapError(
            f"{spellings} spellings of {file}",
            expected=f"at most {MAX_SPELLINGS}",
            hint="split the entry",
            where=where,
        )
