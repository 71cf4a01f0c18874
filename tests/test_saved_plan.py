"""Loads from a plan that was made before: only for the very file, family file and machine that it was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import slipcast
from slipcast.engine.plan import Plan
from slipcast.registry.errors import PlanMismatchError
from support.isolation import isolate
from support.tiny_z_image import Tensors, natively, tiny_tensors, write_folder

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "fp8": "storage", "mmap": False, "chunk_mib": 2}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


@pytest.fixture
def path(tmp_path: Path, tensors: Tensors) -> Path:
    save_file(natively(tensors), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def _saved(plan: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json())))


def _refusal(path: Path, plan: Plan, **settings: Any) -> PlanMismatchError:
    with pytest.raises(PlanMismatchError) as caught:
        slipcast.load(path, plan=plan, **settings)
    assert caught.value.found == "a plan that does not fit this load"
    assert "make the plan again: slipcast plan" in caught.value.hint
    return caught.value


def test_a_saved_plan_is_what_is_loaded(path: Path) -> None:
    plan = _saved(slipcast.plan(path, **SETTINGS))
    steps: list[int] = []
    loaded = slipcast.load(path, plan=plan, progress=lambda done, _: steps.append(done))
    assert loaded.report.plan == plan
    assert loaded.report.differences == ()
    assert steps[-1] == plan.bytes.read
    straight = slipcast.load(path, **SETTINGS).model.state_dict()
    state = loaded.model.state_dict()
    assert state.keys() == straight.keys()
    assert all(
        torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in straight.items()
    )


@pytest.mark.parametrize(
    "name", ["device", "dtype", "fp8", "mmap", "unexpected", "chunk_mib", "device_reserve_mib", "component"]
)
def test_settings_that_a_plan_has_decided_are_refused_beside_it(path: Path, name: str) -> None:
    values = {**SETTINGS, "unexpected": ["x"], "device_reserve_mib": 1, "component": "x"}
    error = _refusal(path, slipcast.plan(path, **SETTINGS), **{name: values[name]})
    assert f"the setting {name} is given beside a plan, which has decided it" in error.items


def test_settings_that_have_no_bearing_on_it_are_not(path: Path) -> None:
    plan = slipcast.plan(path, **SETTINGS)
    assert slipcast.load(path, plan=plan, header_limit_mib=3).report.plan == plan


def test_a_plan_made_with_settings_of_pipelines_is_executed(path: Path) -> None:
    plain = slipcast.plan(path, **SETTINGS)
    plan = _saved(slipcast.plan(path, memory="low", **SETTINGS))
    assert plan.notes[:-1] == plain.notes
    assert slipcast.load(path, plan=plan).report.plan == plain


def test_a_setting_of_a_section_is_refused_as_well(path: Path) -> None:
    error = _refusal(path, slipcast.plan(path, **SETTINGS), **{"fp8.remainder": "quantise"})
    assert error.items == ("the setting fp8 is given beside a plan, which has decided it",)


def test_a_plan_carries_the_component_and_the_family_that_it_was_made_for(tmp_path: Path, tensors: Tensors) -> None:
    pipeline = tmp_path / "pipeline"
    for name in ("first", "second"):
        write_folder(pipeline / name, tensors if name == "first" else tiny_tensors(seed=3))
    entry = ["diffusers", "ZImageTransformer2DModel"]
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "P", "first": entry, "second": entry}))
    plan = _saved(slipcast.plan(pipeline, component="second", family="z-image", **SETTINGS))
    assert (plan.request.component, plan.request.family, plan.origin.component) == ("second", "z-image", "second")
    loaded = slipcast.load(pipeline, plan=plan)
    assert loaded.report.plan == plan
    straight = slipcast.load(pipeline / "second", **SETTINGS).model
    assert torch.equal(loaded.model.x_pad_token, straight.x_pad_token)
    assert not torch.equal(loaded.model.x_pad_token, slipcast.load(pipeline, **SETTINGS).model.x_pad_token)


def _one_row_less(tensors: Tensors) -> Tensors:
    return {**tensors, "extra": torch.ones(1, dtype=torch.bfloat16)}


def _other_dtype(tensors: Tensors) -> Tensors:
    return {**tensors, "x_embedder.bias": tensors["x_embedder.bias"].float()}


@pytest.mark.parametrize("change", [_one_row_less, _other_dtype])
def test_another_file_is_refused(path: Path, tensors: Tensors, change: Callable[[Tensors], Tensors]) -> None:
    plan = slipcast.plan(path, unexpected=["extra"], **SETTINGS)
    save_file(change(natively(tensors)), path)
    error = _refusal(path, plan)
    assert "the file's names, dtypes, shapes or byte ranges are not those that the plan was made for" in error.items


def test_other_values_under_the_same_header_are_the_same_file(path: Path) -> None:
    plan = slipcast.plan(path, **SETTINGS)
    save_file(natively(tiny_tensors(seed=5)), path)
    assert slipcast.load(path, plan=plan).report.differences == ()


def test_another_family_file_is_refused(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "families"
    folder.mkdir()
    head = "schema: 1\nid: own\nkind: denoiser\nextends: z-image\nmodel: diffusers.ZImageTransformer2DModel\n"
    (folder / "own.yaml").write_text(f"{head}title: Own\n")
    mine: dict[str, Any] = {"families": [str(folder)], "family": "own"}
    plan = slipcast.plan(path, **SETTINGS, **mine)
    known = {"families": [str(folder)]}
    assert slipcast.load(path, plan=plan, **known).report.plan == plan
    (folder / "own.yaml").write_text(f"{head}title: Another\n")
    error = _refusal(path, plan, **known)
    assert error.items == ("the family file own is not the one that the plan was made with",)
    with pytest.raises(PlanMismatchError, match=r"a plan for the family own, which is not known here(.|\n)*families"):
        slipcast.load(path, plan=plan)


def _edited(plan: Plan, *where: str | int, value: Any) -> Plan:
    data = plan.to_json()
    place: Any = data
    for part in where[:-1]:
        place = place[part]
    assert place[where[-1]] != value
    place[where[-1]] = value
    return Plan.from_json(data)


@pytest.mark.parametrize(
    ("where", "value", "field"),
    [
        (("bytes", "resident"), 1, "bytes"),
        (("compute_dtype",), "float32", "compute_dtype"),
        (("device",), "cuda:0", "device"),
        (("module_details", 3, "codec"), "float8_e4m3fn/tensor", "modules"),
        (("module_details", 3, "reason"), "because", "modules"),
        (("targets", 0, "name"), "other", "targets"),
        (("targets", 0, "pieces", 0, "source"), "layers.0.attention.qkv.weight", "targets"),
        (("targets", 2, "how"), "decode", "targets"),
        (("targets", 0, "mapped"), True, "targets"),
        (("tensors", 0, "fate"), "dropped", "tensors"),
        (("settings", "fp8", "reason"), "because", "settings"),
        (("notes",), ["all is well"], "notes"),
        (("origin", "config", "dim"), 128, "origin"),
    ],
)
def test_an_edited_plan_is_refused(path: Path, where: tuple[str | int, ...], value: Any, field: str) -> None:
    plan = _edited(slipcast.plan(path, **SETTINGS), *where, value=value)
    (line,) = _refusal(path, plan).items
    assert line == f"the same settings decide otherwise here and now: {field} differ"


def test_a_request_that_was_edited_is_planned_anew_and_differs(path: Path) -> None:
    plan = _edited(slipcast.plan(path, **SETTINGS), "request", "fp8_mode", value="off")
    (line,) = _refusal(path, plan).items
    assert "modules" in line
    assert "targets" in line


@pytest.mark.parametrize("data", [None, [], {}, {"version": 99}, {"version": 1}, {"version": 1, "targets": 3}])
def test_what_is_no_plan(data: Any) -> None:
    with pytest.raises(PlanMismatchError, match="a plan"):
        Plan.from_json(data)


def test_a_plan_with_an_unknown_word_says_where(path: Path) -> None:
    data = slipcast.plan(path, **SETTINGS).to_json()
    data["targets"][0]["how"] = "guess"
    with pytest.raises(PlanMismatchError) as caught:
        Plan.from_json(data)
    assert caught.value.items[0].startswith("targets.0.how: Input should be 'copy', 'encode'")
