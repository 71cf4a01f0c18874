"""Faults of a key map that show without a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.lint import lint


def _findings(keys: dict[str, Any], drop: dict[str, Any] | None = None, contains: dict[str, Any] | None = None) -> Any:
    return lint(KeyMap.parse(keys, drop or {}, contains or {}))


CLEAN: list[dict[str, Any]] = [
    {"a": "b", "b": "a"},
    {"a.{i}": "b.{i}", "c.{last}": "b.{last}", "d": "b.x"},
    {"a.{i}": "b.{i}.x", "c": "b.y"},
    {"img -> block": {"mod": "norm1"}, "txt -> block": {"mod": "norm2"}},
    {"a -> b": {"x": "y"}, "a -> c": {"z": "w"}},
    {"a.{s=x|y}.{i}": "b.{s}.{i}", "c": "b.z", "d": "b.x.0.w"},
    {"a.{3*b+2}.{2|1}.conv": "u.{b}.conv", "a.2.1.conv": "u.0.conv"},
    {"f.{2*i}.{3*j}": "m.{i}.{j}", "f.{2*i}.{3*j}.x": "m.{j}.{i}.x"},
    {"x": "reshape(x)", "y": "y + z"},
    {"a + b": "c", "d": "transpose(e) + flat(f)"},
    {"s -> t": {"same": "same"}, "o -> t": {"other": "other"}},
]  # fmt: skip


@pytest.mark.parametrize("keys", CLEAN)
def test_nothing_to_say(keys: dict[str, Any]) -> None:
    assert _findings(keys) == ()


@pytest.mark.parametrize(
    ("keys", "where", "message"),
    [
        ({"{s=a|b}.x": "{s}.y", "f.{t=y|z}": "a.{t}"}, ("{s=a|b}.x",), "can match the same name in the model"),
        ({"a": "x", "b": "x"}, ("a",), "neither is more special"),
        ({"a": "x", "b -> x": {}}, ("a",), "neither is more special"),
        ({"a": "x.{last}", "b": "x.2"}, ("a",), "neither is more special"),
        ({"a": "x + x"}, ("a",), "neither is more special"),
        ({"a.{i}": "x.{i}.c", "b.{s}": "x.0.{s=c|d}"}, ("a.{i}",), "neither is more special"),
        ({"f.{s=a|b}": "m.{s}", "p": "m.a", "q": "m.b"}, ("f.{s=a|b}",), "can never match: m.a, m.b take all"),
        ({"a": "a"}, ("a",), "says what holds without it"),
        ({"f.{i} -> m.{i}": {"x": "x"}}, ("f.{i} -> m.{i}", "x"), "says what holds without it"),
        ({"f.{2*i} -> m.{i}": {"x": "x"}}, ("f.{2*i} -> m.{i}", "x"), "says what holds without it"),
        ({"f.{last-i} -> m.{i}": {"x": "x"}}, ("f.{last-i} -> m.{i}", "x"), "says what holds without it"),
        ({"f.{last} -> m.{last}": {"x": "x"}}, ("f.{last} -> m.{last}", "x"), "says what holds without it"),
        ({"a": {"b": "x"}, "a.b": "y"}, ("a.b",), "name the same place in the file"),
        ({"a.{i}": "x.{i}", "a": {"{n}": "y.{n}"}}, ("a", "{n}"), "name the same place in the file"),
        ({"a": "x.{i}"}, ("a",), "all its values would have one name"),
        ({"a": "x.{s=p|q}"}, ("a",), "name it on both sides"),
        ({"a": "reshape(x) + y"}, ("a",), "leave out reshape"),
        ({"a + b": "reshape(x)"}, ("a + b",), "leave out reshape"),
        ({"a + b": "swap_halves(x)"}, ("a + b",), "an operation on a sum of the file's tensors"),
        ({"a + b": "transpose(x)"}, ("a + b",), "joined by rows as they are; leave out transpose"),
    ],
)
def test_findings(keys: dict[str, Any], where: tuple[str, ...], message: str) -> None:
    findings = _findings(keys)
    assert [finding.where for finding in findings] == [("keys", *where)]
    assert message in findings[0].message


def test_word_hole_within_an_index_is_more_special() -> None:
    assert _findings({"a.{i}": "x.{i}", "b.{s}": "x.{s=0|1}"}) == ()


def test_rules_for_what_is_dropped_or_contained() -> None:
    (dropped,) = _findings({"last.{i}.w": "x.{i}"}, {"last": "unused"})
    assert "is for what drop: last leaves out" in dropped.message
    (contained,) = _findings({"net.a": "b"}, None, {"net.": "other"})
    assert "belongs to other (net.)" in contained.message
    assert _findings({"last.linear": "x"}, {"last.{p=up|down}": "unused"}, {"las.": "other"}) == ()
