"""Which rule takes which name: the rules' places in the model as a tree, walked together with the names as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from slipcast.registry.keymap.place import (
    LAST,
    ArithmeticHole,
    IndexHole,
    LastHole,
    LiteralSegment,
    Place,
    Segment,
    SpellingHole,
    WordHole,
    index_value,
)
from slipcast.registry.keymap.rules import Rule

TermId = tuple[int, int]  # index of a rule, index of the term in it


@dataclass(frozen=True, slots=True)
class Match:
    """What the rules say of all names under one prefix.

    Attributes:
        term: the winning term, or None where no rule is more special than all others.
        rivals: the terms that take the prefix.
        holes: the values of the winner's holes, by name.
        files: for each of the winner's places in the file, its spellings with the holes filled.
        length: characters of the prefix; the rest of a name is carried over.
    """

    term: TermId | None
    rivals: tuple[TermId, ...]
    holes: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, ...], ...] = ()
    length: int = 0


@dataclass(slots=True)
class _State:
    """A prefix of places in the model, and how they go on."""

    children: dict[object, _State] = field(default_factory=dict)
    literals: dict[str, list[_State]] = field(default_factory=dict)
    index: _State | None = None
    last: _State | None = None
    ends: list[TermId] = field(default_factory=list)

    def child(self, segment: Segment) -> _State:
        key: object = type(segment)
        if isinstance(segment, LiteralSegment):
            key = segment.text
        elif isinstance(segment, WordHole):
            key = frozenset(segment.words)
        known = self.children.get(key)
        if known is not None:
            return known
        state = self.children[key] = _State()
        if isinstance(segment, IndexHole):
            self.index = state
        elif isinstance(segment, LastHole):
            self.last = state
        else:
            for text in [segment.text] if isinstance(segment, LiteralSegment) else getattr(segment, "words", ()):
                self.literals.setdefault(text, []).append(state)
        return state


@dataclass(slots=True)
class _Node:
    """A prefix of the names."""

    children: dict[str, _Node] = field(default_factory=dict)
    match: Match | None = None
    known_greatest: int | None = None

    @property
    def greatest(self) -> int:
        """The greatest index among the children, once all names are in the tree; -1 without any."""
        if self.known_greatest is None:
            values = (index_value(text) for text in self.children)
            self.known_greatest = max((value for value in values if value is not None), default=-1)
        return self.known_greatest


class RuleTree:
    """The places in the model of all rules, ready to be matched with names.

    Nothing of it changes once it is made, but that it remembers which of several rules wins.
    """

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._winners: dict[tuple[TermId, ...], TermId | None] = {}
        self._root = _State()
        self._depth = 0
        for number, rule in enumerate(rules):
            for position, term in enumerate(rule.terms):
                state = self._root
                for segment in term.place.segments:
                    state = state.child(segment)
                state.ends.append((number, position))
                self._depth = max(self._depth, len(term.place.segments))

    def touches(self, names: Iterable[str]) -> bool:
        """Whether a rule could take one of the names, judged by their first segments alone."""
        root = self._root
        firsts = {name.partition(".")[0] for name in names}
        if not root.literals.keys().isdisjoint(firsts):
            return True
        return (root.index or root.last) is not None and any(index_value(first) is not None for first in firsts)

    def match(self, names: Iterable[str]) -> list[tuple[str, Match | None]]:
        """Each name with what the rules say of it; None where none takes it."""
        root = _Node()
        located = []
        for name in names:
            node = root
            if self._depth:
                for segment in name.split(".", self._depth)[: self._depth]:
                    child = node.children.get(segment)
                    if child is None:
                        child = node.children[segment] = _Node()
                    node = child
            located.append((name, node))
        self._walk(root, (self._root,), (), [], [root])
        return [(name, node.match) for name, node in located]

    def _walk(
        self, node: _Node, states: tuple[_State, ...], terms: tuple[TermId, ...], names: list[str], path: list[_Node]
    ) -> None:
        """Mark the nodes below ``node``; the depth is at most that of the longest place."""
        greatest = node.greatest if any(state.last for state in states) else -1
        for text, child in node.children.items():
            following = tuple(_following(states, text, greatest)) if states else ()
            found = terms + tuple(term for state in following for term in state.ends)
            names.append(text)
            child.match = node.match if len(found) == len(terms) else self._decide(found, names, path)
            if child.children:
                path.append(child)
                self._walk(child, following, found, names, path)
                path.pop()
            names.pop()

    def _decide(self, terms: tuple[TermId, ...], names: list[str], path: list[_Node]) -> Match:
        """The match of the term that refines all others; ``path[n]`` is the node whose children ``names[n]`` is of."""
        winner = terms[0] if len(terms) == 1 else self._winner(terms)
        if winner is None:
            return Match(None, terms)
        rule, position = self._rules[winner[0]], winner[1]
        place = rule.terms[position].place
        holes = tuple(
            (segment.name, text)
            for segment, text in zip(place.segments, names, strict=False)
            if isinstance(segment, IndexHole | WordHole)
        )
        files = tuple(fill(file, place, dict(holes), lambda depth: path[depth].greatest) for file in rule.files)
        length = sum(map(len, names[: len(place.segments)])) + len(place.segments) - 1
        return Match(winner, terms, tuple(sorted(holes)), files, length)

    def _winner(self, terms: tuple[TermId, ...]) -> TermId | None:
        if terms not in self._winners:
            self._winners[terms] = self._most_special(terms)
        return self._winners[terms]

    def _most_special(self, terms: tuple[TermId, ...]) -> TermId | None:
        places = {term: self._rules[term[0]].terms[term[1]].place for term in terms}
        for term, place in places.items():
            if all(
                place.refines(other) and not other.refines(place) for rival, other in places.items() if rival != term
            ):
                return term
        return None


def _following(states: tuple[_State, ...], text: str, greatest: int) -> Iterator[_State]:
    value = index_value(text)
    for state in states:
        yield from state.literals.get(text, ())
        if value is not None:
            if state.index is not None:
                yield state.index
            if state.last is not None and value == greatest:
                yield state.last


def fill(file: Place, model: Place, holes: dict[str, str], greatest: Callable[[int], int]) -> tuple[str, ...]:
    """The spellings of a place in the file, its holes filled from the model's place.

    Args:
        file: the place in the file.
        model: the place in the model that gave the holes their values.
        holes: the values, by name.
        greatest: the greatest index that the model has at a segment of its place, counted from 0.
    """
    choices: list[tuple[str, ...]] = []
    for segment in file.segments:
        if isinstance(segment, LiteralSegment):
            choices.append((segment.text,))
        elif isinstance(segment, IndexHole | WordHole):
            choices.append((holes[segment.name],))
        elif isinstance(segment, SpellingHole):
            choices.append(segment.words)
        elif isinstance(segment, ArithmeticHole):
            values = {name: int(holes[name]) for name in segment.names - {LAST}}
            if LAST in segment.names:
                values[LAST] = greatest(_position_of_last(model, next(iter(values), None)))
            choices.append((segment.filled(values),))
        else:
            choices.append((str(greatest(_position_of_last(model, None))),))
    return tuple(".".join(texts) for texts in product(*choices))


def _position_of_last(model: Place, hole: str | None) -> int:
    """The segment whose greatest index ``last`` means: that of the hole beside it, or the model's own ``{last}``."""
    return next(
        position
        for position, segment in enumerate(model.segments)
        if (isinstance(segment, LastHole) if hole is None else isinstance(segment, IndexHole) and segment.name == hole)
    )
