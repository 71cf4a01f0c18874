"""JSON Schemas of family files and settings, for editors: ``python -m slipcast.registry.json_schema [--check]``.

They are generated from the models that validate, in draft 07, which editors know best.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from slipcast.registry.family import Family
from slipcast.registry.precision import ROLES
from slipcast.registry.settings_model import NOT_PER_MODEL, Settings, sections

Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"
_MAPS = ("properties", "patternProperties", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "propertyNames")


def family_schema() -> Schema:
    """The schema of a family file. With ``extends`` only the fields that can't be inherited are required."""
    schema = _draft_07(Family.model_json_schema(), "A family file of slipcast")
    own = ["schema", "id", "title"]
    inherited = [name for name in schema["required"] if name not in own]
    schema["required"] = own
    schema |= {"if": {"required": ["extends"]}, "then": {}, "else": {"required": inherited}}
    keep = schema["definitions"]["Precision"]["properties"]["keep"]
    keep["properties"] = {role: next(iter(keep["patternProperties"].values())) for role in ROLES}
    return schema


def settings_schema() -> Schema:
    """The schema of a settings file: nothing is required, and every value may be a reference to another setting."""
    schema = _draft_07(Settings.model_json_schema(), "Settings of slipcast")
    definitions = schema.setdefault("definitions", {})
    definitions["Reference"] = {"type": "string", "pattern": r"\$\{[a-z0-9_.]+\}", "description": "Another setting."}
    models = schema["properties"].pop("models")
    schema.pop("required")
    schema["properties"] = {name: _setting(name, value, definitions) for name, value in schema["properties"].items()}
    definitions["Model"] = {
        "type": "object",
        "description": "Settings for one checkpoint.",
        "properties": {name: value for name, value in schema["properties"].items() if name not in NOT_PER_MODEL},
        "additionalProperties": False,
    }
    schema["properties"]["models"] = {**models, "additionalProperties": {"$ref": "#/definitions/Model"}}
    return schema


def _setting(name: str, schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    kind = sections().get(name)
    if kind is None:
        return _or_reference(schema)
    section = definitions[kind.__name__]
    section.pop("required", None)
    section["properties"] = {inner: _or_reference(value) for inner, value in section["properties"].items()}
    word = [section["properties"]["mode"]] if "mode" in section["properties"] else []
    return {"anyOf": [*word, {"$ref": f"#/definitions/{kind.__name__}"}], "description": schema["description"]}


def _or_reference(schema: Schema) -> Schema:
    bare = {key: value for key, value in schema.items() if key != "description"}
    alternatives = bare["anyOf"] if bare.keys() == {"anyOf"} else [bare]
    return {"anyOf": [*alternatives, {"$ref": "#/definitions/Reference"}], "description": schema["description"]}


def _draft_07(schema: Schema, title: str) -> Schema:
    converted = _convert(schema)
    return {"$schema": _DRAFT, "title": title, **converted}


def _convert(schema: Any) -> Any:
    """A schema as pydantic writes it, in the terms of draft 07 and without the titles made of field names."""
    if not isinstance(schema, Mapping):
        return schema
    converted: Schema = {}
    for key, value in schema.items():
        name = "definitions" if key == "$defs" else key
        if name in _MAPS:
            converted[name] = {inner: _convert(part) for inner, part in value.items()}
        elif name in _LISTS:
            converted[name] = [_convert(part) for part in value]
        elif name in _SINGLE:
            converted[name] = _convert(value)
        elif name == "$ref":
            converted[name] = value.replace("#/$defs/", "#/definitions/")
        elif name == "description":
            converted[name] = " ".join(value.split())
        elif name == "prefixItems":
            raise NotImplementedError("draft 07 has no prefixItems: describe the field by a list of one type")
        elif name != "title":
            converted[name] = value
    if "patternProperties" in converted:
        converted.setdefault("additionalProperties", False)
    reference = converted.pop("$ref", None)
    if reference is None:
        return converted
    # In draft 07 everything beside $ref is ignored.
    return {"allOf": [{"$ref": reference}], **converted} if converted else {"$ref": reference}


SCHEMAS: Mapping[str, Callable[[], Schema]] = {"family.json": family_schema, "settings.json": settings_schema}


def schema_text(name: str) -> str:
    """The text of one of the files in ``configs/schema``."""
    return json.dumps(SCHEMAS[name](), indent=2, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None, folder: Path | None = None) -> int:
    """Write the schemas, or with ``--check`` compare them with what is there.

    Args:
        arguments: those of the command line.
        folder: where the files lie; ``configs/schema`` if left out.

    Returns:
        The exit status: 1 if a file that is checked differs, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m slipcast.registry.json_schema", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; show what differs and exit with 1")
    check = parser.parse_args(arguments).check
    if folder is None:
        folder = Path(str(resources.files("slipcast.configs"))) / "schema"
    status = 0
    for name in SCHEMAS:
        path, text = folder / name, schema_text(name)
        if not check:
            path.write_text(text, encoding="utf-8")
            continue
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        difference = list(
            difflib.unified_diff(present.splitlines(), text.splitlines(), str(path), f"{name}, generated", lineterm="")
        )
        if difference:
            print("\n".join(difference))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
