"""The grammar of ``keys:``, ``drop:`` and ``contains:``, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.place import ArithmeticHole, index_value, parse_place
from slipcast.registry.keymap.rules import MAX_ENTRIES, parse_rules


def _shown(keys: dict[str, Any]) -> list[str]:
    return [str(rule) for rule in parse_rules(keys)]


def test_scopes_prefix_both_sides_of_their_entries() -> None:
    keys = {"time_in -> time.embedder": {"in_layer": "linear_1", "mlp -> ff": {"0": "proj"}}}
    assert _shown(keys) == [
        "time_in: time.embedder",
        "time_in.in_layer: time.embedder.linear_1",
        "time_in.mlp: time.embedder.ff",
        "time_in.mlp.0: time.embedder.ff.proj",
    ]


def test_scope_with_equal_sides_is_no_rule_itself() -> None:
    assert _shown({"{half=encoder|decoder}": {"norm_out": "conv_norm_out"}}) == [
        "{half=encoder|decoder}.norm_out: {half=encoder|decoder}.conv_norm_out"
    ]


def test_scope_without_entries_is_a_prefix_rule() -> None:
    assert _shown({"a -> b": {}}) == ["a: b"]


def test_words_are_given_once_and_named_elsewhere() -> None:
    keys = {"txt.{s=one|two}.{i} -> text.{s}.{i}": {"wq": "to_q"}, "x.{w}": "y.{w=c|d}"}
    assert _shown(keys)[1:] == [
        "txt.{s=one|two}.{i}.wq: text.{s=one|two}.{i}.to_q",
        "x.{w=c|d}: y.{w=c|d}",
    ]


def test_sums_and_operations() -> None:
    (rule,) = parse_rules({"qkv": "swap_halves(q) + k + conv1x1(v)"})
    assert [(str(term.place), term.operation) for term in rule.terms] == [
        ("q", "swap_halves"),
        ("k", None),
        ("v", "conv1x1"),
    ]
    (rule,) = parse_rules({"gate + up": "gate_up"})
    assert [str(file) for file in rule.files] == ["gate", "up"]


def test_whole_numbers_are_names() -> None:
    assert _shown({"0": 1}) == ["0: 1"]


def test_rules_know_their_entry() -> None:
    rules = parse_rules({"blocks.{i} -> layers.{i}": {"attn": {"q": "to_q"}}})
    assert rules[-1].where == ("keys", "blocks.{i} -> layers.{i}", "attn", "q")


@pytest.mark.parametrize(
    ("text", "values", "result"),
    [("3*b+1+n", {"b": 2, "n": 1}, 8), ("last-i", {"last": 3, "i": 1}, 2), ("2*n*n-n", {"n": 3}, 15), ("7", {}, 7)],
)
def test_arithmetic(text: str, values: dict[str, int], result: int) -> None:
    (segment,) = parse_place(f"{{{text}}}").segments
    assert isinstance(segment, ArithmeticHole)
    assert segment.value(values) == result
    assert segment.filled(values) == str(result)
    (segment,) = parse_place(f"block{{{text}}}").segments
    assert isinstance(segment, ArithmeticHole)
    assert (str(segment), segment.filled(values)) == (f"block{{{text}}}", f"block{result}")


@pytest.mark.parametrize(
    "text", ["block{}", "block{s=a|b}", "{i}block", "block{i}x", "block{i}{n}", "2{i}", "block{{i}}"]
)
def test_what_may_not_stand_in_a_segment_with_an_index(text: str) -> None:
    with pytest.raises(KeyMapError, match="in the place"):
        parse_place(text)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("12", 12), ("012", None), ("-1", None), ("", None), ("1a", None), ("²", None),
                        ("١", None), ("9" * 10, None), ("1_0", None)],
)  # fmt: skip
def test_index_takes_digits_only(text: str, value: int | None) -> None:
    assert index_value(text) == value


ENTRY_ERRORS = [
    # the section keys:, where the error is, what its message must say
    ({"a.b c": "x"}, ("a.b c",), "'b c' in the place 'a.b c'"),
    ({"a": ""}, ("a",), "a mapping for a scope"),
    ({"a": None}, ("a",), "with the value None"),
    ({"a": True}, ("a",), "with the value True"),
    ({"a": 1.5}, ("a",), "quote a value"),
    ({"a": ["b"]}, ("a",), "expression over places"),
    ({"a..b": "x"}, ("a..b",), "'' in the place"),
    ({"a+b": "x"}, ("a+b",), "take a space on both sides"),
    ({"a": "b+c"}, ("a",), "take a space on both sides"),
    ({"a": "x -> y"}, ("a",), "'x -> y' in the place"),
    ({"a -> b": "x"}, ("a -> b",), "only a scope has an arrow"),
    ({"a -> b -> c": {}}, ("a -> b -> c",), "one place in the file and one in the model"),
    ({"a + b": {"c": "d"}}, ("a + b",), "a sum belongs to a single tensor"),
    ({"a": "swap_halfs(b)"}, ("a",), "write swap_halves(...)"),
    ({"a": "zzz(b)"}, ("a",), "one of swap_halves, transpose, flat, reshape, conv1x1, one_frame"),
    ({"a": "flat(flat(b))"}, ("a",), "'flat(flat(b))' in the place"),
    ({"a + b": "c + d"}, ("a + b",), "sums on both sides"),
    ({"a": " + ".join(f"b{n}" for n in range(17))}, ("a",), "a sum of 17 places"),
    ({"a": "b.{2*n}"}, ("a",), "arithmetic and spellings in the file's place only"),
    ({"a": "b.{x|y}"}, ("a",), "arithmetic and spellings in the file's place only"),
    ({"a.{2*n}": {"b": "c"}}, ("a.{2*n}",), "a scope with such a hole needs both sides"),
    ({"a.{i}": "b.{i}.{i}"}, ("a.{i}",), "a hole that stands twice"),
    ({"a.{i}": "b"}, ("a.{i}",), "without its like in the model's place b"),
    ({"a.{i} + c": "b"}, ("a.{i} + c",), "without its like in the model's place b"),
    ({"a.{i}": "b.{i} + c"}, ("a.{i}",), "without its like in the model's place c"),
    ({"a.{2*s}": "b.{s=x|y}"}, ("a.{2*s}",), "only indices in arithmetic"),
    ({"{s=a|b}.c": "{s=a|b}.d"}, ("{s=a|b}.c",), "the words of {s} are given twice"),
    ({"{s=a|b}": {"{s=c|d}": "e"}}, ("{s=a|b}", "{s=c|d}"), "the words of {s} are given twice"),
    ({"{s=a|a}": "x"}, ("{s=a|a}",), "'{s=a|a}' in the place"),
    ({"{last=a|b}": "x"}, ("{last=a|b}",), "'{last=a|b}' in the place"),
    ({"{2*}": "x"}, ("{2*}",), "'{2*}' in the place"),
    ({"{2n}": "x"}, ("{2n}",), "'{2n}' in the place"),
    ({"{a.b|c}": "x"}, ("{a.b|c}",), "'{a' in the place"),
    ({"a.{last}": "b.{i}"}, ("a.{last}",), "'last' could be that of several holes or of none"),
    ({"a.{last-i-j}": "b.{i}.{j}"}, ("a.{last-i-j}",), "say which hole is meant"),
    ({"a.{last}": "b.{last}.c.{last}"}, ("a.{last}",), "several holes or of none"),
    ({".".join(["a"] * 33): "x"}, (".".join(["a"] * 33),), "a place of 33 segments"),
    ({".".join(["{a|b}"] * 5): "x"}, (".".join(["{a|b}"] * 5),), "32 spellings"),
]


@pytest.mark.parametrize(("keys", "where", "message"), ENTRY_ERRORS)
def test_wrong_entries(keys: dict[str, Any], where: tuple[str, ...], message: str) -> None:
    with pytest.raises(KeyMapError) as caught:
        parse_rules({"fine": "good", **keys})
    assert message in str(caught.value)
    assert caught.value.where == ("keys", *where)


def test_error_in_a_scope_names_the_whole_path() -> None:
    with pytest.raises(KeyMapError) as caught:
        parse_rules({"blocks.{i} -> layers.{i}": {"norm3": "norm 2"}})
    assert caught.value.where == ("keys", "blocks.{i} -> layers.{i}", "norm3")


def test_aliases_can_not_blow_up() -> None:
    level: dict[str, Any] = {str(number): f"x{number}" for number in range(20)}
    for _ in range(4):
        level = {f"a{number} -> b{number}": level for number in range(20)}
    with pytest.raises(KeyMapError, match=f"more than {MAX_ENTRIES} entries"):
        parse_rules(level)


def test_alias_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(KeyMapError, match="nested more than"):
        parse_rules(loop)


def test_drop_gives_the_reason() -> None:
    key_map = KeyMap.parse({}, {"a.{i}.{s=b|c}": "unused", "d.{e|f}": " twice "}, {})
    assert key_map.drop_reason("a.7.c.weight") == "unused"
    assert key_map.drop_reason("d.f") == "twice"
    assert [key_map.drop_reason(name) for name in ("a.x.c", "a.7.d", "a.7", "aa.7.c", "d.ff")] == [None] * 5


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ({"a.{2*i}": "x"}, "arithmetic or {last}"),
        ({"a.{last}": "x"}, "arithmetic or {last}"),
        ({"a": ""}, "has no reason"),
        ({"a": None}, "has no reason"),
        ({"a b": "x"}, "'a b' in the place"),
    ],
)
def test_wrong_drops(drop: dict[str, Any], message: str) -> None:
    with pytest.raises(KeyMapError) as caught:
        KeyMap.parse({}, drop, {})
    assert message in str(caught.value)
    assert caught.value.where == ("drop", next(iter(drop)))


def test_contained_takes_the_longest_prefix() -> None:
    key_map = KeyMap.parse({}, {}, {"a.": "outer", "a.b.": "inner"})
    assert key_map.contained("a.b.weight") == ("a.b.", "inner")
    assert key_map.contained("a.c.weight") == ("a.", "outer")
    assert key_map.contained("ab.weight") is None


@pytest.mark.parametrize("contains", [{"a": "x"}, {".": "x"}, {"a.": None}, {"a.": ""}])
def test_wrong_contents(contains: dict[str, Any]) -> None:
    with pytest.raises(KeyMapError, match=r"ending in a dot") as caught:
        KeyMap.parse({}, {}, contains)
    assert caught.value.where == ("contains", next(iter(contains)))
