"""Configurations of schedulers that are damaged or made with intent: each is refused, by what is wrong with it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.engine.pipeline.schedulers import check_scheduler, make_scheduler
from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError, HeaderError
from slipcast.registry.settings import resolve_settings
from support.tiny_pipelines import write_pipeline

FLOW = "FlowMatchEulerDiscreteScheduler"
DDIM, DPM, EULER, PNDM, UNIPC = (
    f"{name}Scheduler" for name in ("DDIM", "DPMSolverMultistep", "EulerDiscrete", "PNDM", "UniPCMultistep")
)


def scheduler(folder: Path, class_name: str, text: str) -> Companion:
    (folder / "scheduler_config.json").write_text(text)
    return Companion("scheduler", "scheduler", f"diffusers.{class_name}", "here", folder)


def refused(folder: Path, class_name: str, **values: Any) -> CompanionError:
    with pytest.raises(CompanionError) as caught:
        check_scheduler(scheduler(folder, class_name, json.dumps(values)))
    return caught.value


@pytest.mark.parametrize(
    ("class_name", "key", "value", "why"),
    [
        (FLOW, "shift", 0, "not finite"),
        (FLOW, "shift", -3.0, "sigmas"),
        (FLOW, "shift", float("nan"), "shift is nan"),
        (FLOW, "shift", float("inf"), "shift is inf"),
        (FLOW, "shift", "3", "shift is '3'"),
        (FLOW, "shift", True, "shift is True"),
        (FLOW, "shift", None, "shift is None"),
        (FLOW, "shift", {"a": 1}, "shift is {'a': 1}"),
        (FLOW, "num_train_timesteps", 0, "fails"),
        (FLOW, "num_train_timesteps", -1, "num_train_timesteps is -1"),
        (FLOW, "num_train_timesteps", 10**12, "num_train_timesteps is 1000000000000"),
        (FLOW, "num_train_timesteps", 1e3, "num_train_timesteps is 1000.0"),
        (FLOW, "time_shift_type", "x", "time_shift_type is 'x'"),
        (DDIM, "beta_start", -0.1, "beta_start is -0.1, with which DDIMScheduler makes betas below zero"),
        (DDIM, "beta_start", float("nan"), "beta_start is nan"),
        (DDIM, "beta_end", 7.0, "betas above one"),
        (DDIM, "beta_schedule", "x", "beta_schedule is 'x'"),
        (DDIM, "steps_offset", 5000, "steps_offset is 5000"),
        (DDIM, "trained_betas", "x", "trained_betas is 'x'"),
        (DDIM, "trained_betas", [0.1, float("nan")], "trained_betas is"),
        (DDIM, "clip_sample", "yes", "clip_sample is 'yes'"),
        (EULER, "interpolation_type", 5, "interpolation_type is 5"),
        (PNDM, "num_train_timesteps", -5, "num_train_timesteps is -5"),
        (DPM, "solver_order", 10**9, "solver_order is 1000000000"),
        (UNIPC, "flow_shift", float("-inf"), "flow_shift is -inf"),
    ],
)
def test_an_odd_value_is_refused_by_its_key(tmp_path: Path, class_name: str, key: str, value: Any, why: str) -> None:
    began = time.monotonic()
    error = refused(tmp_path, class_name, **{key: value})
    assert time.monotonic() - began < 20  # no table of its size was made
    assert error.path == str(tmp_path / "scheduler_config.json")
    assert error.found.startswith(f"as the scheduler: {key} is ")
    assert why in error.found
    assert error.expected
    assert error.roles == ("scheduler",)


def test_a_shift_by_size_between_equal_lengths_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, FLOW, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=256)
    assert error.found.startswith("as the scheduler: max_image_seq_len is 256, with which")
    assert error.expected.endswith("4096")


def test_a_shift_by_size_that_overflows_is_refused(tmp_path: Path) -> None:
    assert "max_shift is 1e+308" in refused(tmp_path, FLOW, use_dynamic_shifting=True, max_shift=1e308).found


def test_values_that_only_together_fail_are_all_listed(tmp_path: Path) -> None:
    error = refused(tmp_path, DDIM, beta_start=-0.1, beta_end=-0.2)
    assert error.items == ("beta_start: -0.1", "beta_end: -0.2")


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    error = refused(tmp_path, FLOW, shitf=3.0)
    assert "shitf is 3.0, and no scheduler has such a key" in error.found
    assert "shift" in error.hint


@pytest.mark.parametrize("text", ["", "[]", "{", '{"shift": 1, "shift": 2}', "\0"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HeaderError):
        check_scheduler(scheduler(tmp_path, FLOW, text))


def test_a_folder_without_its_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"scheduler_config\.json"):
        check_scheduler(Companion("scheduler", "scheduler", f"diffusers.{FLOW}", "here", tmp_path))


def own_classes() -> list[type]:
    found = (getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler"))
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)]


@pytest.mark.parametrize("kind", own_classes(), ids=lambda kind: kind.__name__)
def test_what_diffusers_itself_saves_is_taken(tmp_path: Path, kind: Any) -> None:
    try:
        made = kind()
    except Exception:
        pytest.skip("it has no defaults, or lacks a library")
    made.save_pretrained(tmp_path)
    companion = Companion("scheduler", "scheduler", f"diffusers.{kind.__name__}", "here", tmp_path)
    check_scheduler(companion)
    own = {key: value for key, value in made.config.items() if not key.startswith("_")}
    assert json.dumps(own | dict(make_scheduler(companion).config)) == json.dumps(
        dict(make_scheduler(companion).config)
    )


PUBLISHED = {
    "another class's keys": (
        EULER,
        {"_class_name": EULER, "_diffusers_version": "0.19.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
         "beta_start": 0.00085, "clip_sample": False, "interpolation_type": "linear", "num_train_timesteps": 1000,
         "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True,
         "steps_offset": 1, "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False},
    ),
    "an infinity": (
        DPM,
        {"algorithm_type": "dpmsolver++", "beta_end": 0.02, "beta_start": 0.0001, "euler_at_final": False,
         "lambda_min_clipped": float("-inf"), "lower_order_final": True, "solver_order": 2, "solver_type": "midpoint",
         "timestep_spacing": "linspace", "trained_betas": None, "use_lu_lambdas": False, "variance_type": None},
    ),
    "a solver of another class": (DPM, {"solver_type": "bh2", "use_flow_sigmas": True, "flow_shift": 5.0,
                                        "prediction_type": "flow_prediction", "disable_corrector": []}),
    "a shift by the size": (
        FLOW,
        {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 8192, "max_shift": 0.9, "shift": 1.0,
         "shift_terminal": 0.02, "stochastic_sampling": False, "use_dynamic_shifting": True},
    ),
}  # fmt: skip
"""As folders of published pipelines have them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_taken(tmp_path: Path, name: str) -> None:
    class_name, values = PUBLISHED[name]
    check_scheduler(scheduler(tmp_path, class_name, json.dumps(values)))


def test_the_caller_draws_the_same_numbers_after_a_check(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_scheduler(scheduler(tmp_path, "EulerAncestralDiscreteScheduler", "{}"))
    assert torch.rand(4).equal(expected)


def test_a_plan_refuses_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = write_pipeline("z-image", tmp_path / "z-image")
    (folder / "scheduler" / "scheduler_config.json").write_text('{"shift": 0}')
    with pytest.raises(CompanionError, match="shift is 0, with which"):
        make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
