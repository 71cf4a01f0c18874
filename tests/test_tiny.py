"""The section ``tiny:`` of a family file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic_core import PydanticCustomError

from slipcast.registry.catalogue import load_family_file
from slipcast.registry.errors import FamilyFileError
from slipcast.registry.tiny import Recipe, parse_recipe
from support.family_files import MINIMAL_LINES, write_family

ALONE = "tiny:\n  config: {dim: 8}\n  fp8_error: 0.1\n%s"
TINY = "tiny:\n  config: {dim: 8}\n  inputs:\n    x: %s\n  fp8_error: 0.1\n"


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("normal 1x4x8x8", Recipe("normal", (1, 4, 8, 8))),
        ("uniform 2 < 1000", Recipe("uniform", (2,), 1000)),
        ("uniform", Recipe("uniform", ())),
        ("ones 3", Recipe("ones", (3,))),
        ("true 1x7", Recipe("true", (1, 7))),
        ("integers 1x7 < 99", Recipe("integers", (1, 7), 99)),
    ],
)
def test_recipes(text: str, recipe: Recipe) -> None:
    assert parse_recipe(text) == recipe


@pytest.mark.parametrize(
    "text", ["norml 1", "normal 1, 2", "normal(1)", "normal 1 < 3", "integers 2", "true 2 < 3", "normal -1", ""]
)
def test_what_is_no_recipe(text: str) -> None:
    with pytest.raises(PydanticCustomError, match="the input"):
        parse_recipe(text)


def test_inputs_are_nested_as_the_forward_wants_them(tmp_path: Path) -> None:
    value = "[[normal 2x3], {mask: true 2, flags: [true, null, 3, 0.5]}]"
    tiny = load_family_file(write_family(tmp_path, more=TINY % value)).tiny
    assert tiny is not None
    assert tiny.inputs["x"] == [["normal 2x3"], {"mask": "true 2", "flags": [True, None, 3, 0.5]}]
    assert tiny.fp8_error == 0.1


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("[norml 2x3]", "the input 'norml 2x3'"),
        ("{mask: integers 2}", "the input 'integers 2'"),
        ("normal 9999x9999", "an input of 99980001 elements"),
    ],
)
def test_a_wrong_input_is_named_with_its_line(tmp_path: Path, value: str, found: str) -> None:
    with pytest.raises(FamilyFileError) as error:
        load_family_file(write_family(tmp_path, more=TINY % value))
    assert error.value.found == found
    assert error.value.line == MINIMAL_LINES + 4
    assert error.value.field.startswith("tiny.inputs.x")


@pytest.mark.parametrize(
    ("more", "found"),
    [("", "neither inputs nor"), ("  inputs: {x: 1}\n  not_alone: why\n", "inputs and a reason against running")],
)
def test_a_small_model_has_inputs_or_says_why_it_does_not_run(tmp_path: Path, more: str, found: str) -> None:
    with pytest.raises(FamilyFileError, match=found):
        load_family_file(write_family(tmp_path, more=ALONE % more))


def test_a_class_that_does_not_run_by_itself_has_no_inputs(tmp_path: Path) -> None:
    tiny = load_family_file(write_family(tmp_path, more=ALONE % "  not_alone: needs another\n")).tiny
    assert tiny is not None
    assert (dict(tiny.inputs), tiny.not_alone) == ({}, "needs another")
