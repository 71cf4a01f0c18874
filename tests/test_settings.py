"""Settings: which layer wins, where each value is said to come from, and what the messages say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipcast.registry import settings_layers
from slipcast.registry.errors import SettingsError
from slipcast.registry.settings import (
    Origin,
    Settings,
    parse_assignments,
    setting_names,
    user_settings_file,
)
from slipcast.registry.settings_layers import find_project_file, migrate
from slipcast.registry.strict_yaml import load_yaml
from support.settings_machine import Machine

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULTS = load_yaml(CONFIGS / "defaults.yaml")
CHECKPOINT = "models/some-turbo.safetensors"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    return Machine(tmp_path)


def test_the_defaults_file_holds_exactly_the_settings_each_with_a_comment() -> None:
    assert tuple(DEFAULTS.data) == tuple(Settings.model_fields)
    lines = (CONFIGS / "defaults.yaml").read_text(encoding="utf-8").splitlines()
    for name in setting_names():
        line = DEFAULTS.line_of(tuple(name.split(".")))
        assert line is not None
        assert lines[line - 2].lstrip().startswith("#"), name


def test_without_anything_else_the_defaults_apply(machine: Machine) -> None:
    resolved = machine.resolve()
    assert resolved.values.model_dump(mode="json") == DEFAULTS.data
    assert set(resolved.origins) == set(resolved.history) == set(setting_names())
    for name, origin in resolved.origins.items():
        assert origin == Origin("default", str(CONFIGS / "defaults.yaml"), DEFAULTS.line_of(tuple(name.split("."))))
        assert len(resolved.history[name]) == 1


FILES = {
    "user/settings.yaml": "device: cpu\nfp8: compute\nchunk_mib: 2\nmodels:\n  '*turbo*': {chunk_mib: 7}\n",
    "project/slipcast.yaml": "# this project\nfp8:\n  remainder: quantise\ndtype: bfloat16\n",
}

TABLE: list[tuple[str, dict[str, str], dict[str, str], dict[str, object], dict[str, tuple[object, str]]]] = [
    ("the user's file", {"user/settings.yaml": FILES["user/settings.yaml"]}, {}, {},
     {"device": ("cpu", "user user/settings.yaml:1"), "fp8.mode": ("compute", "user user/settings.yaml:2"),
      "fp8.remainder": ("keep", "default")}),
    ("the project over the user", FILES | {"project/slipcast.yaml": "device: cuda:1\n"}, {}, {},
     {"device": ("cuda:1", "project project/slipcast.yaml:1"), "fp8.mode": ("compute", "user user/settings.yaml:2")}),
    ("sections are joined", FILES, {}, {},
     {"fp8.mode": ("compute", "user user/settings.yaml:2"),
      "fp8.remainder": ("quantise", "project project/slipcast.yaml:3")}),
    ("an entry for the checkpoint over the files", FILES | {"project/slipcast.yaml": "chunk_mib: 3\n"}, {}, {},
     {"chunk_mib": (7, "model user/settings.yaml:5")}),
    ("the environment over an entry for the checkpoint", FILES, {"SLIPCAST_CHUNK_MIB": "9"}, {},
     {"chunk_mib": (9, "environment SLIPCAST_CHUNK_MIB")}),
    ("the call over the environment", FILES, {"SLIPCAST_CHUNK_MIB": "9"}, {"chunk_mib": 11},
     {"chunk_mib": (11, "call")}),
    ("a section's word in the environment", {}, {"SLIPCAST_FP8": "storage"}, {},
     {"fp8.mode": ("storage", "environment SLIPCAST_FP8"), "fp8.remainder": ("keep", "default")}),
    ("a section's key in the environment", {}, {"SLIPCAST_FP8__MODE": "off"}, {},
     {"fp8.mode": ("off", "environment SLIPCAST_FP8__MODE")}),
    ("both for different keys", {}, {"SLIPCAST_FP8": "storage", "SLIPCAST_FP8__REMAINDER": "quantise"}, {},
     {"fp8.mode": ("storage", "environment SLIPCAST_FP8"),
      "fp8.remainder": ("quantise", "environment SLIPCAST_FP8__REMAINDER")}),
    ("values are typed", {}, {"SLIPCAST_MMAP": "false", "SLIPCAST_UNEXPECTED": "[a.*, b]", "SLIPCAST_FAMILY": "~"}, {},
     {"mmap": (False, "environment SLIPCAST_MMAP"), "unexpected": (("a.*", "b"), "environment SLIPCAST_UNEXPECTED"),
      "family": (None, "environment SLIPCAST_FAMILY")}),
    ("an empty variable is not set", {}, {"SLIPCAST_DEVICE": "", "SLIPCAST_NONSENSE": " "}, {},
     {"device": ("auto", "default")}),
    ("a call with a section's word", {}, {}, {"fp8": "storage"}, {"fp8.mode": ("storage", "call")}),
    ("a call with nested keys", {}, {}, {"fp8": {"remainder": "quantise"}}, {"fp8.remainder": ("quantise", "call")}),
    ("a call with dotted names", {}, {}, {"fp8.mode": "off", "fp8.remainder": "quantise"},
     {"fp8.mode": ("off", "call"), "fp8.remainder": ("quantise", "call")}),
    ("a preset under the user's file", {"user/settings.yaml": "chunk_mib: 2\n"}, {"SLIPCAST_PRESET": "low-memory"}, {},
     {"preset": ("low-memory", "environment SLIPCAST_PRESET"), "fp8.mode": ("storage", "preset low-memory"),
      "fp8.remainder": ("quantise", "preset low-memory"), "chunk_mib": (2, "user user/settings.yaml:1")}),
    ("a call may choose no preset", {"user/settings.yaml": "preset: exact\n"}, {}, {"preset": None},
     {"preset": (None, "call"), "fp8.mode": ("auto", "default"), "dtype": ("auto", "default")}),
    ("a preset by its path, beside the file that names it",
     {"user/settings.yaml": "preset: presets/mine.yaml\n", "user/presets/mine.yaml": "\nmmap: false\n"}, {}, {},
     {"mmap": (False, "preset user/presets/mine.yaml:2")}),
    ("lists are replaced", {"user/settings.yaml": "unexpected: [a]\n", "project/slipcast.yaml": "unexpected: [c]\n"},
     {}, {}, {"unexpected": (("c",), "project project/slipcast.yaml:1")}),
    ("a file that only has comments changes nothing", {"project/slipcast.yaml": "# no\n", "user/settings.yaml": ""},
     {}, {}, {"device": ("auto", "default")}),
    ("a file named in the environment replaces both", FILES | {"project/other.yaml": "mmap: false\n"},
     {"SLIPCAST_CONFIG": "other.yaml"}, {},
     {"mmap": (False, "config project/other.yaml:1"), "device": ("auto", "default"), "dtype": ("auto", "default")}),
    ("a reference to another setting", {"project/slipcast.yaml": "chunk_mib: ${header_limit_mib}\n"},
     {"SLIPCAST_HEADER_LIMIT_MIB": "33"}, {},
     {"chunk_mib": (33, "project project/slipcast.yaml:1")}),
    ("a word that YAML 1.1 would take for false", {"project/slipcast.yaml": "fp8: off\n"}, {}, {},
     {"fp8.mode": ("off", "project project/slipcast.yaml:1")}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "environ", "call", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_layer_that_wins_gives_the_value_and_is_named(
    machine: Machine,
    files: dict[str, str],
    environ: dict[str, str],
    call: dict[str, object],
    expected: dict[str, tuple[object, str]],
) -> None:
    for name, text in files.items():
        machine.write(name, text)
    machine.environ = environ
    resolved = machine.resolve(call, checkpoint=Path(CHECKPOINT))
    for name, (value, origin) in expected.items():
        found: Any = resolved.values
        for part in name.split("."):
            found = getattr(found, part)
        shown = str(resolved.origins[name]).replace(f"{machine.root}/", "").replace(f"{CONFIGS}/presets/", "")
        if origin == "default" or origin.startswith("preset low"):
            assert shown.startswith(origin), name
        else:
            assert shown == origin, name
        assert found == value, name
        assert type(found) is type(value), name


def test_the_history_of_a_setting_is_what_every_layer_gave(machine: Machine) -> None:
    for name, text in FILES.items():
        machine.write(name, text)
    machine.environ = {"SLIPCAST_CHUNK_MIB": "9"}
    history = machine.resolve({"chunk_mib": 10}, checkpoint=Path(CHECKPOINT)).history["chunk_mib"]
    assert [(origin.layer, value) for origin, value in history] == [
        ("default", DEFAULTS.data["chunk_mib"]),
        ("user", 2),
        ("model", 7),
        ("environment", 9),
        ("call", 10),
    ]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("some-turbo.safetensors", True),
        ("*turbo*", True),
        ("*/models/*", True),
        ("*/project/models/some-turbo.safetensors", True),
        ("models/some-turbo.safetensors", False),
        ("*base*", False),
        ("some-turbo", False),
        ("SOME-TURBO*", False),
    ],
)
def test_an_entry_is_for_checkpoints_whose_name_or_whole_path_it_matches(
    machine: Machine, pattern: str, matches: bool
) -> None:
    machine.write("project/slipcast.yaml", f"models:\n  '{pattern}': {{fp8: storage}}\n")
    resolved = machine.resolve(checkpoint=Path(CHECKPOINT))
    assert (resolved.values.fp8.mode == "storage") is matches
    assert resolved.values.models == {pattern: {"fp8": {"mode": "storage"}}}
    assert machine.resolve().values.fp8.mode == "auto"


def test_a_name_with_brackets_is_matched_as_it_is_written(machine: Machine) -> None:
    machine.write("project/slipcast.yaml", "models: {'a[1].safetensors': {mmap: false}}\n")
    assert machine.resolve(checkpoint=Path("a[1].safetensors")).values.mmap is False
    assert machine.resolve(checkpoint=Path("b1.safetensors")).values.mmap is True


def test_of_several_entries_later_ones_win(machine: Machine) -> None:
    machine.write("user/settings.yaml", "models: {'*': {chunk_mib: 5, mmap: false}, '*turbo*': {chunk_mib: 6}}\n")
    machine.write("project/slipcast.yaml", "models: {'*': {device: cpu}, '*some*': {chunk_mib: 8}}\n")
    resolved = machine.resolve(checkpoint=Path(CHECKPOINT))
    assert (resolved.values.chunk_mib, resolved.values.mmap, resolved.values.device) == (8, False, "cpu")
    assert [value for _, value in resolved.history["chunk_mib"]] == [DEFAULTS.data["chunk_mib"], 5, 6, 8]
    assert resolved.values.models["*"] == {"chunk_mib": 5, "mmap": False, "device": "cpu"}


def test_folders_are_relative_to_what_names_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(machine.root / "home"))
    machine.write("user/settings.yaml", "families: [mine, /absolute, ~/tilde]\n")
    mine, absolute, tilde = machine.resolve().values.families
    assert (mine, absolute, tilde) == (str(machine.user / "mine"), "/absolute", str(machine.root / "home" / "tilde"))
    machine.environ = {"SLIPCAST_FAMILIES": "[here]"}
    assert machine.resolve().values.families == (str(machine.project / "here"),)
    assert machine.resolve({"families": [Path("there")]}).values.families == (str(machine.project / "there"),)


def test_values_of_a_command_line_are_strict_yaml() -> None:
    arguments = [
        "device=cuda:8.6,12GiB",
        "fp8=off",
        "mmap=false",
        "chunk_mib=2",
        "family=null",
        "unexpected=[a.*, 'b=c']",
    ]
    assert parse_assignments([*arguments, "chunk_mib=3"]) == {
        "device": "cuda:8.6,12GiB",
        "fp8": "off",
        "mmap": False,
        "chunk_mib": 3,
        "family": None,
        "unexpected": ["a.*", "b=c"],
    }


def test_what_is_no_assignment_is_refused() -> None:
    with pytest.raises(SettingsError, match="the argument 'devise'") as caught:
        parse_assignments(["devise"])
    assert caught.value.expected == "settings as key=value"
    assert caught.value.hint == "did you mean 'device'?"
    with pytest.raises(SettingsError, match="fp8 is a mapping"):
        parse_assignments(["fp8={mode: off}"])


def test_a_file_given_by_the_call_replaces_the_others_and_must_be_there(machine: Machine) -> None:
    for name, text in FILES.items():
        machine.write(name, text)
    machine.environ = {"SLIPCAST_CONFIG": "not/there.yaml"}
    given = machine.write("project/given.yaml", "families: [near]\n")
    resolved = machine.resolve(config_file=Path("given.yaml"))
    assert resolved.values.device == "auto"
    assert resolved.values.families == (str(machine.project / "near"),)
    assert resolved.origins["families"] == Origin("config", str(given), 1)
    with pytest.raises(SettingsError, match="can't be read"):
        machine.resolve()


def test_the_project_s_file_is_looked_for_up_to_a_repository_or_the_home(tmp_path: Path) -> None:
    inner = tmp_path / "home" / "repository" / "a" / "b"
    inner.mkdir(parents=True)
    home = tmp_path / "home"
    outer = tmp_path / "slipcast.yaml"
    outer.touch()
    assert find_project_file(inner, tmp_path / "elsewhere") == outer
    assert find_project_file(inner, home) is None
    (home / "slipcast.yaml").touch()
    assert find_project_file(inner, home) == home / "slipcast.yaml"
    (home / "repository" / ".git").mkdir()
    assert find_project_file(inner, home) is None
    (home / "repository" / "slipcast.yaml").touch()
    (home / "repository" / "a" / "slipcast.yaml").touch()
    assert find_project_file(inner, home) == home / "repository" / "a" / "slipcast.yaml"
    assert find_project_file(home / "repository", home) == home / "repository" / "slipcast.yaml"


def test_a_preset_chooses_no_preset(machine: Machine) -> None:
    path = machine.write("project/own.yaml", "mmap: false\npreset: exact\n")
    machine.write("project/slipcast.yaml", "preset: ./own.yaml\n")
    with pytest.raises(SettingsError, match="a preset that chooses a preset") as caught:
        machine.resolve()
    assert caught.value.path == f"{path}:2"


@pytest.mark.parametrize("path", sorted((CONFIGS / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_can_be_chosen_and_changes_something(machine: Machine, path: Path) -> None:
    resolved = machine.resolve({"preset": path.stem})
    changed = {name for name, origin in resolved.origins.items() if origin.layer == "preset"}
    assert changed
    assert all(origin.file == str(path) for origin in resolved.origins.values() if origin.layer == "preset")
    plain = machine.resolve().values.model_dump()
    assert resolved.values.model_dump() != plain | {"preset": path.stem}


def test_the_presets_are_what_they_are_called(machine: Machine) -> None:
    low, exact = (machine.resolve({"preset": name}).values for name in ("low-memory", "exact"))
    assert (low.fp8.mode, low.fp8.remainder, low.dtype) == ("storage", "quantise", "auto")
    assert (exact.fp8.mode, exact.dtype) == ("off", "float32")


def _second(data: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(data)
    changed["fp8"] = {"mode": changed.pop("fp8_mode")}
    return changed


def _third(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "device": "cuda" if data.get("device") == "gpu" else data.get("device")}


def test_old_settings_are_migrated_step_by_step() -> None:
    old = {"schema_version": 1, "fp8_mode": "storage", "device": "gpu"}
    migrations = {1: _second, 2: _third}
    new = {"schema_version": 3, "fp8": {"mode": "storage"}, "device": "cuda"}
    assert migrate(old, migrations, newest=3) == new
    assert migrate({"schema_version": 2, "device": "gpu"}, migrations, newest=3) == {
        "schema_version": 3,
        "device": "cuda",
    }
    assert migrate(new, migrations, newest=3) == new
    assert migrate({"device": "gpu"}, migrations, newest=3) == {"device": "gpu"}
    assert old == {"schema_version": 1, "fp8_mode": "storage", "device": "gpu"}


@pytest.mark.parametrize("version", [0, 4, -1, 1.0, True, "1", None])
def test_settings_of_an_unknown_version_are_refused(version: object) -> None:
    with pytest.raises(SettingsError) as caught:
        migrate({"schema_version": version}, {1: _second, 2: _third}, newest=3)
    assert caught.value.expected == "schema_version 1 or 2 or 3, which this version reads"
    assert ("newer than this version" in caught.value.found) == (version == 4)


def test_a_migrated_file_is_read_and_its_lines_are_still_known(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine.write("project/slipcast.yaml", "schema_version: 0\nold_device: cpu\nmmap: false\n")
    rename = {"old_device": "device"}

    def first(data: Mapping[str, Any]) -> dict[str, Any]:
        return {rename.get(name, name): value for name, value in data.items()}

    monkeypatch.setattr(settings_layers, "migrate", lambda data: migrate(data, {0: first}))
    resolved = machine.resolve()
    assert (resolved.values.device, resolved.values.mmap) == ("cpu", False)
    assert resolved.origins["mmap"] == Origin("project", str(path), 3)
    assert resolved.origins["device"].file == str(path)


def test_the_user_s_file_is_where_the_platform_keeps_settings() -> None:
    path = user_settings_file()
    assert path.name == "settings.yaml"
    assert path.parent.name == "slipcast"


def test_resolved_settings_can_not_be_changed(machine: Machine) -> None:
    resolved: Any = machine.resolve()
    with pytest.raises(AttributeError):
        resolved.values = None
    with pytest.raises(ValueError, match="frozen"):
        resolved.values.fp8.mode = "off"
    with pytest.raises(TypeError):
        resolved.origins["device"] = Origin("call")
    with pytest.raises(TypeError):
        resolved.values.models["a"] = {}
    assert Settings.model_validate(resolved.values.model_dump()) == resolved.values


def test_resolving_imports_omegaconf_only_for_references_and_torch_never(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from slipcast.registry.settings import resolve_settings
folder = Path(sys.argv[1])
resolve_settings(environ={}, cwd=folder, user_folder=folder)
heavy = {"torch", "numpy", "diffusers", "transformers", "omegaconf"}
print(*heavy & {name.partition(".")[0] for name in sys.modules})
resolve_settings({"chunk_mib": "${header_limit_mib}"}, environ={}, cwd=folder, user_folder=folder)
print(*heavy & {name.partition(".")[0] for name in sys.modules})
"""
    (tmp_path / ".git").mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "omegaconf"]
