"""``slipcast settings``: every value, and the layer that it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from slipcast.cli.options import call_settings, common_options, settings_options
from slipcast.cli.output import write, write_facts, write_heading, write_json, write_table
from slipcast.registry.errors import SettingsError
from slipcast.registry.settings import Origin, ResolvedSettings, resolve_settings, setting_names, user_settings_file
from slipcast.registry.settings_model import Settings, sections
from slipcast.registry.validation import did_you_mean


@click.command("settings")
@click.option("--explain", metavar="KEY", help="Show one setting: what it means, and what each layer says of it.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Show the settings that apply to this checkpoint; nothing need be there.",
)
@settings_options
@common_options
def command(explain: str | None, checkpoint: Path | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show every setting and where its value comes from.

    Later layers win: defaults, preset, your file, the project's slipcast.yaml, entries under models that match the
    checkpoint, SLIPCAST_ environment variables, the call.

    \b
    Examples:
      slipcast settings
      slipcast settings --explain fp8.mode
      slipcast settings --checkpoint model.safetensors --json
    """
    keys = _keys(explain)
    resolved = resolve_settings(call_settings(assignments), checkpoint=checkpoint)
    if as_json:
        write_json({"user_file": str(user_settings_file()), "settings": {key: _entry(key, resolved) for key in keys}})
    elif explain is not None:
        for key in keys:
            _write_explanation(key, resolved)
    else:
        rows = ((key, _shown(_value(key, resolved)), str(resolved.origins[key])) for key in keys)
        write_table(("setting", "value", "from"), rows)
        write()
        file = user_settings_file()
        write(f"  your own file: {file}{'' if file.is_file() else ' (not there)'}")


def description_of(key: str) -> str:
    """What a setting means, in one line; of one in a section, ``fp8.mode``, what it means there."""
    section, _, inner = key.partition(".")
    fields = sections()[section].model_fields if inner else Settings.model_fields
    return " ".join((fields[inner or section].description or "").split())


def _keys(explain: str | None) -> tuple[str, ...]:
    """All settings, or the one that is asked about; of a section, its settings."""
    names = setting_names()
    if explain is None:
        return names
    asked = tuple(name for name in names if name == explain or name.startswith(f"{explain}."))
    if not asked:
        raise SettingsError(
            f"no setting is called {explain!r}",
            expected="one that 'slipcast settings' lists",
            hint=did_you_mean(explain, names, "see 'slipcast settings' for all of them"),
            field=explain,
        )
    return asked


def _value(key: str, resolved: ResolvedSettings) -> Any:
    value: Any = resolved.values.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def _entry(key: str, resolved: ResolvedSettings) -> dict[str, Any]:
    return {
        "value": _value(key, resolved),
        **_origin(resolved.origins[key]),
        "description": description_of(key),
        "history": [{**_origin(origin), "value": value} for origin, value in resolved.history[key]],
    }


def _origin(origin: Origin) -> dict[str, Any]:
    return {"layer": origin.layer, "file": origin.file, "line": origin.line}


def _write_explanation(key: str, resolved: ResolvedSettings) -> None:
    write_heading(f"{key}: {_shown(_value(key, resolved))}")
    write_facts([("means", description_of(key))])
    write_table(("layer", "says"), ((str(origin), _shown(value)) for origin, value in reversed(resolved.history[key])))


def _shown(value: Any) -> str:
    """A value as YAML's flow style writes it, which is how it is given on a command line."""
    if isinstance(value, str):
        return value
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, default=str, ensure_ascii=False)
