"""``slipcast settings``: each value with the layer that it comes from."""

from __future__ import annotations

import pytest

from slipcast.registry.settings import setting_names
from support.command_line import json_of, output_of, run
from support.isolation import isolate


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def layered(folder):
    """A user's file, a project's file and the environment that say different things of fp8."""
    user = folder / ".config" / "slipcast"
    user.mkdir(parents=True)
    (user / "settings.yaml").write_text("# mine\nfp8: storage\nchunk_mib: 2\n")
    (folder / "slipcast.yaml").write_text('fp8: {mode: "off"}\nmodels:\n  "*turbo*": {mmap: false}\n')
    return {"SLIPCAST_FP8__MODE": "compute"}


def test_every_setting_is_there(folder):
    answer = json_of("settings")
    assert tuple(answer["settings"]) == setting_names()
    assert answer["settings"]["chunk_mib"]["value"] is None
    assert {entry["layer"] for entry in answer["settings"].values()} == {"default"}
    assert all(entry["description"] for entry in answer["settings"].values())
    assert answer["user_file"] == str(folder / ".config" / "slipcast" / "settings.yaml")


def test_the_layer_of_each_value(folder, layered):
    settings = json_of("settings", "--set", "device=cpu", env=layered)["settings"]
    origin = {key: (entry["value"], entry["layer"], entry["file"], entry["line"]) for key, entry in settings.items()}
    user = str(folder / ".config" / "slipcast" / "settings.yaml")
    assert origin["fp8.mode"] == ("compute", "environment", "SLIPCAST_FP8__MODE", None)
    assert origin["chunk_mib"] == (2, "user", user, 3)
    assert origin["device"] == ("cpu", "call", None, None)
    assert origin["mmap"][:2] == (True, "default")
    assert settings["models"]["value"] == {"*turbo*": {"mmap": False}}


def test_one_setting_explained(folder, layered):
    settings = json_of("settings", "--explain", "fp8.mode", env=layered)["settings"]
    assert list(settings) == ["fp8.mode"]
    assert [(entry["layer"], entry["value"]) for entry in settings["fp8.mode"]["history"]] == [
        ("default", "auto"),
        ("user", "storage"),
        ("project", "off"),
        ("environment", "compute"),
    ]
    lines = output_of("settings", "--explain", "fp8.mode", env=layered).splitlines()
    assert lines[0] == "fp8.mode: compute"
    assert "auto: a checkpoint in fp8 stays as it is." in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["environment", "project", "user", "default"]


def test_a_section_explained(layered):
    keys = list(json_of("settings", "--explain", "fp8")["settings"])
    assert keys[:2] == ["fp8.mode", "fp8.weights"]
    assert keys == [name for name in setting_names() if name.startswith("fp8.")]


def test_the_settings_of_one_checkpoint(layered):
    mmap = json_of("settings", "--checkpoint", "some-turbo.safetensors")["settings"]["mmap"]
    assert (mmap["value"], mmap["layer"]) == (False, "model")


def test_what_people_read(folder, layered):
    lines = output_of("settings", env=layered).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-2]}
    assert rows["fp8.mode"] == ["compute", "environment", "SLIPCAST_FP8__MODE"]
    assert rows["chunk_mib"] == ["2", "user", f"{folder}/.config/slipcast/settings.yaml:3"]
    assert rows["preset"][0] == "null"
    assert rows["mmap"][0] == "true"
    assert lines[-1].strip() == f"your own file: {folder}/.config/slipcast/settings.yaml"


def test_a_users_file_that_is_not_there_is_said_so():
    assert output_of("settings").splitlines()[-1].endswith("settings.yaml (not there)")


def test_an_unknown_setting():
    error = json_of("settings", "--explain", "fp8.mod", exit_code=2)
    assert (error["error"], error["field"]) == ("SettingsError", "fp8.mod")
    assert error["hint"] == "did you mean 'fp8.mode'?"


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--set", "devise=cpu"], {}, ["unknown field 'devise'", "did you mean 'device'?"]),
        (["--set", "device"], {}, ["the argument 'device'", "settings as key=value"]),
        (["--set", "mmap=perhaps"], {}, ["mmap is 'perhaps'"]),
        (["--config", "nowhere.yaml"], {}, ["nowhere.yaml"]),
        (["--config", ""], {}, ["--config needs the name of a file"]),
        ([], {"SLIPCAST_DEVISE": "cpu"}, ["SLIPCAST_DEVISE is no setting", "did you mean", "SLIPCAST_DEVICE"]),
    ],
)
def test_settings_that_are_refused(arguments, env, said):
    result = run("settings", *arguments, env=env)
    assert result.exit_code == 2
    assert all(words in result.stderr for words in said)
    assert result.stdout == ""


def test_a_misspelt_setting_in_a_file_has_its_line(folder):
    (folder / "slipcast.yaml").write_text("mmap: true\nchunk_mb: 3\n")
    error = json_of("settings", exit_code=2)
    assert (error["line"], error["field"]) == (2, "chunk_mb")
    assert error["path"] == f"{folder}/slipcast.yaml:2"
    assert error["hint"] == "did you mean 'chunk_mib'?"
