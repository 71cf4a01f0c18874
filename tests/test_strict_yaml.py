"""Strict YAML: what resolves to what, what is refused, and on which line."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipcast.registry import strict_yaml
from slipcast.registry.errors import DocumentError, FamilyFileError, SettingsError
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.strict_yaml import MAX_BYTES, load_yaml, parse_yaml


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-3", -3),
        ("+4", 4),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("2.", 2.0),
        ("1.25E+2", 125.0),
        ("'5'", "5"),
        ('"true"', "true"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("010", "010"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        (".", "."),
        ("e5", "e5"),
        ("=", "="),
        ("cuda:8.6,12GiB", "cuda:8.6,12GiB"),
        ("dim // 2", "dim // 2"),
    ],
)
def test_only_null_booleans_and_decimal_numbers_are_resolved(written: str, meant: object) -> None:
    value = parse_yaml(f"key: {written}\n").data["key"]
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize("key", ["0", "1.5", "true", "off", "null", "~", "2024-01-01", "'{a=b|c}.{i}'"])
def test_keys_are_strings_whatever_they_look_like(key: str) -> None:
    assert parse_yaml(f"{key}: linear_1\n").data == {key.strip("'"): "linear_1"}


def test_every_entry_has_its_line_and_unknown_ones_that_of_the_nearest_around_them() -> None:
    document = parse_yaml("# first\n\na:\n  - x\n  -  y\nb:\n  c: {d: 1,\n      e: 2}\n", "f.yaml")
    assert document.path == "f.yaml"
    assert dict(document.lines) == {
        (): 3,
        ("a",): 3,
        ("a", 0): 4,
        ("a", 1): 5,
        ("b",): 6,
        ("b", "c"): 7,
        ("b", "c", "d"): 7,
        ("b", "c", "e"): 8,
    }
    assert document.line_of(("b", "c", "e")) == 8
    assert document.line_of(("b", "c", "zzz", 4)) == 7
    assert document.line_of(("zzz",)) == 3


def test_an_empty_document_holds_nothing() -> None:
    for text in ("", "# only a comment\n", "---\n"):
        assert parse_yaml(text).data is None
    assert parse_yaml("# only a comment\n").line_of(("a",)) is None


def test_an_alias_repeats_its_value_with_the_lines_where_it_was_written() -> None:
    document = parse_yaml("a: &block\n  x: [1]\nb: *block\n")
    assert document.data == {"a": {"x": [1]}, "b": {"x": [1]}}
    assert document.lines["b",] == 3
    assert document.lines["b", "x"] == 2
    assert document.data["a"]["x"] is not document.data["b"]["x"]


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", "the key 'a' stands twice, in lines 1 and 3"),
        ("x:\n  1: p\n  '1': q\n", 3, "x.1", "the key '1' stands twice, in lines 2 and 3"),
        ("a: 1\nb: !!str 5\n", 2, "b", "the tag 'tag:yaml.org,2002:str'"),
        ("b: !!python/object/apply:os.system [ls]\n", 1, "b", "the tag"),
        ("!!str a: 1\n", 1, "a", "the tag"),
        ("%TAG ! tag:evil,2000:\n---\na: !foo b\n", 3, "a", "the tag 'tag:evil,2000:foo'"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "c.<<", "the merge key '<<'"),
        ("a: 1\n? [b, c]\n: 2\n", 2, "", "a mapping or a list as a key"),
        ("a: &x\n  - *x\n", 1, "a.0", "an alias that contains itself"),
        ("a: 1\nb: 1e999\n", 2, "b", "the number 1e999 is too large"),
        ("a: " + "1" * 5000 + "\n", 1, "a", "is too large"),
        ("[" * 70 + "]" * 70, 1, None, "entries nested 64 deep"),
    ],
)
def test_what_is_refused_says_what_and_where(text: str, line: int, field: str | None, words: str) -> None:
    with pytest.raises(FamilyFileError) as caught:
        parse_yaml(text, "families/f.yaml")
    assert words in caught.value.found
    assert caught.value.line == line
    if field is not None:
        assert caught.value.field == field
    assert str(caught.value).startswith(f"families/f.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("a: 1\n--- \nb: 2\n", 2, "found another document"),
        ("a: 1\nb: *c\n", 2, "found undefined alias"),
        ("a:\n\t- b\n", 2, "cannot start any token"),
        ("[" * 5000, 1, ""),
        ("a: \x00\n", None, "control characters"),
        ("a: \ud800\n", None, ""),
    ],
)
def test_what_is_not_yaml_is_said_with_its_line(text: str, line: int | None, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_yaml(text, "f.yaml", SettingsError)
    assert "not YAML" in caught.value.found
    assert words in caught.value.found
    assert caught.value.line == line


def test_nested_aliases_are_refused_before_they_take_memory_or_time() -> None:
    levels = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 6))
    start = time.perf_counter()
    with pytest.raises(FamilyFileError, match=r"more than 50000 entries once its aliases are expanded"):
        parse_yaml("a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + levels)
    assert time.perf_counter() - start < 2


def test_files_are_read_as_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    for content in ("title: Ω\n".encode(), "title: Ω\n".encode("utf-8-sig")):
        path.write_bytes(content)
        document = load_yaml(path)
        assert document.data == {"title": "Ω"}
        assert document.path == str(path)


def test_files_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    with pytest.raises(FamilyFileError, match="can't be read"):
        load_yaml(path)
    with pytest.raises(SettingsError, match="can't be read"):
        load_yaml(tmp_path, SettingsError)
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(FamilyFileError, match="byte 0xff at position 8 is not UTF-8") as caught:
        load_yaml(path)
    assert caught.value.line == 2
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(FamilyFileError, match=f"larger than {MAX_BYTES} bytes"):
        load_yaml(path)


def test_the_slow_parser_gives_the_same_as_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: &x\n  - 1\n  - off\n  - 'true'\nb: *x\n0: {c: 1e-5, d: ~}\n"
    fast = parse_yaml(text)

    class Slow(yaml.SafeLoader):
        resolve = strict_yaml._Loader.resolve

    monkeypatch.setattr(strict_yaml, "_Loader", Slow)
    slow = parse_yaml(text)
    assert slow.data == fast.data
    assert dict(slow.lines) == dict(fast.lines)
    with pytest.raises(FamilyFileError, match="not YAML"):
        parse_yaml("[" * 5000)


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Co", "Cn")), max_size=12)
scalars = (
    words
    | st.booleans()
    | st.none()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=20
)


@given(values)
def test_json_is_read_as_json_reads_it(value: object) -> None:
    assert parse_yaml(json.dumps({"value": value}, ensure_ascii=False)).data == {"value": value}


def test_documents_and_frozen_mappings_can_not_be_changed_but_be_copied() -> None:
    document = parse_yaml("a: 1\n")
    frozen: Any = document
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.data = {}
    with pytest.raises(TypeError):
        frozen.lines["b",] = 2
    assert pickle.loads(pickle.dumps(document)) == document
    assert copy.deepcopy(document.lines) == document.lines
    source = {"a": 1}
    copied = FrozenMapping(source)
    source["b"] = 2
    assert copied == {"a": 1}
    assert repr(copied) == "FrozenMapping({'a': 1})"


def test_errors_are_of_the_class_that_was_asked_for() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_yaml("a: 1\na: 2\n", error=SettingsError)
    assert type(caught.value) is SettingsError
