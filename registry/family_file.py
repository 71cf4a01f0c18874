"""Reads one family file: strict YAML over the family that it extends, validated, its key map and expressions parsed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.errors import FamilyFileError, KeyMapError
from slipcast.registry.expression import check_config, parse_condition
from slipcast.registry.family import SCHEMA, Family, Naming
from slipcast.registry.keymap.inverse import inverted
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.lint import Finding, lint_all
from slipcast.registry.strict_yaml import Document, Where, dotted, load_yaml
from slipcast.registry.validation import Place, shown, validate

FOLDERS = {"denoiser": "", "text_encoder": "text_encoders", "vae": "vaes", "controlnet": "controlnets"}
_JOINED = ("let", "config", "keys", "drop")


@dataclass(frozen=True, slots=True)
class FamilyFile:
    """A family file as it was read, before it is validated.

    Attributes:
        stem: the file's name without ``.yaml``, which is the family's id.
        source: how the file is named to users: its path, or its name inside the package.
        document: what it holds; a mapping at the top.
        folder: the folder for its kind that it lies in, "" for the top, or None for a file that lies anywhere.
    """

    stem: str
    source: str
    document: Document
    folder: str | None = None

    @property
    def extends(self) -> str | None:
        """Id of the family that this one starts from, or None."""
        named = self.document.data.get("extends")
        return named if isinstance(named, str) else None

    def error(self, where: Where, found: str, expected: str, hint: str) -> FamilyFileError:
        """An error at an entry of this file."""
        line = self.document.line_of(where)
        return FamilyFileError(
            found, expected=expected, hint=hint, path=self.document.path, line=line, field=dotted(where)
        )


def read_family_file(path: Path, *, source: str | None = None, folder: str | None = None) -> FamilyFile:
    """Read a file as far as YAML goes.

    Raises:
        FamilyFileError: it can't be read, is not strict YAML, holds no mapping, or is of a later schema.
    """
    file = FamilyFile(path.stem, source or str(path), load_yaml(path), folder)
    data = file.document.data
    if not isinstance(data, dict):
        raise file.error(
            (), f"the file is {shown(data)}", "a mapping with schema, id, title, ...", "write a family file"
        )
    schema = data.get("schema", SCHEMA)
    if isinstance(schema, bool) or schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        raise file.error(
            ("schema",),
            f"schema {shown(schema)}" + (" is newer than this version of slipcast" if newer else ""),
            f"schema: {SCHEMA}, which this version reads",
            "upgrade slipcast" if newer else f"write schema: {SCHEMA}",
        )
    return file


def build_family(file: FamilyFile, base: FamilyFile | None = None, *, linted: bool = False) -> Family:
    """The family that a file describes.

    Args:
        file: the file.
        base: the file of the family that it extends, if it does.
        linted: the key map is known to have no faults; looking for them takes longer than all the rest.

    Raises:
        FamilyFileError: with the file, line and field of what is wrong.
    """
    if base is not None and base.extends is not None:
        raise file.error(
            ("extends",),
            f"{base.stem!r} extends {base.extends!r} itself",
            "a family that extends none",
            f"extend {base.extends!r}, or write the entries out",
        )
    data = file.document.data if base is None else _join(base.document.data, file.document.data)
    locate = _locator(file.document, None if base is None else base.document)
    family = validate(Family, data, locate, FamilyFileError)
    _check_place(file, family)
    try:
        _check_expressions(family)
        key_map = KeyMap.parse(data.get("keys", {}), data.get("drop", {}), data.get("contains", {}))
        naming_maps = {name: _naming_map(name, naming) for name, naming in family.namings.items()}
    except KeyMapError as problem:
        raise _placed(problem, locate) from problem
    findings = () if linted else lint_all(key_map, naming_maps)
    if findings:
        raise _placed(_linted(findings), locate)
    return family.read_from(file.source, digest(data), key_map, naming_maps)


def _naming_map(name: str, naming: Naming) -> KeyMap:
    """The key map of other names, which has to be readable from the file's side."""
    try:
        key_map = KeyMap.parse(naming.keys, naming.drop, {})
        inverted(key_map.rules)
    except KeyMapError as problem:
        problem.where = ("namings", name, *problem.where)
        raise
    return key_map


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of parsed data, in hexadecimal.

    The order of entries counts, since in ``let`` and ``config`` later ones may use earlier ones.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _placed(problem: KeyMapError, locate: Callable[[Where], Place]) -> FamilyFileError:
    place = locate(problem.where)
    return FamilyFileError(
        problem.found,
        expected=problem.expected,
        hint=problem.hint,
        items=problem.items,
        path=place.path,
        line=place.line,
        field=dotted(problem.where),
    )


def _linted(findings: Sequence[Finding]) -> KeyMapError:
    return KeyMapError(
        findings[0].message,
        expected="a key map that can be read both ways",
        hint="see what the message says of the entry",
        where=findings[0].where,
        items=[f"{dotted(finding.where)}: {finding.message}" for finding in findings[1:]],
    )


def _join(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**base, **own}
    for section in _JOINED:
        below, above = base.get(section), own.get(section)
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            joined[section] = {**below, **above}
    return joined


def _locator(own: Document, base: Document | None) -> Callable[[Where], Place]:
    """Gives the file and line of an entry: the extending file's, where it has the entry or one as near around it."""

    def locate(where: Where) -> Place:
        for length in range(len(where), 0, -1):
            for document in (own, base):
                if document is not None and where[:length] in document.lines:
                    return Place(document.path, document.lines[where[:length]])
        return Place(own.path, own.line_of(()))

    return locate


def _check_place(file: FamilyFile, family: Family) -> None:
    if family.id != file.stem:
        raise file.error(
            ("id",),
            f"the id {family.id!r} in a file called {file.stem}.yaml",
            "an id that is the file's name",
            f"write id: {file.stem}, or rename the file",
        )
    if file.folder is not None and FOLDERS[family.kind] != file.folder:
        right = FOLDERS[family.kind]
        raise file.error(
            ("kind",),
            f"the kind {family.kind!r} in {f'the folder {file.folder}' if file.folder else 'no subfolder'}",
            f"the subfolder {right}" if right else "no subfolder",
            f"move the file to {right}/" if right else "move the file to the folder above",
        )


def _check_expressions(family: Family) -> None:
    check_config(family.config, family.let)
    for index, condition in enumerate(family.identify.where):
        parse_condition(condition, ("identify", "where", index))
    for name, variant in family.variants.items():
        if variant.config:
            check_config(family.config_of(name), family.let, ("variants", name, "config"))
        for index, condition in enumerate(variant.where):
            parse_condition(condition, ("variants", name, "where", index))
