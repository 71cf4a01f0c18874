"""``slipcast load``: the contract of its JSON, the plan beside the outcome, and plans from files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging

import pytest

from slipcast import api
from slipcast.cli import load_command
from support.command_line import json_of, output_of, run
from support.isolation import isolate
from support.tiny_z_image import tiny_tensors, write_native

OPTIONS = ("--set", "fp8=storage", "--set", "dtype=bfloat16", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def model(folder):
    return write_native(folder / "model.safetensors", tiny_tensors())


@pytest.fixture
def plan_file(folder, model):
    path = folder / "plan.json"
    path.write_text(output_of("plan", model, *OPTIONS, "--json"))
    return path


def test_the_contract(model, plan_file):
    outcome = json_of("load", model, *OPTIONS)
    plan = json.loads(plan_file.read_text())
    assert plan.items() <= outcome.items()
    assert outcome["actual_bytes"] == plan["bytes"]["resident"]
    assert set(outcome["peaks"]) == {"host_anonymous", "device"}
    assert outcome["seconds"] > 0
    assert outcome["differences"] == []


def test_the_plan_stands_beside_the_outcome(model):
    text = output_of("load", model, *OPTIONS)
    size = json_of("plan", model, *OPTIONS)["bytes"]["resident"]
    (resident,) = [line for line in text.splitlines() if line.startswith("  resident")]
    assert resident.split() == ["resident", f"{size:,}", f"{size:,}", f"{size / 2**20:.1f}"]
    assert "device peak" not in text
    assert text.splitlines()[-1] == "The outcome is what was planned."


def test_the_bar_follows_the_load(model, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def recording_bar(label):
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(load_command, "progress_bar", recording_bar)
    total = json_of("load", model, *OPTIONS)["bytes"]["read"]
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_an_outcome_that_differs_is_no_success(model, monkeypatch):
    load = api.load

    def worse(*arguments, **settings):
        loaded = load(*arguments, **settings)
        report = dataclasses.replace(loaded.report, differences=("12 bytes were predicted, 13 are resident",))
        return dataclasses.replace(loaded, report=report)

    monkeypatch.setattr(api, "load", worse)
    assert json_of("load", model, exit_code=1)["differences"] == ["12 bytes were predicted, 13 are resident"]
    result = run("load", model)
    assert result.exit_code == 1
    assert "The outcome differs from the plan\n  differences  12 bytes were predicted" in result.stdout


def test_a_plan_from_a_file_is_loaded(model, plan_file):
    outcome = json_of("load", model, "--plan", plan_file)
    assert outcome["settings"]["fp8"]["engaged"] == "storage"
    assert outcome["modules"]["layers.0.attention.to_q"] == "fp8"
    assert outcome["differences"] == []


def test_a_setting_beside_a_plan_is_refused(model, plan_file):
    error = json_of("load", model, "--plan", plan_file, "--set", "fp8=off", exit_code=2)
    assert error["error"] == "PlanMismatchError"
    assert error["items"] == ["the setting fp8 is given beside a plan, which has decided it"]


def test_a_plan_of_another_file_is_refused(folder, model, plan_file):
    other = write_native(folder / "other.safetensors", tiny_tensors(), prefix="diffusion_model.")
    error = json_of("load", other, "--plan", plan_file, exit_code=2)
    assert (error["error"], error["path"]) == ("PlanMismatchError", str(plan_file))
    assert "not those that the plan was made for" in error["items"][0]


def edited(plan_file, **changes):
    data = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**data, **changes}))
    return plan_file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "the file is empty"),
        ("[]", "a JSON list, no object"),
        ("{", "is no JSON"),
        ('{"a": 1, "a": 2}', "holds the name a twice"),
        ('{"version": 1}', "a plan with"),
        ('{"version": 99}', "a plan of version 99"),
        ("{}", "no plan: it does not say its version"),
        ('{"a": 1}', "no plan: it does not say its version"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 32 levels"),
        ("\x80\x04", "pickle"),
    ],
)
def test_what_is_no_plan_is_refused(folder, model, text, found):
    path = folder / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    error = json_of("load", model, "--plan", path, exit_code=2)
    assert error["error"] == "PlanMismatchError"
    assert error["path"] == str(path)
    assert found in error["found"]
    assert (
        "a plan as 'slipcast plan PATH --json' prints it" in error["expected"]
        or "a plan of version 1" in error["expected"]
    )


def test_a_plan_that_was_changed_is_refused(model, plan_file):
    error = json_of("load", model, "--plan", edited(plan_file, compute_dtype="float32"), exit_code=2)
    assert error["items"] == ["the same settings decide otherwise here and now: compute_dtype differ"]


@pytest.mark.parametrize("missing", [True, False])
def test_a_plan_that_can_not_be_read(folder, model, missing):
    path = folder / "plan.json"
    if not missing:
        with path.open("wb") as file:
            file.truncate(65 << 20)
    error = json_of("load", model, "--plan", path, exit_code=2)
    assert error["found"] == ("there is no such file or folder" if missing else f"the JSON file takes {65 << 20} bytes")
    assert error["path"] == str(path)


def test_a_card_that_is_not_there_can_not_be_loaded_to(model):
    error = json_of("load", model, "--device", "cuda:8.6,24GiB", exit_code=2)
    assert error["error"] == "DeviceError"
    assert "which is not there" in error["found"]


def test_verbose_logs_one_line_to_standard_error(model):
    result = run("load", model, *OPTIONS, "-v")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("INFO slipcast")]
    assert "z-image (base): storage fp8, compute bfloat16" in line
    assert logging.getLogger("slipcast").handlers == []
    assert run("load", model, *OPTIONS).stderr == ""


def test_only_the_help_of_plan_offers_a_card_that_is_not_there():
    assert "cuda:8.6" not in output_of("load", "--help")
    assert "not there" in " ".join(output_of("plan", "--help").split())
