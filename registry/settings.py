"""Settings from every layer, later ones winning, and for each value where it comes from.

The order is: defaults, preset, the user's file, the project's file, entries of ``models`` that match the checkpoint,
environment, call. The merged values are the last entries of the history that is kept of every setting, so what is said
of a value's origin can't differ from the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.errors import SettingsError, UnsupportedFileError
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.settings_check import check_layer
from slipcast.registry.settings_layers import (
    CONFIG_VARIABLE,
    USER_FILE,
    Layer,
    Origin,
    entries_for,
    find_project_file,
    nest,
    parse_assignments,
    read_call,
    read_defaults,
    read_environment,
    read_file,
    read_preset,
)
from slipcast.registry.settings_model import Fp8Settings, Settings, setting_names
from slipcast.registry.strict_yaml import Where, dotted
from slipcast.registry.validation import Place, validate
from slipcast.registry.weight_files import named_model

__all__ = [
    "Fp8Settings",
    "Origin",
    "ResolvedSettings",
    "Settings",
    "checkpoint_path",
    "parse_assignments",
    "resolve_settings",
    "setting_names",
    "user_settings_file",
]


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings that apply, and why.

    Attributes:
        values: the settings.
        origins: dotted name of each setting to the layer that its value comes from.
        history: dotted name of each setting to what every layer gave, as written there, lowest layer first.
    """

    values: Settings
    origins: Mapping[str, Origin]
    history: Mapping[str, tuple[tuple[Origin, Any], ...]]


def checkpoint_path(path: object) -> Path:
    """The path that a call names; of a folder that stands for a file, that file, by whose name settings may apply.

    Raises:
        UnsupportedFileError: it is neither a text nor a path.
    """
    if isinstance(path, str | os.PathLike):
        return named_model(Path(path))
    raise UnsupportedFileError(
        f"a {type(path).__name__} as the path",
        expected="the path of a file or folder, as a str or a Path",
        hint="pass what pathlib.Path takes",
    )


def user_settings_file() -> Path:
    """The user's settings file, in the folder that the platform keeps for settings. It need not exist."""
    from platformdirs import user_config_dir

    file: Path = Path(user_config_dir("slipcast", appauthor=False)) / USER_FILE
    return file


def resolve_settings(
    call: Mapping[str, object] | None = None,
    *,
    checkpoint: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user_folder: Path | None = None,
    config_file: Path | None = None,
) -> ResolvedSettings:
    """The settings for one call.

    Args:
        call: settings of the call itself, nested or by dotted names; ``parse_assignments`` reads a command line's.
        checkpoint: the file or folder to load, to which entries of ``models`` may apply.
        environ: environment variables; those of the process if left out.
        cwd: the working folder, from which the project's file is looked for; that of the process if left out.
        user_folder: the folder of the user's ``settings.yaml``; the platform's if left out.
        config_file: a file that takes the place of the user's and the project's, as ``SLIPCAST_CONFIG`` does.

    Raises:
        SettingsError: a setting is unknown or has a wrong value, with the file and line where it is given.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    defaults = read_defaults()
    files = _files(environ, cwd, user_folder, config_file)
    above = [read_environment(environ, cwd), read_call(call or {}, cwd)]
    below = [defaults, *_preset([*files, *above]), *files]
    for layer in (*below, *above):
        check_layer(layer, defaults)
    matching = (
        [] if checkpoint is None else [entry for layer in below for entry in entries_for(layer, cwd / checkpoint)]
    )
    return _resolve([*below, *matching, *above])


def _files(environ: Mapping[str, str], cwd: Path, user_folder: Path | None, config_file: Path | None) -> list[Layer]:
    chosen = config_file or environ.get(CONFIG_VARIABLE)
    if chosen:
        return [read_file("config", cwd / os.path.expanduser(chosen))]  # noqa: PTH111 - never raises
    user = user_settings_file() if user_folder is None else user_folder / USER_FILE
    project = find_project_file(cwd, Path(os.path.expanduser("~")))  # noqa: PTH111 - never raises
    layers = [read_file("user", user)] if user.is_file() else []
    return layers if project is None else [*layers, read_file("project", project)]


def _preset(layers: Sequence[Layer]) -> list[Layer]:
    """The preset that the highest of these layers chooses; one of them may also choose none."""
    for layer in reversed(layers):
        if "preset" in layer.values:
            name = layer.values["preset"]
            return [read_preset(name, layer.locate(("preset",)))] if isinstance(name, str) and name else []
    return []


def _resolve(layers: Sequence[Layer]) -> ResolvedSettings:
    history: dict[str, list[tuple[Origin, Any]]] = {key: [] for key in setting_names()}
    for layer in layers:
        for key, value in layer.values.items():
            history[key].append((layer.origin(key), value))
    flat = {key: entries[-1][1] for key, entries in history.items()}
    flat["models"] = _joined_models(layers)
    origins = {key: entries[-1][0] for key, entries in history.items()}

    def locate(where: Where) -> Place:
        origin = origins.get(dotted(where))
        return Place(None, None) if origin is None else Place(origin.file, origin.line)

    values = validate(Settings, _interpolated(flat, origins), locate, SettingsError)
    return ResolvedSettings(
        values, FrozenMapping(origins), FrozenMapping({key: tuple(entries) for key, entries in history.items()})
    )


def _joined_models(layers: Iterable[Layer]) -> dict[str, dict[str, Any]]:
    joined: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for pattern, entry in (layer.values.get("models") or {}).items():
            joined[pattern] = {**joined.get(pattern, {}), **entry}
    return {pattern: nest(entry) for pattern, entry in joined.items()}


def _interpolated(flat: Mapping[str, Any], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The settings with references to one another resolved. OmegaConf is imported only where there is one."""
    own = {key: value for key, value in flat.items() if key != "models"}
    referring = [key for key, value in own.items() if "${" in str(value)]
    if not referring:
        settings: dict[str, Any] = nest(flat)
        return settings
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(nest(own)), resolve=True)
    except (OmegaConfBaseException, RecursionError) as problem:
        named = str(getattr(problem, "full_key", "")).partition("[")[0]
        key = named if named in own else referring[0]
        raise SettingsError(
            f"{key} is {own[key]!r}: {str(problem).splitlines()[0]}",
            expected="a reference to another setting, as in ${chunk_mib} or ${fp8.mode}",
            hint="write the value itself",
            path=origins[key].file,
            line=origins[key].line,
            field=key,
        ) from None
    assert isinstance(resolved, dict)
    return {**{str(key): value for key, value in resolved.items()}, "models": flat["models"]}
