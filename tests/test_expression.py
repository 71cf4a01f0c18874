"""The language of ``config:``, ``let:`` and conditions."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipcast.registry.errors import ExpressionError
from slipcast.registry.expression import check_config, evaluate_config, holds, parse_condition
from slipcast.registry.expression_syntax import MAX_LENGTH

SHAPES: dict[str, tuple[int, ...]] = {
    "img_in.weight": (3072, 64),
    "img_in.bias": (3072,),
    "blocks.0.attn.weight": (8, 4),
    "blocks.1.attn.weight": (8, 4),
    "blocks.2.attn.norm.scale": (16,),
    "blocks.2.attn.weight": (9, 4),
    "blocks.norm": (1,),
    "stairs.1.w": (10,),
    "stairs.4.w": (40,),
    "stairs.7.w": (70,),
    "gap.0.w": (1,),
    "gap.2.w": (1,),
    "all.2-1.weight": (5, 6),
    "scalar": (),
    "numbered.block0.w": (1,),
    "numbered.block1.w": (1,),
    "numbered.block1a.w": (1,),
}


def _value(expression: object, **let: object) -> object:
    return evaluate_config({"x": expression}, let, SHAPES)["x"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("1.5", 1.5),
        ("1e-6", 1e-6),
        ("-3", -3),
        ("true", True),
        ("false", False),
        ("none", None),
        ("text(gated-gelu)", "gated-gelu"),
        ("text( two words )", "two words"),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("10 - 3 - 2", 5),
        ("24 // 4 // 3", 2),
        ("2*-3+1", -5),
        ("0.5 * 3", 1.5),
        ("+".join(["(1)"] * 40), 40),
        ("size(img_in.weight, 0)", 3072),
        ("size( img_in.weight , 1 )", 64),
        ("size(all.2-1.weight, 2 - 1)", 6),
        ("size(img_in.weight, 1) // 4 - 1", 15),
        ("size(blocks.2.attn.norm.{weight|scale}, 0)", 16),
        ("count(blocks)", 3),
        ("count(nothing)", 0),
        ("count(numbered.block{0})", 2),
        ("count(numbered.blocks{0})", 0),
        ("has(blocks.1)", True),
        ("has(img_in.weight)", True),
        ("has(img)", False),
        ("has(blocks.2.attn.{lin|norm})", True),
        ("sqrt(size(img_in.weight, 1))", 8),
        ("sqrt(0)", 0),
        ("i for i in 3", [0, 1, 2]),
        ("2*i for i in count(blocks) if has(blocks.{i}.attn.norm)", [4]),
        ("size(stairs.{3*b+1}.w, 0) for b in 3", [10, 40, 70]),
        ("b for b in 8 if has(stairs.{3*b+1})", [0, 1, 2]),
        ("1 if has(gap) else 2", 1),
        ("1 if has(no) else 2 if has(nope) else 3", 3),
        ("size(no, 0) if has(no) else none", None),
        ("5 if count(blocks) > 3 else 4", 4),
        ("count(blocks) == 3", True),
        ("text(a) != text(b)", True),
        ("3 >= 3", True),
        ("3 <= 2", False),
        ("2 < 3", True),
        (5, 5),
        (2.5, 2.5),
        (True, True),
        (None, None),
        ([1, "count(blocks)", [2, "text(a)"]], [1, 3, [2, "a"]]),
        ({"a": "count(blocks)", "b": "a + 1"}, {"a": 3, "b": 4}),
    ],
)
def test_values(expression: object, value: object) -> None:
    result = _value(expression)
    assert result == value
    assert type(result) is type(value)
    check_config({"x": expression}, {})


def test_names_before_an_entry_are_known() -> None:
    let = {"levels": "b for b in 8 if has(stairs.{3*b+1})", "sizes": "size(stairs.{3*b+1}.w, 0) for b in len(levels)"}
    config = {
        "first": "sizes[0]",
        "backwards": "sizes[len(levels) - 1 - b] // first for b in len(levels)",
        "each": "2 * size for size in sizes",
        "nested": {"heads": "first * 2", "more": {"deep": "heads + first"}},
    }
    check_config(config, let)
    assert evaluate_config(config, let, SHAPES) == {
        "first": 10,
        "backwards": [7, 4, 1],
        "each": [20, 80, 140],
        "nested": {"heads": 20, "more": {"deep": 30}},
    }
    assert list(evaluate_config(config, let, SHAPES)) == list(config)


def test_only_the_branch_taken_is_evaluated() -> None:
    assert _value("1 if has(scalar) else size(missing, 0)") == 1
    assert _value("size(missing, 0) // 0 if has(missing) else 2") == 2


EVALUATION_ERRORS = [
    ("size(img_in.wieght, 0)", "no tensor img_in.wieght"),
    ("size(blocks.{9|1}.x, 0)", "no tensor blocks.9.x or blocks.1.x"),
    ("size(img_in.weight, 2)", "axis 2 of img_in.weight, whose shape is [3072, 64]"),
    ("size(img_in.weight, -1)", "an axis from 0 to 1"),
    ("size(scalar, 0)", "whose shape is []"),
    ("7 // 2", "7 // 2, which doesn't come out even"),
    ("7 // 0", "doesn't come out even"),
    ("1.5 // 2", "whole numbers"),
    ("sqrt(8)", "a square number"),
    ("sqrt(-4)", "a square number"),
    ("sqrt(4.0)", "a square number"),
    ("count(gap)", "without 1"),
    ("1 + none", "none where a number belongs"),
    ("1 + true", "true where a number belongs"),
    ("text(a) * 1000", "the word 'a' where a number belongs"),
    ("text(a) < text(b)", "the word 'a' where a number belongs"),
    ("1 if 1 else 2", "the number 1 as a condition"),
    ("i for i in 3 if i", "the number 0 as a condition"),
    ("i for i in text(abc)", "a whole number or a list"),
    ("i for i in 2.0", "a whole number or a list"),
    ("i for i in true", "a whole number or a list"),
    ("i for i in 1000000000", "a list of 1000000000 items"),
    ("i for i in -1", "a list of -1 items"),
    ("len(3)", "the number 3 where a list belongs"),
    ("size(blocks.{half}.attn.weight, 0)", "{half}, which is the number 0.5"),
    ("items[2]", "items[2] of a list of 2"),
    ("items[-1]", "an index from 0 on"),
    ("items[items[0]]", "items[4] of a list of 2"),
    ("half[0]", "where a list belongs"),
    ("999999999 * 999999999 * 999999999", "at most 1e+18"),
    ("1e308 * 1e308", "at most 1e+18"),
]


@pytest.mark.parametrize(("expression", "message"), EVALUATION_ERRORS)
def test_what_can_not_be_evaluated(expression: str, message: str) -> None:
    let = {"half": 0.5, "items": [4, 5]}
    check_config({"x": expression}, let)
    with pytest.raises(ExpressionError) as caught:
        _value(expression, **let)
    assert message in str(caught.value)
    assert caught.value.where == ("config", "x")


SYNTAX_ERRORS = [
    ("", "the end of ''"),
    ("1 +", "the end of '1 +'"),
    ("1 2", "'2' in '1 2'"),
    ("(1", "expected: ')'"),
    ("1 if 2", "expected: 'else'"),
    ("i for i", "expected: 'in'"),
    ("i for 3 in 4", "a name"),
    ("i for if in 4", "a name"),
    ("(i for i in 3)", "expected: ')'"),
    ("if", "a number, a name, a function"),
    ("last", "a number, a name, a function"),
    ("a.b", "'.b' in 'a.b'"),
    ("'word'", "in \"'word'\""),
    ("__import__(os)", "one of size, count, has, len, sqrt, text"),
    ("2 ** 3", "'* 3' in '2 ** 3'"),
    ("10 ** -9", "'* -9' in"),
    ("1 / 2", "'/ 2' in"),
    ("1 < 2 < 3", "'< 3' in"),
    ("012x", "in '012x'"),
    ("1.", "in '1.'"),
    ("0x10", "in '0x10'"),
    ("9" * 19, "at most 18 characters"),
    ("1e999", "a finite number"),
    ("size(a)", "',' after it"),
    ("size(a b, 0)", "'a b' in the place"),
    ("size(, 0)", "a word or a place"),
    ("size(a, 0", "expected: ')'"),
    ("count(a, 0)", "a word or a place"),
    ("has()", "a word or a place"),
    ("has(a.{s=b|c})", "{s=b|c} in the place"),
    ("has(a.{last})", "count(...) - 1 is the last index"),
    ("has(a.{last-1})", "count(...) - 1 is the last index"),
    ("text()", "a word or a place"),
    ("text(a(b))", "a word or a place"),
    ("a" * (MAX_LENGTH + 1), f"an expression of {MAX_LENGTH + 1} characters"),
    ("(" * 40 + "1" + ")" * 40, "nested more than 32 deep"),
    (" if true else ".join(["1"] * 40), "nested more than 32 deep"),
    ("len(" * 40 + "1" + ")" * 40, "nested more than 32 deep"),
]


@pytest.mark.parametrize(("expression", "message"), SYNTAX_ERRORS)
def test_what_can_not_be_read(expression: str, message: str) -> None:
    for attempt in (lambda: check_config({"x": [expression]}, {}), lambda: _value([expression])):
        with pytest.raises(ExpressionError) as caught:
            attempt()
        assert message in str(caught.value)
        assert caught.value.where == ("config", "x", 0)


def test_missing_tensor_names_the_nearest() -> None:
    with pytest.raises(ExpressionError) as caught:
        _value("size(img_in.wieght, 0)")
    assert caught.value.items[0] == "img_in.weight"
    with pytest.raises(ExpressionError) as caught:
        _value("size(block.0.attn.weight, 0)")
    assert "blocks.0.attn.weight" in caught.value.items


@pytest.mark.parametrize(
    ("config", "let", "where", "message"),
    [
        ({"a": "heads"}, {"head": 1}, ("config", "a"), "such as head"),
        ({"a": "b", "b": 1}, {}, ("config", "a"), "defines before it"),
        ({}, {"a": "a + 1"}, ("let", "a"), "the name 'a'"),
        ({"a": {"b": 1}, "c": "b"}, {}, ("config", "c"), "the name 'b'"),
        ({"a": "i for i in i"}, {}, ("config", "a"), "the name 'i'"),
        ({"a": "has(x.{n})"}, {}, ("config", "a"), "the name 'n'"),
        ({"a": "has(x.{2*n})"}, {}, ("config", "a"), "the name 'n'"),
        ({"a": {"b": ["c"]}}, {}, ("config", "a", "b", 0), "text(...) for a word"),
        ({"a": "gelu"}, {}, ("config", "a"), "text(...) for a word"),
        ({"a": "b[0]"}, {}, ("config", "a"), "the name 'b'"),
        ({"a": "1 if none == c else 2"}, {}, ("config", "a"), "the name 'c'"),
        ({"a": "len(d) + sqrt(1) * -e"}, {}, ("config", "a"), "the name 'd'"),
        ({"a": {1, 2}}, {}, ("config", "a"), "a value of the kind set"),
    ],
)
def test_undefined_names_show_without_a_header(
    config: dict[str, Any], let: dict[str, Any], where: tuple[Any, ...], message: str
) -> None:
    for attempt in (lambda: check_config(config, let), lambda: evaluate_config(config, let, SHAPES)):
        with pytest.raises(ExpressionError) as caught:
            attempt()
        assert message in str(caught.value)
        assert caught.value.where == where


def test_checking_asks_no_header() -> None:
    check_config({"a": "size(nothing.of.it, 9) // 7 if has(x) else 0"}, {})


def test_aliases_can_not_blow_up() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    wide: Any = 1
    for _ in range(6):
        wide = [wide] * 10
    for config in (loop, {"a": wide}):
        for attempt in (lambda data=config: check_config(data, {}), lambda data=config: evaluate_config({}, data, {})):
            with pytest.raises(ExpressionError, match="alias"):
                attempt()


def test_many_blocks_are_counted_quickly() -> None:
    shapes = {f"blocks.{number}.w": (1,) for number in range(20_000)}
    start = time.process_time()
    assert evaluate_config({"a": "count(blocks) for i in 1000"}, {}, shapes)["a"] == [20_000] * 1000
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ("size(img_in.weight, 0) == 3072 ", True),
        ("size(img_in.weight, 0) == 3840", False),
        ("has(scalar)", True),
        ("count(blocks) > 2", True),
        ("size(missing, 0) == 1", False),
        ("size(scalar, 0) == 1", False),
        ("size(img_in.weight, 1) // 5 == 3", False),
        ("count(gap) == 2", False),
        ("1", False),
        ("true if has(scalar) else size(missing, 0) == 1", True),
    ],
)
def test_conditions(condition: str, answer: bool) -> None:
    assert holds(condition, SHAPES) is answer


def test_conditions_are_read_before_they_are_asked() -> None:
    with pytest.raises(ExpressionError, match="the name 'dim'") as caught:
        parse_condition("dim == 3", ("identify", "where", 0))
    assert caught.value.where == ("identify", "where", 0)
    with pytest.raises(ExpressionError, match="can't be read"):
        holds("has(a) ==", {})


@st.composite
def _sums(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return str(draw(st.integers(0, 50)))
    left, right = draw(_sums(depth - 1)), draw(_sums(depth - 1))
    operator = draw(st.sampled_from(["+", "-", "*", "//", "==", "<"]))
    if operator in ("==", "<"):
        return f"({left} if {left} {operator} {right} else {right})"
    return f"({left} {operator} {right})" if draw(st.booleans()) else f"{left} {operator} {right}"


@given(_sums())
def test_arithmetic_agrees_with_python(expression: str) -> None:
    """Wherever every division comes out even; Python itself is the judge."""
    result = None
    with suppress(ExpressionError):
        result = _value(expression)
    assert "//" in expression if result is None else result == eval(expression)


@given(st.text("0123456789.eE+-*/()<>=[]{}|, ifelsnorhatxtcu", max_size=40) | st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    result: object = None
    with suppress(ExpressionError):
        result = evaluate_config({"a": text}, {}, SHAPES)["a"]
    assert not isinstance(result, float) or math.isfinite(result)
