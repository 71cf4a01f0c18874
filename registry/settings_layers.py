"""Reads the layers that settings come from: files, the environment, a call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slipcast.registry.errors import SettingsError
from slipcast.registry.settings_model import (
    PATHS,
    PROJECT_FILE,
    SCHEMA_VERSION,
    sections,
    setting_names,
)
from slipcast.registry.strict_yaml import Where, dotted, load_yaml, parse_yaml
from slipcast.registry.validation import Place, did_you_mean, nearest, shown

LayerName = Literal["default", "preset", "user", "project", "config", "model", "environment", "call"]
Migration = Callable[[Mapping[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}
"""From a version to what turns its settings into those of the next."""

PREFIX = "SLIPCAST_"
CONFIG_VARIABLE = "SLIPCAST_CONFIG"
USER_FILE = "settings.yaml"
_PRESET_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        layer: the layer.
        file: the file, or the environment variable; None for a call.
        line: the line in the file, from 1.
    """

    layer: LayerName
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.layer} {place}" if place else self.layer


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings.

    Attributes:
        name: which layer it is.
        values: the settings that it gives, by dotted name; ``models`` as one.
        locate: gives the file and line of an entry.
    """

    name: LayerName
    values: Mapping[str, Any]
    locate: Callable[[Where], Place]

    def origin(self, key: str) -> Origin:
        """Where this layer gives the setting with this dotted name."""
        place = self.locate(tuple(key.split(".")))
        return Origin(self.name, place.path, place.line)


def mistake_at(locate: Callable[[Where], Place], where: Where, found: str, expected: str, hint: str) -> SettingsError:
    """An error at an entry of a layer."""
    place = locate(where)
    return SettingsError(found, expected=expected, hint=hint, path=place.path, line=place.line, field=dotted(where))


@cache
def read_defaults() -> Layer:
    """The settings of ``configs/defaults.yaml``: all there are."""
    with resources.as_file(resources.files("slipcast.configs") / "defaults.yaml") as path:
        return read_file("default", path)


def read_file(name: LayerName, path: Path) -> Layer:
    """A settings file; an empty one gives no settings.

    Raises:
        SettingsError: it can't be read, is not strict YAML, or is of a version that can't be read.
    """
    document = load_yaml(path, SettingsError)

    def locate(where: Where) -> Place:
        return Place(document.path, document.line_of(where))

    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise mistake_at(
            locate, (), f"the file is {shown(data)}", "settings as 'name: value'", "write one on each line"
        )
    try:
        data = migrate(data)
    except SettingsError as problem:
        place = locate(("schema_version",))
        raise SettingsError(
            problem.found,
            expected=problem.expected,
            hint=problem.hint,
            path=place.path,
            line=place.line,
            field="schema_version",
        ) from None
    _refuse_dotted(data, locate, ())
    return Layer(name, _flat(data, path.parent), locate)


def read_preset(name: str, place: Place) -> Layer:
    """A preset by its name, or a file by its absolute path.

    Args:
        name: the value of the setting ``preset``.
        place: where it was chosen, for the message if there is no such preset.
    """
    with resources.as_file(resources.files("slipcast.configs") / "presets") as built_in:
        known = {path.stem: path for path in sorted(built_in.glob("*.yaml"))}
        if _PRESET_NAME.fullmatch(name) and name not in known:
            raise SettingsError(
                f"no preset is called {name!r}",
                expected=f"one of {', '.join(known)}, or the path of a YAML file",
                hint=did_you_mean(name, known, "choose one of these"),
                path=place.path,
                line=place.line,
                field="preset",
            )
        layer = read_file("preset", known.get(name) or Path(name))
    if layer.values.get("preset") is not None:
        raise mistake_at(
            layer.locate, ("preset",), "a preset that chooses a preset", "settings", "write its settings out"
        )
    return layer


def read_environment(environ: Mapping[str, str], folder: Path) -> Layer:
    """The variables ``SLIPCAST_SECTION__KEY``. An empty one is as if it weren't set.

    Raises:
        SettingsError: a variable is no setting's, or its value can't be read.
    """
    names = _variables()
    given = {
        name: text
        for name, text in environ.items()
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE and text.strip()
    }
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in names:
            near = nearest(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in names])
            raise SettingsError(
                f"the environment variable {name} is no setting",
                expected=f"a setting in capitals after {PREFIX}, with two underscores between section and key",
                hint=f"did you mean {PREFIX}{near}?" if near else "'slipcast settings' shows all of them; unset it",
                path=name,
            )
        values[names[name]] = _parse_value(text, name, names[name])

    def locate(where: Where) -> Place:
        exact = variable(dotted(where))
        return Place(exact if exact in given else variable(str(where[0])) if where else None, None)

    return Layer("environment", _flat(_nested(values, locate), folder), locate)


def read_call(call: Mapping[str, Any], folder: Path) -> Layer:
    """The settings of a call: nested, as ``{"fp8": {"mode": "off"}}``, or by dotted names.

    A dtype or device of torch stands for its name.
    """

    def locate(where: Where) -> Place:  # noqa: ARG001 - a call has no lines
        return Place(None, None)

    named = {key: _named(value) for key, value in call.items()}
    return Layer("call", _flat(_nested(named, locate), folder), locate)


def _named(value: Any) -> Any:
    """``torch.float32`` as "float32", ``torch.device("cuda", 0)`` as "cuda:0"; torch is not imported for it."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    return value


def parse_assignments(arguments: Iterable[str]) -> dict[str, Any]:
    """The settings that a command line gives as ``key=value``.

    Values are single YAML values: ``device=cuda:0``, ``mmap=false``, ``unexpected=[a.*, b.*]``. Of two for one key the
    later one is taken.

    Raises:
        SettingsError: an argument has no ``=``, or its value can't be read.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise SettingsError(
                f"the argument {argument!r}",
                expected="settings as key=value",
                hint=did_you_mean(key, setting_names(), "write for example device=cpu"),
            )
        values[key] = _parse_value(text, None, key)
    return values


def variable(key: str) -> str:
    """The environment variable of a setting: ``fp8.mode`` is ``SLIPCAST_FP8__MODE``."""
    return PREFIX + key.replace(".", "__").upper()


def migrate(
    data: Mapping[str, Any], migrations: Mapping[int, Migration] = MIGRATIONS, newest: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """Settings of any version as those of the newest. Without ``schema_version`` they are the newest already.

    Raises:
        SettingsError: the version is later than the newest, or older than any that can be read.
    """
    version = data.get("schema_version", newest)
    readable = sorted({*migrations, newest})
    if type(version) is not int or version not in readable:
        newer = type(version) is int and version > newest
        raise SettingsError(
            f"schema_version {shown(version)}" + (" is newer than this version of slipcast" if newer else ""),
            expected=f"schema_version {' or '.join(map(str, readable))}, which this version reads",
            hint="upgrade slipcast, or remove the settings that it does not know and the version"
            if newer
            else f"write schema_version: {newest}",
            field="schema_version",
        )
    migrated = dict(data)
    for step in range(version, newest):
        migrated = {**migrations[step](migrated), "schema_version": step + 1}
    return migrated


def find_project_file(folder: Path, home: Path) -> Path | None:
    """The nearest ``slipcast.yaml`` from a folder upwards, up to the first that is a repository or the user's home."""
    for place in (folder, *folder.parents):
        if (place / PROJECT_FILE).is_file():
            return place / PROJECT_FILE
        if place == home or (place / ".git").exists():
            return None
    return None


def entries_for(layer: Layer, checkpoint: Path) -> Iterator[Layer]:
    """What a layer's ``models`` says of one checkpoint, each entry as a layer of its own.

    Args:
        layer: a layer that has been checked.
        checkpoint: the absolute path of the checkpoint.
    """
    for pattern, entry in (layer.values.get("models") or {}).items():
        if (
            fnmatchcase(checkpoint.name, pattern)
            or fnmatchcase(checkpoint.as_posix(), pattern)
            or pattern == checkpoint.name
        ):

            def locate(where: Where, around: Where = ("models", pattern)) -> Place:
                return layer.locate((*around, *where))

            yield Layer("model", entry, locate)


def _variables() -> dict[str, str]:
    """Every environment variable that is a setting's, and that setting; a section with a mode has one as well."""
    keys = [key for key in setting_names() if key != "models"]
    keys += [name for name, kind in sections().items() if hasattr(kind, "BARE_WORD")]
    return {variable(key): key for key in keys}


def _parse_value(text: str, path: str | None, key: str) -> Any:
    try:
        value = parse_yaml(text, error=SettingsError).data
    except SettingsError as problem:
        raise SettingsError(
            f"{key} is {text!r}: {problem.found}",
            expected="one value or a [list]",
            hint=problem.hint,
            path=path,
            field=key,
        ) from None
    if isinstance(value, Mapping):
        raise SettingsError(
            f"{key} is a mapping",
            expected="one value or a [list]",
            hint="set its keys one by one; quote a text that holds ': '",
            path=path,
            field=key,
        )
    return value


def _nested(values: Mapping[str, Any], locate: Callable[[Where], Place]) -> dict[str, Any]:
    """Settings by dotted names as nested ones; the same setting twice is an error."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, inner = key.partition(".")
        given = _section(section, {inner: value} if inner else value)
        if section not in nested:
            nested[section] = given
        elif (
            isinstance(given, Mapping)
            and isinstance(nested[section], Mapping)
            and not given.keys() & nested[section].keys()
        ):
            nested[section] = {**nested[section], **given}
        else:
            raise mistake_at(locate, (section,), f"{section} is given twice", "each setting once", "remove one of them")
    return nested


def _section(name: str, value: Any) -> Any:
    """A section's value, with a single word in its place as the setting that it stands for."""
    word = getattr(sections().get(name), "BARE_WORD", None)
    return {word: value} if word is not None and not isinstance(value, Mapping) else value


def _flat(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings by dotted names. Folders are made absolute; what is no setting stays as it is, to be refused later."""
    flat: dict[str, Any] = {}
    for name, raw in data.items():
        value = _section(name, raw)
        if name in sections() and isinstance(value, Mapping):
            for inner, item in value.items():
                key = f"{name}.{inner}"
                flat[key] = _absolute(item, folder) if key in PATHS else item
        elif name == "models" and isinstance(value, Mapping):
            flat[name] = {
                pattern: _flat(entry, folder) if isinstance(entry, Mapping) else entry
                for pattern, entry in value.items()
            }
        elif name in PATHS and isinstance(value, list | tuple):
            flat[name] = [_absolute(item, folder) for item in value]
        elif name == "preset" and not _PRESET_NAME.fullmatch(str(value)):
            flat[name] = _absolute(value, folder)
        else:
            flat[name] = value
    return flat


def _refuse_dotted(data: Mapping[str, Any], locate: Callable[[Where], Place], around: Where) -> None:
    """A file nests its settings, so that a section stands in one place."""
    for name, value in data.items():
        if "." in name:
            section, _, inner = name.partition(".")
            expected = f"nested names, as in '{section}: {{{inner}: ...}}'"
            raise mistake_at(locate, (*around, name), f"the name {name!r} in a file", expected, "nest it")
        if name == "models" and isinstance(value, Mapping):
            for pattern, entry in value.items():
                _refuse_dotted(entry if isinstance(entry, Mapping) else {}, locate, ("models", pattern))


def _absolute(path: Any, folder: Path) -> Any:
    """A path from the folder on; an empty word names none, and stays, to be refused later."""
    if path == "":
        return path
    return str(folder / os.path.expanduser(path)) if isinstance(path, str | Path) else path  # noqa: PTH111 - never raises


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names as the model has them."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, inner = key.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            nested[key] = value
    return nested
