"""Laws of key maps on random rules and names, held against a second reading of the language.

The second reading knows nothing of segments or trees: a place is a regular expression, and one place is more special
than another if it takes fewer of all names that there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.lint import lint
from support import links as executor

UNIVERSE = [".".join(parts) for depth in (1, 2, 3) for parts in product(["a", "b", "z", "0", "1", "7"], repeat=depth)]
SEGMENTS = ["a", "b", "0", "{i}", "{j}", "{s=a|b}", "{t=a|0}"]
AMBIGUOUS, INCOMPLETE, SHARED = "none is more special", "a sum needs are missing", "the same name in the file"


@dataclass(frozen=True)
class Entry:
    """One entry of ``keys:``."""

    file: str
    terms: tuple[str, ...]


def _holes(place: str) -> list[str]:
    return re.findall(r"\{(\w+)", place)


@st.composite
def _places(draw: st.DrawFn) -> str:
    segments = draw(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3))
    assume(len(set(_holes(".".join(segments)))) == len(_holes(".".join(segments))))
    return ".".join(segments)


@st.composite
def _entries(draw: st.DrawFn) -> list[Entry]:
    """Rules of every kind; now and then one loses a hole, or lands on a name of the model."""
    entries: dict[str, Entry] = {}
    for _ in range(draw(st.integers(1, 5))):
        target = draw(_places())
        holes = _holes(target)[draw(st.sampled_from([0, 0, 1])) :]
        file = ".".join([draw(st.sampled_from(["f", "g", "h", "a", "b.0"])), *(f"{{{hole}}}" for hole in holes)])
        fused = "=" not in target and draw(st.integers(0, 2)) == 0
        entries[file] = Entry(file, (f"q.{target}", f"k.{target}") if fused else (target,))
    return list(entries.values())


@st.composite
def _maps(draw: st.DrawFn) -> tuple[list[Entry], list[str]]:
    """Rules, and names that they take or that they don't."""
    entries = draw(_entries())
    names = draw(st.lists(st.sampled_from(UNIVERSE), max_size=3))
    for entry in draw(st.lists(st.sampled_from(entries), max_size=4)):
        chosen = draw(st.sampled_from(sorted(_taken(entry.terms[-1]))))
        names.append(chosen)
        if len(entry.terms) > 1 and draw(st.integers(0, 5)):
            names.append(f"q.{chosen.removeprefix('k.')}")
    return entries, list(dict.fromkeys(names))


@cache
def _pattern(place: str) -> re.Pattern[str]:
    text = re.escape(place).replace(r"\{", "{").replace(r"\}", "}").replace(r"\|", "|").replace(r"\=", "=")
    text = re.sub(r"\{(\w+)=([^}]*)\}", r"(?P<\1>\2)", text)
    text = re.sub(r"\{(\w+)\}", r"(?P<\1>0|[1-9][0-9]*)", text)
    return re.compile(rf"{text}(?P<tail>|\..*)")


@cache
def _taken(place: str) -> frozenset[str]:
    names = [*UNIVERSE, *(f"{head}.{name}" for head in "qk" for name in UNIVERSE)]
    return frozenset(name for name in names if _pattern(place).fullmatch(name))


def _expected(entries: list[Entry], names: list[str]) -> dict[str, tuple[str, ...]] | set[str]:
    """File to model names, or the kinds of errors that there are."""
    faults: set[str] = set()
    files: dict[tuple[int, str, tuple[str, ...]], dict[int, str]] = {}
    for name in names:
        rivals = [
            (number, position, place)
            for number, entry in enumerate(entries)
            for position, place in enumerate(entry.terms)
            if _pattern(place).fullmatch(name)
        ]
        best = [
            rival for rival in rivals if all(_taken(rival[2]) < _taken(other[2]) for other in rivals if other != rival)
        ]
        if not rivals:
            files[-1, name, ()] = {0: name}
        elif not best:
            faults.add(AMBIGUOUS)
        else:
            number, position, place = best[0]
            match = _pattern(place).fullmatch(name)
            assert match is not None
            holes = match.groupdict()
            file = re.sub(r"\{(\w+)\}", lambda hole, values=holes: values[hole[1]], entries[number].file)
            key = number, file + match["tail"], tuple(sorted(holes.items()))
            files.setdefault(key, {})[position] = name
    whole = [
        (file, tuple(parts[position] for position in sorted(parts)))
        for (number, file, _), parts in files.items()
        if number < 0 or len(parts) == len(entries[number].terms)
    ]
    if len(whole) < len(files):
        faults.add(INCOMPLETE)
    if len({file for file, _ in whole}) < len(whole):
        faults.add(SHARED)
    return faults or dict(whole)


def _key_map(entries: list[Entry]) -> KeyMap:
    return KeyMap.parse({entry.file: " + ".join(entry.terms) for entry in entries}, {}, {})


@settings(max_examples=400, deadline=None)
@given(_maps())
def test_expansion_agrees_with_the_second_reading(drawn: tuple[list[Entry], list[str]]) -> None:
    entries, names = drawn
    expected = _expected(entries, names)
    key_map = _key_map(entries)
    if isinstance(expected, set):
        with pytest.raises(KeyMapError) as caught:
            key_map.links(names)
        assert any(fault in str(caught.value) for fault in expected)
        return
    links = key_map.links(names)
    assert {link.files[0]: tuple(term.model for term in link.terms) for link in links} == expected
    assert sorted(term.model for link in links for term in link.terms) == sorted(names)
    assert len({file for link in links for file in link.files}) == len(links)


@settings(max_examples=150, deadline=None)
@given(_maps(), st.randoms(use_true_random=False))
def test_order_of_rules_means_nothing(drawn: tuple[list[Entry], list[str]], random: Random) -> None:
    entries, names = drawn
    shuffled = list(entries)
    random.shuffle(shuffled)
    results = []
    for order in (entries, shuffled):
        try:
            results.append(str(_key_map(order).links(names)))
        except KeyMapError as error:
            results.append(f"{error} {error.where}")
    assert results[0] == results[1]
    shapes = dict.fromkeys(names, (2,))
    assert _key_map(entries).native_view(shapes) == _key_map(shuffled).native_view(shapes)


@settings(max_examples=300, deadline=None)
@given(_maps())
def test_lint_finds_every_overlap_that_expansion_finds(drawn: tuple[list[Entry], list[str]]) -> None:
    entries, names = drawn
    try:
        _key_map(entries).links(names)
    except KeyMapError as error:
        if AMBIGUOUS in str(error):
            assert any("neither is more special" in finding.message for finding in lint(_key_map(entries)))


@settings(max_examples=150, deadline=None)
@given(_entries())
def test_overlap_that_lint_finds_is_one(entries: list[Entry]) -> None:
    """Some name is taken by two places of which neither is more special."""
    found = any("neither is more special" in finding.message for finding in lint(_key_map(entries)))
    places = [(number, place) for number, entry in enumerate(entries) for place in entry.terms]
    overlaps = any(
        _taken(one) & _taken(other) and not _taken(one) < _taken(other) and not _taken(other) < _taken(one)
        for first, one in places
        for second, other in places
        if (first, one) < (second, other)
    )
    assert found == overlaps


@settings(max_examples=150, deadline=None)
@given(
    _maps(),
    st.lists(st.sampled_from([None, "swap_halves", "transpose", "flat", "conv1x1", "reshape"]), min_size=6, max_size=6),
    st.sampled_from([(4,), (2, 3), (6, 1)]),
)
def test_saving_what_was_loaded_is_the_identity(
    drawn: tuple[list[Entry], list[str]], operations: list[str | None], shape: tuple[int, ...]
) -> None:
    entries, names = drawn
    keys = {
        entry.file: f"{operation}({entry.terms[0]})" if operation and len(entry.terms) == 1 else " + ".join(entry.terms)
        for entry, operation in zip(entries, operations, strict=False)
    }
    key_map = KeyMap.parse(keys, {}, {})
    shapes = dict.fromkeys(names, shape)
    view = key_map.native_view(shapes)
    try:
        links = key_map.links(names)
    except KeyMapError:
        assert len(view) < len(names)
        return
    values = executor.numbered(shapes)
    native = executor.save(links, values)
    assert {name: tuple(tensor.shape) for name, tensor in native.items()} == view
    loaded = executor.load(links, native, shapes)
    assert loaded.keys() == values.keys()
    assert all(loaded[name].equal(values[name]) for name in names)
    again = executor.save(links, loaded)
    assert again.keys() == native.keys()
    assert all(again[name].equal(native[name]) for name in native)


@settings(max_examples=200, deadline=None)
@given(
    _entries(),
    st.dictionaries(
        st.text("ab017.z²-{}", max_size=8) | st.sampled_from(UNIVERSE), st.lists(st.integers(0, 5), max_size=4)
    ),
)
def test_view_of_any_header_is_no_error(entries: list[Entry], header: dict[str, list[int]]) -> None:
    shapes = {name: tuple(shape) for name, shape in header.items()}
    assert len(_key_map(entries).native_view(shapes)) <= len(shapes)
