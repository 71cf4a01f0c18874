"""Checks each layer of settings by itself, so that a mistake is shown where it is, even if a later layer hides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slipcast.registry.errors import SettingsError
from slipcast.registry.settings_layers import Layer, mistake_at, nest
from slipcast.registry.settings_model import NOT_PER_MODEL, Settings, setting_names
from slipcast.registry.strict_yaml import Where
from slipcast.registry.validation import Place, validate

_REFERENCE = re.compile(r"\$\{[a-z_0-9]+(\.[a-z_0-9]+)*\}")


def check_layer(layer: Layer, defaults: Layer) -> None:
    """Hold a layer against the settings' types, laid over the defaults alone.

    Raises:
        SettingsError: with the file and line of an unknown setting, a wrong value, or a reference that is not allowed.
    """
    _check_references(layer.values, layer.locate, ())
    _refuse_flattened(layer.values, layer.name == "call", layer.locate, ())
    _check_values(layer.values, defaults, layer.locate, ())
    entries = layer.values.get("models")
    if not isinstance(entries, Mapping):
        return
    if layer.name == "call":
        raise mistake_at(
            layer.locate, ("models",), "models outside a file", "the setting itself", "write it into slipcast.yaml"
        )
    for pattern, entry in entries.items():
        where = ("models", pattern)
        for name in sorted(NOT_PER_MODEL & entry.keys()):
            raise mistake_at(
                layer.locate,
                (*where, name),
                f"{name} for one checkpoint",
                "settings of the load itself",
                "move it to the top of the file",
            )
        _check_references(entry, layer.locate, where)
        _refuse_flattened(entry, False, layer.locate, where)
        _check_values(entry, defaults, layer.locate, where)


def _refuse_flattened(
    values: Mapping[str, Any], in_call: bool, locate: Callable[[Where], Place], around: Where
) -> None:
    """Refuse ``fp8_remainder``, as a setting in a section is often called, with the form that works."""
    flattened = {key.replace(".", "_"): key for key in setting_names() if "." in key}
    for name, value in values.items():
        if name in flattened:
            section, _, inner = flattened[name].partition(".")
            nested = f"{section}: {{{inner}: {value}}}"
            called = f"{section}={{{inner!r}: {value!r}}} in Python, {section}.{inner}={value} on a command line"
            raise mistake_at(
                locate,
                (*around, name),
                f"unknown field {name!r}",
                f"the setting {inner} of the section {section}",
                f"write {called if in_call else nested}",
            )


def _check_values(values: Mapping[str, Any], defaults: Layer, locate: Callable[[Where], Place], around: Where) -> None:
    known = {key: value for key, value in values.items() if not _refers(value)}
    validate(Settings, nest({**defaults.values, **known}), locate, SettingsError, around)


def _check_references(values: Mapping[str, Any], locate: Callable[[Where], Place], around: Where) -> None:
    for key, value in values.items():
        for text in _texts(value):
            if "${" in _REFERENCE.sub("", text):
                raise mistake_at(
                    locate,
                    (*around, *key.split(".")),
                    f"the reference in {text!r}",
                    "another setting, as in ${chunk_mib} or ${fp8.mode}",
                    "write the value itself; the environment and files can't be read from settings",
                )


def _refers(value: Any) -> bool:
    return any("${" in text for text in _texts(value))


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]
