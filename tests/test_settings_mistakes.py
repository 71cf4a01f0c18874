"""Mistakes in settings: what was found, the file and line or the variable, and the nearest right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipcast.registry.errors import SettingsError
from slipcast.registry.settings import (
    parse_assignments,
)
from support.settings_machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "field_", "found", "expected", "hint"),
    [
        ("device: cpu\ndevise: cpu\n", 2, "devise", "unknown field 'devise'", "chunk_mib, companions, compile,",
         "'device'?"),
        ("fp8:\n  mod: off\n", 2, "fp8.mod", "unknown field 'mod' in fp8", "one of hints, least_features, mode",
         "'mode'?"),
        ("fp8: stroage\n", 1, "fp8.mode", "fp8.mode is 'stroage'", "one of auto, off, storage, compute", "'storage'"),
        ("fp8: false\n", 1, "fp8.mode", "fp8.mode is false", "one of auto, off,", "write one of these"),
        ("\nfp8.mode: off\n", 2, "fp8.mode", "the name 'fp8.mode' in a file", "as in 'fp8: {mode: ...}'", "nest it"),
        ("fp8_mode: off\n", 1, "fp8_mode", "unknown field 'fp8_mode'", "mode of the section fp8", "fp8: {mode: off}"),
        ("models:\n  a: {fp8_hints: ignore}\n", 2, "models.a.fp8_hints", "unknown field 'fp8_hints'", "section fp8",
         "write fp8: {hints: ignore}"),
        ("mmap: off\n", 1, "mmap", "mmap is 'off'", "valid boolean", "correct it"),
        ("chunk_mib: 0\n", 1, "chunk_mib", "chunk_mib is 0", "greater than or equal to 1: Size in MiB", "correct it"),
        ("chunk_mib: 1.5\n", 1, "chunk_mib", "chunk_mib is 1.5", "valid integer", "correct it"),
        ("chunk_mib: true\n", 1, "chunk_mib", "chunk_mib is true", "valid integer", "correct it"),
        ("device: gpu\n", 1, "device", "device is 'gpu'", "auto, cpu, cuda, cuda:N", "correct it"),
        ("device:\n", 1, "device", "device is empty", "auto, cpu, cuda, cuda:N", "correct it"),
        ("unexpected:\n  - a\n  - 3\n", 3, "unexpected.1", "unexpected.1 is 3", "valid string", "correct it"),
        ("families: mine\n", 1, "families", "families is 'mine'", "a list", "correct it"),
        ("models:\n  a: {chunk_mb: 1}\n", 2, "models.a.chunk_mb", "unknown field 'chunk_mb'", "one of", "'chunk_mib'"),
        ("models:\n  a: {fp8: x}\n", 2, "models.a.fp8.mode", "fp8.mode is 'x'", "storage", "write one of these"),
        ("models:\n  a: {preset: exact}\n", 2, "models.a.preset", "preset for one checkpoint", "the load", "the top"),
        ("models:\n  a: {models: {}}\n", 2, "models.a.models", "models for one checkpoint", "the load", "the top"),
        ("models:\n  a: storage\n", 2, "models.a", "models.a is 'storage'", "mapping", "correct it"),
        ("preset: exakt\n", 1, "preset", "no preset is called 'exakt'", "one of exact, low-memory,", "'exact'"),
        ("chunk_mib: 1\nchunk_mib: 2\n", 2, "chunk_mib", "the key 'chunk_mib' stands twice", "once", "remove"),
        ("- a\n", 1, "", "the file is a list", "settings as 'name: value'", "one on each line"),
        ("schema_version: 2\n", 1, "schema_version", "schema_version 2 is newer than this version of slipcast",
         "schema_version 1, which this version reads", "upgrade slipcast"),
        ("schema_version: '1'\n", 1, "schema_version", "schema_version '1'", "schema_version 1", "write"),
        ("family: ${oc.env:HOME}\n", 1, "family", "the reference in '${oc.env:HOME}'", "another", "environment"),
        ("family: x${oc.decode:'1'}\n", 1, "family", "the reference in", "another setting", "write the value itself"),
        ("family: ${${device}}\n", 1, "family", "the reference in", "another setting", "write the value itself"),
        ("unexpected: [a, '${env:A}']\n", 1, "unexpected", "the reference in '${env:A}'", "another", "environment"),
        ("models:\n  a: {family: '${oc.env:A}'}\n", 2, "models.a.family", "the reference in", "another setting", ""),
        ("family: ${devise}\n", 1, "family", "family is '${devise}': Interpolation key", "another", ""),
        ("family: ${component}\ncomponent: ${family}\n", 1, "family", "family is '${component}'", "another", ""),
        ("chunk_mib: ${device}\n", 1, "chunk_mib", "chunk_mib is 'cpu'", "valid integer", "correct it"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_its_line(
    machine: Machine, text: str, line: int, field_: str, found: str, expected: str, hint: str
) -> None:
    path = machine.write("project/slipcast.yaml", text)
    machine.write("user/settings.yaml", "device: cpu\n")
    with pytest.raises(SettingsError) as caught:
        machine.resolve({"device": "cpu"})
    error = caught.value
    assert found in error.found
    assert (error.path, error.line, error.field) == (f"{path}:{line}", line, field_)
    assert expected in error.expected
    assert hint in error.hint


def test_a_mistake_is_found_also_where_a_later_layer_hides_it(machine: Machine) -> None:
    path = machine.write("user/settings.yaml", "dtype: bf16\n")
    machine.write("project/slipcast.yaml", "dtype: float32\n")
    with pytest.raises(SettingsError, match="dtype is 'bf16'") as caught:
        machine.resolve()
    assert caught.value.path == f"{path}:1"
    assert caught.value.hint == "did you mean 'bfloat16'?"


@pytest.mark.parametrize(
    ("environ", "path", "found", "hint"),
    [
        (
            {"SLIPCAST_DEVISE": "cpu"},
            "SLIPCAST_DEVISE",
            "variable SLIPCAST_DEVISE is no setting",
            "did you mean SLIPCAST_DEVICE?",
        ),
        ({"SLIPCAST_FP8_MODE": "off"}, "SLIPCAST_FP8_MODE", "is no setting", "did you mean SLIPCAST_FP8__MODE?"),
        ({"SLIPCAST_MODELS": "x"}, "SLIPCAST_MODELS", "is no setting", "unset it"),
        ({"SLIPCAST_ZZZZZZZZ": "1"}, "SLIPCAST_ZZZZZZZZ", "is no setting", "'slipcast settings'"),
        ({"SLIPCAST_FP8": "stor"}, "SLIPCAST_FP8", "fp8.mode is 'stor'", "'storage'"),
        ({"SLIPCAST_FP8__MODE": "stor"}, "SLIPCAST_FP8__MODE", "fp8.mode is 'stor'", "'storage'"),
        ({"SLIPCAST_CHUNK_MIB": "many"}, "SLIPCAST_CHUNK_MIB", "chunk_mib is 'many'", "correct it"),
        ({"SLIPCAST_FP8": "{mode: off}"}, "SLIPCAST_FP8", "fp8 is a mapping", "one by one"),
        ({"SLIPCAST_UNEXPECTED": "[a"}, "SLIPCAST_UNEXPECTED", "unexpected is '[a': not YAML", ""),
        ({"SLIPCAST_FP8": "off", "SLIPCAST_FP8__MODE": "storage"}, "SLIPCAST_FP8", "fp8 is given twice", "remove one"),
        ({"SLIPCAST_FAMILY": "${oc.env:HOME}"}, "SLIPCAST_FAMILY", "the reference in", "write the value itself"),
        ({"SLIPCAST_PRESET": "low-memry"}, "SLIPCAST_PRESET", "no preset is called 'low-memry'", "'low-memory'"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    machine: Machine, environ: dict[str, str], path: str, found: str, hint: str
) -> None:
    machine.environ = environ
    with pytest.raises(SettingsError) as caught:
        machine.resolve()
    assert found in caught.value.found
    assert caught.value.path == path
    assert hint in caught.value.hint


def test_a_setting_of_a_section_by_one_word_is_answered_with_the_form_that_works(machine: Machine) -> None:
    with pytest.raises(SettingsError, match="unknown field 'fp8_remainder'") as caught:
        machine.resolve({"fp8_remainder": "quantise"})
    python, command_line = caught.value.hint.removeprefix("write ").split(", ")
    assert python == "fp8={'remainder': 'quantise'} in Python"
    assert machine.resolve({"fp8": {"remainder": "quantise"}}).values.fp8.remainder == "quantise"
    assert machine.resolve(parse_assignments([command_line.split()[0]])).values.fp8.remainder == "quantise"


def test_no_message_shows_a_pattern(machine: Machine) -> None:
    with pytest.raises(SettingsError) as caught:
        machine.resolve({"device": "gpu:1"})
    assert caught.value.expected.startswith("auto, cpu, cuda, cuda:N, xpu, mps, or for plans a card")
    assert not set("^$\\") & set(str(caught.value))


def test_other_variables_are_none_of_our_business(machine: Machine) -> None:
    machine.environ = {"SLIPCASTING": "x", "PATH": "/bin", "slipcast_device": "cpu"}
    assert machine.resolve().values.device == "auto"


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ({"devise": "cpu"}, "unknown field 'devise'"),
        ({"fp8.mod": "off"}, "unknown field 'mod' in fp8"),
        ({"device": 3}, "device is 3"),
        ({"device": None}, "device is empty"),
        ({"mmap": "false"}, "mmap is 'false'"),
        ({"fp8": "off", "fp8.mode": "storage"}, "fp8 is given twice"),
        ({"models": {"a": {"mmap": False}}}, "models outside a file"),
        ({"schema_version": 2}, "schema_version is 2"),
    ],
)
def test_a_mistake_in_a_call_is_named(machine: Machine, call: dict[str, object], found: str) -> None:
    with pytest.raises(SettingsError) as caught:
        machine.resolve(call)
    assert found in caught.value.found
    assert caught.value.path is None
