"""How commands end: messages, objects, exit codes, and never a traceback for what is not a fault of slipcast."""

from __future__ import annotations

import errno
import json

import click
import pytest

from slipcast import api
from slipcast.cli import application as module
from slipcast.cli.application import COMMANDS, application
from slipcast.registry.errors import HeaderError
from support.command_line import json_of, output_of, run
from support.isolation import isolate

KEYS = ["error", "found", "expected", "hint", "path", "items"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


def raising(error):
    def inspect(path, **settings):
        raise error

    return inspect


def test_an_error_of_the_library(folder):
    result = run("inspect", "nowhere.safetensors")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "error: nowhere.safetensors: there is no such file or folder",
        "  expected: a file or folder that can be read",
        "  to do:    Check the path; a model that is published somewhere has to be downloaded first.",
    ]


def test_an_error_of_the_library_as_json(folder):
    error = json_of("inspect", "nowhere.safetensors", exit_code=2)
    assert list(error) == KEYS
    assert error["error"] == "HeaderError"
    assert error["path"] == "nowhere.safetensors"
    assert error["items"] == []


def test_all_items_are_in_the_json_and_the_first_in_the_message(monkeypatch):
    names = [f"tensor.{index}" for index in range(30)]
    monkeypatch.setattr(api, "inspect", raising(HeaderError("odd", expected="even", hint="halve", items=names)))
    assert json_of("inspect", "x", exit_code=2)["items"] == names
    message = run("inspect", "x").stderr
    assert "tensor.0\n" in message
    assert "... and 18 more" in message


@pytest.mark.parametrize(
    ("arguments", "found", "hint"),
    [
        (["inspect"], "Missing argument 'PATH'", "see 'slipcast inspect --help'"),
        (["inspect", ""], "the path is empty", "see 'slipcast inspect --help'"),
        (["inspect", "a", "b"], "unexpected extra argument (b)", "see 'slipcast inspect --help'"),
        (["inspect", "a", "--jason"], "No such option", "see 'slipcast inspect --help'"),
        (["inspekt"], "No such command 'inspekt'", "see 'slipcast --help'"),
        (["__init__"], "No such command", "see 'slipcast --help'"),
        (["plan", "a", "--set"], "requires an argument", "see 'slipcast --help'"),
    ],
)
def test_a_command_line_that_can_not_be_understood(arguments, found, hint):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert found in result.stderr
    assert hint in result.stderr


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "a", "b"], ["inspect", "a", "--jason"], ["inspekt"]])
def test_a_command_line_that_can_not_be_understood_as_json(arguments):
    error = json_of(*arguments, exit_code=2)
    assert list(error) == KEYS
    assert error["error"] == "UsageError"
    assert error["hint"].endswith(" --help'")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EOFError(), click.Abort()])
def test_an_interrupt(monkeypatch, error):
    monkeypatch.setattr(api, "inspect", raising(error))
    result = run("inspect", "x")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "interrupted")
    result = run("inspect", "x", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"] == "Interrupted"


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize("error", [MemoryError("12 GiB"), OutOfMemoryError("12 GiB")])
def test_memory_that_runs_out(monkeypatch, error):
    monkeypatch.setattr(api, "inspect", raising(error))
    assert "memory ran out: 12 GiB" in run("inspect", "x").stderr
    assert json_of("inspect", "x", exit_code=1)["error"] == "MemoryError"


def test_a_machine_that_fails(monkeypatch):
    monkeypatch.setattr(api, "inspect", raising(OSError(errno.ENOSPC, "No space left on device", "/disk/file")))
    assert run("inspect", "x").stderr.startswith("error: /disk/file: No space left on device")
    error = json_of("inspect", "x", exit_code=1)
    assert (error["error"], error["found"], error["path"]) == ("OSError", "No space left on device", "/disk/file")


def test_a_reader_that_went_away(monkeypatch):
    monkeypatch.setattr(api, "inspect", raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    result = run("inspect", "x", "--json")
    assert (result.exit_code, result.output) == (1, "")


def test_a_fault_of_slipcast_shows_where_it_is(monkeypatch):
    monkeypatch.setattr(api, "inspect", raising(KeyError("name")))
    with pytest.raises(KeyError):
        run("inspect", "x")


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_helps_with_an_example(name, option):
    text = output_of(name, option)
    assert text.startswith(f"Usage: slipcast {name} ")
    assert f"  slipcast {name}" in text.split("Usage:", 1)[1].split("\n", 1)[1]
    assert "--json" in text


def test_the_help_lists_the_commands_without_importing_them(monkeypatch):
    monkeypatch.setattr(module, "import_module", raising(AssertionError("imported")))
    text = output_of("-h")
    assert all(f"  {name} " in text and COMMANDS[name][:30] in text for name in COMMANDS)


def test_each_command_has_the_name_under_which_it_is_called():
    with click.Context(application) as context:
        for name in COMMANDS:
            command = application.get_command(context, name)
            assert command is not None
            assert command.name == name


def test_the_version():
    from slipcast import __version__

    assert output_of("--version") == f"slipcast, version {__version__}\n"
