"""The JSON Schemas that editors read: current, in draft 07, and as strict as the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipcast.registry.json_schema import SCHEMAS, main, schema_text
from slipcast.registry.precision import ROLES
from slipcast.registry.strict_yaml import load_yaml, parse_yaml
from support.family_files import family_text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "schema"


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(inner)


def test_the_committed_schemas_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    assert {path.name for path in FOLDER.iterdir()} == set(SCHEMAS)


def test_check_shows_what_differs_and_writing_repairs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in SCHEMAS:
        (tmp_path / name).write_text(schema_text(name).replace('"Where the compute dtype', '"Whence the compute dtype'))
    assert main(["--check"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert '-          "description": "Whence the compute dtype' in shown
    assert '+          "description": "Where the compute dtype' in shown
    assert "settings.json" not in shown
    (tmp_path / "settings.json").unlink()
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_the_schemas_use_nothing_that_draft_07_does_not_know(name: str) -> None:
    schema = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    for part in _parts(schema):
        assert not part.keys() & {"$defs", "prefixItems", "unevaluatedProperties", "dependentRequired"}
        if "$ref" in part:
            assert part.keys() == {"$ref"}
            assert part["$ref"].removeprefix("#/definitions/") in schema["definitions"]


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_every_field_has_a_description_and_every_object_is_closed(name: str) -> None:
    schema = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    for part in _parts(schema):
        if part.get("type") != "object":
            continue
        assert "additionalProperties" in part
        for field, inner in part.get("properties", {}).items():
            described = schema["definitions"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
            assert described.get("description") or field in ROLES, field


FAMILY_FILES = sorted((ROOT / "families").rglob("*.yaml"))
SETTINGS_FILES = [ROOT / "configs" / "defaults.yaml", *sorted((ROOT / "configs" / "presets").glob("*.yaml"))]


def _is_valid(name: str, data: object) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return bool(jsonschema.Draft7Validator(schema).is_valid(data))


@pytest.mark.parametrize("path", [*FAMILY_FILES, *SETTINGS_FILES], ids=lambda path: path.stem)
def test_our_own_files_are_valid(path: Path) -> None:
    assert _is_valid("family.json" if path in FAMILY_FILES else "settings.json", load_yaml(path).data)


EXTENDING = "schema: 1\nid: child\ntitle: Child\nextends: base\n"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (family_text(), True),
        (family_text(more="zzz: 1\n"), False),
        (family_text(more="keys: {a: b, c: {0: 1, d.e: {f: g}}}\n"), True),
        (family_text(more="keys: {a: [b]}\n"), False),
        (family_text(more="config: {a: 1, b: [x, 2], c: {d: null}}\n"), True),
        (family_text(more="variants: {v: {default: true}}\n"), True),
        (family_text(more="variants: {v: {defaults: true}}\n"), False),
        (family_text(kind="unet"), False),
        (family_text().replace("schema: 1", "schema: 2"), False),
        (family_text().replace("fp16: safe\n", "keep: {head: [a], router: [b]}\n  fp16: safe\n"), True),
        (family_text().replace("fp16: safe\n", "keep: {Head: [a]}\n  fp16: safe\n"), False),
        (family_text().replace("fp16: safe\n", "keep: {head: {a: why}, other: [b]}\n  fp16: safe\n"), True),
        (family_text().replace("fp16: safe\n", "keep: {head: {a: ''}}\n  fp16: safe\n"), False),
        (family_text().replace("storage: supported", "storage: {unsupported: why}"), True),
        (family_text().replace("storage: supported", "storage: {unsupported: ''}"), False),
        (family_text().replace("storage: supported", "storage: maybe"), False),
        (family_text().replace("    compute: supported\n", ""), False),
        (family_text().replace("kind: denoiser\n", ""), False),
        (EXTENDING, True),
        (EXTENDING.replace("title: Child\n", ""), False),
        (EXTENDING.replace("extends: base\n", ""), False),
    ],
)
def test_family_files_are_judged_as_by_the_models(text: str, valid: bool) -> None:
    assert _is_valid("family.json", parse_yaml(text).data) is valid


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", True),
        ("device: cuda:1", True),
        ("device: cuda:8.6,12GiB", True),
        ("device: gpu", False),
        ("devise: cpu", False),
        ("fp8: off", True),
        ("fp8: {mode: off}", True),
        ("fp8: {remainder: keep}", True),
        ("fp8: {mod: off}", False),
        ("fp8: maybe", False),
        ("mmap: off", False),
        ("chunk_mib: 0", False),
        ("chunk_mib: ${header_limit_mib}", True),
        ("chunk_mib: '4'", False),
        ("families: [a, b]", True),
        ("models: {'*': {fp8: storage, chunk_mib: 3}}", True),
        ("models: {'*': {preset: exact}}", False),
        ("models: {'*': {chunk: 3}}", False),
    ],
)
def test_settings_files_are_judged_as_by_the_models(text: str, valid: bool) -> None:
    assert _is_valid("settings.json", parse_yaml(text).data) is valid
