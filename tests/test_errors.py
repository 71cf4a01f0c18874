"""What errors carry: fields for applications, one message, and a copy that says the same."""

from __future__ import annotations

import pickle

import pytest

from slipcast.registry.errors import (
    CompanionError,
    ExpressionError,
    FamilyFileError,
    HeaderError,
    IdentificationError,
    SettingsError,
    SlipcastError,
)

SAID = {"expected": "even", "hint": "halve it"}


@pytest.mark.parametrize(
    ("kind", "extras", "defaults"),
    [
        (HeaderError, {}, {}),
        (IdentificationError, {"candidates": ("a", "b")}, {"candidates": []}),
        (CompanionError, {"roles": ("vae",)}, {"roles": []}),
        (FamilyFileError, {"line": 3, "field": "keys.x"}, {"line": None, "field": ""}),
        (SettingsError, {"line": 3, "field": "fp8"}, {"line": None, "field": ""}),
        (ExpressionError, {"where": ("config", "dim")}, {"where": []}),
    ],
)
def test_what_a_class_says_beyond_its_base_is_in_its_json_and_survives_a_pickle(kind, extras, defaults):
    base = ["error", "found", "expected", "hint", "path", "items"]
    plain = kind("odd", **SAID).to_dict()
    assert list(plain) == [*base, *defaults]
    assert {name: plain[name] for name in defaults} == defaults
    error = kind("odd", path="f.yaml", items=["a"], **SAID, **extras)
    said = error.to_dict()
    for name, value in extras.items():
        assert getattr(error, name) == value
        assert said[name] == (list(value) if isinstance(value, tuple) else value)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.to_dict(), str(again)) == (kind, said, str(error))


def test_the_line_of_a_document_stands_behind_its_path():
    assert FamilyFileError("odd", path="f.yaml", line=7, **SAID).path == "f.yaml:7"
    assert FamilyFileError("odd", path="f.yaml", **SAID).path == "f.yaml"
    assert FamilyFileError("odd", line=7, **SAID).path is None


@pytest.mark.parametrize("kind", [SlipcastError, HeaderError, CompanionError])
def test_a_class_takes_no_field_of_another(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no field, line"):
        kind("odd", line=3, field="x", **SAID)
