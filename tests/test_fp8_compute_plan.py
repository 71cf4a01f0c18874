"""fp8 compute from a file: which layers multiply in float8, with which scale of activations, and why not."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import slipcast
from slipcast.engine.fp8_compute import Float8ComputeLinear
from slipcast.engine.layers import QuantisedLinear
from support.fp8_checkpoints import QUANTISED, fp8_file
from support.fp8_compute import fp8_of, multiplying
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

QKV, OUT = "layers.0.attention.qkv", "layers.0.attention.out"
MODEL_QKV = [f"layers.0.attention.{name}" for name in ("to_q", "to_k", "to_v")]
MODEL_OUT = "layers.0.attention.to_out.0"
NARROW = "narrower than fp8.least_features: quantising its input would cost more than the product saves"


def modules_of(plan):
    return {module.path: module for module in plan.modules}


def with_input_scale(tmp_path: Path, value: float, dtype: torch.dtype = torch.float32, shape=()) -> Path:
    file = fp8_file(tiny_tensors(), QUANTISED)
    file.native[f"{QKV}.input_scale"] = torch.full(shape, value, dtype=dtype)
    return file.write(tmp_path / "m.safetensors")


def test_a_plain_file_is_quantised_and_multiplied(tmp_path: Path) -> None:
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    loaded = slipcast.load(path, device="cpu", fp8=fp8_of("compute"))
    plan = loaded.report.plan
    assert plan.settings["fp8"].engaged == "compute"
    assert "emulated" in plan.settings["fp8"].reason
    assert loaded.report.differences == ()
    assert multiplying(plan) == {path for path, m in loaded.model.named_modules() if isinstance(m, Float8ComputeLinear)}
    assert set(MODEL_QKV) | {MODEL_OUT} <= multiplying(plan)
    refused = {m.path: m.reason for m in plan.modules if m.codec is not None and m.products is None}
    assert refused
    assert all("not a multiple of 16" in reason for reason in refused.values())
    assert all(type(loaded.model.get_submodule(path)) is QuantisedLinear for path in refused)
    assert f"{len(multiplying(plan))} multiply in fp8" in loaded.report.summary()


def test_scaled_codes_are_kept_and_multiplied(tmp_path: Path) -> None:
    file = fp8_file(tiny_tensors(), QUANTISED)
    loaded = slipcast.load(file.write(tmp_path / "m.safetensors"), device="cpu", fp8=fp8_of("compute"))
    codes = file.expected_codes()
    for path in [*MODEL_QKV, MODEL_OUT]:
        layer = loaded.model.get_submodule(path)
        assert isinstance(layer, Float8ComputeLinear)
        assert layer.input_scale is None
        assert torch.equal(layer.weight.detach().view(torch.uint8), codes[f"{path}.weight"].view(torch.uint8))
    assert loaded.report.resident == loaded.report.plan.bytes.resident


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_calibrated_scale_of_activations_is_taken(tmp_path: Path, dtype: torch.dtype, shape) -> None:
    path = with_input_scale(tmp_path, 0.03125, dtype, shape)
    loaded = slipcast.load(path, device="cpu", fp8=fp8_of("compute"))
    for name in MODEL_QKV:
        scale = loaded.model.get_submodule(name).input_scale
        assert scale.dtype == torch.float32
        assert scale.item() == 0.03125
        assert modules_of(loaded.report.plan)[name].activation_scale == "static"
    assert loaded.model.get_submodule(MODEL_OUT).input_scale is None
    assert modules_of(loaded.report.plan)[MODEL_OUT].activation_scale == "row"
    assert loaded.report.differences == ()
    fates = {tensor.name: tensor.fate for tensor in loaded.report.plan.tensors}
    assert fates[f"{QKV}.input_scale"] == "side tensor"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1.0, "exactly 1.0"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (0.0, "not positive"),
        (-2.0, "not positive"),
    ],
)
def test_a_scale_of_activations_that_can_t_be_used_is_not_taken(tmp_path: Path, value: float, reason: str) -> None:
    loaded = slipcast.load(with_input_scale(tmp_path, value), device="cpu", fp8=fp8_of("compute"))
    for name in MODEL_QKV:
        assert loaded.model.get_submodule(name).input_scale is None
        module = modules_of(loaded.report.plan)[name]
        assert module.products == "fp8"
        assert reason in module.reason
    assert f"{QKV}.input_scale" in loaded.report.plan.dropped


def test_in_storage_a_scale_of_activations_is_dropped_by_name(tmp_path: Path) -> None:
    plan = slipcast.plan(with_input_scale(tmp_path, 0.5), device="cpu", fp8="storage")
    reason = "no product of its layer takes it: its products are in the compute dtype"
    assert plan.dropped == {f"{QKV}.input_scale": reason}


@pytest.mark.parametrize("mode", ["storage", "compute"])
@pytest.mark.parametrize(
    ("shape", "dtype", "odd"),
    [
        ((7,), torch.float32, "it has shape [7], where one number is needed"),
        ((0,), torch.float32, "it has shape [0], where one number is needed"),
        ((192, 64), torch.float32, "it has shape [192, 64], where one number is needed"),
        ((), torch.int32, "it is in I32, where a float is needed"),
        ((), torch.float8_e4m3fn, "it is in F8_E4M3, where a float is needed"),
    ],
)
def test_what_is_wrong_with_a_scale_of_activations_is_said(tmp_path: Path, shape, dtype, odd: str, mode: str) -> None:
    path = with_input_scale(tmp_path, 0.0, dtype, shape)
    plan = slipcast.load(path, device="cpu", fp8=fp8_of(mode)).report.plan
    assert odd in plan.dropped[f"{QKV}.input_scale"]
    for name in MODEL_QKV:
        assert (odd in modules_of(plan)[name].reason) is (mode == "compute")
        assert modules_of(plan)[name].activation_scale == ("row" if mode == "compute" else None)


def test_a_calibrated_scale_of_a_layer_that_does_not_multiply_in_float8_is_dropped_with_the_reason(tmp_path: Path):
    file = fp8_file(tiny_tensors(), QUANTISED)
    file.native |= {f"{QKV}.input_scale": torch.tensor(0.5), "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    plan = slipcast.plan(file.write(tmp_path / "m.safetensors"), device="cpu", fp8=fp8_of("compute"))
    assert "its producer marks it for products in full precision" in plan.dropped[f"{QKV}.input_scale"]


@pytest.mark.parametrize(("hints", "engaged"), [("follow", False), ("ignore", True)])
def test_a_producer_s_hint_of_full_precision(tmp_path: Path, hints: str, engaged: bool) -> None:
    file = fp8_file(tiny_tensors(), QUANTISED)
    layers = {QKV: {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, OUT: {"format": "float8_e4m3fn"}}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    path = file.write(tmp_path / "m.safetensors", metadata=metadata)
    modules = modules_of(slipcast.plan(path, device="cpu", fp8=fp8_of("compute", hints=hints)))
    assert {modules[name].products == "fp8" for name in MODEL_QKV} == {engaged}
    assert modules[MODEL_OUT].products == "fp8"
    assert ("full precision" in modules[MODEL_QKV[0]].reason) is not engaged


@pytest.mark.parametrize(("remainder", "precision"), [("keep", "bfloat16"), ("quantise", "fp8")])
def test_what_a_producer_left_unquantised(tmp_path: Path, remainder: str, precision: str) -> None:
    path = fp8_file(tiny_tensors(), [QKV]).write(tmp_path / "m.safetensors")
    modules = modules_of(slipcast.plan(path, device="cpu", fp8=fp8_of("compute", remainder=remainder)))
    assert modules[MODEL_QKV[0]].products == "fp8"
    assert modules[MODEL_OUT].precision == precision


def test_layers_too_narrow_to_pay_stay_in_storage(tmp_path: Path) -> None:
    """Of its inputs and of its outputs: of 16 to 64 and of 64 to 16 neither multiplies where 64 are asked for."""
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    loaded = slipcast.load(path, device="cpu", fp8=fp8_of("compute"))
    least = {path: min(loaded.model.get_submodule(path).weight.shape) for path in multiplying(loaded.report.plan)}
    narrow = {path for path, features in least.items() if features < 64}
    assert {path.partition(".")[0] for path in narrow} == {"all_x_embedder", "all_final_layer"}
    plan = slipcast.plan(path, device="cpu", fp8={"mode": "compute", "least_features": 64})
    assert plan.settings["fp8"].engaged == "compute"
    assert multiplying(plan) == least.keys() - narrow
    for path in narrow:
        assert modules_of(plan)[path].codec == "float8_e4m3fn/row"
        assert modules_of(plan)[path].reason == NARROW


def test_where_all_layers_are_too_narrow_storage_is_engaged(tmp_path: Path) -> None:
    path = with_input_scale(tmp_path, 0.25)
    loaded = slipcast.load(path, device="cpu", fp8="compute")
    plan = loaded.report.plan
    assert plan.settings["fp8"].engaged == "storage"
    assert NARROW in plan.settings["fp8"].reason
    assert NARROW in plan.dropped[f"{QKV}.input_scale"]
    assert not any(isinstance(layer, Float8ComputeLinear) for layer in loaded.model.modules())


def test_of_a_model_of_full_width_the_wide_layers_multiply(tmp_path: Path) -> None:
    path = write_checkpoint(recorded("z-image-turbo--comfy-bf16"), tmp_path / "m.safetensors", blocks=1)
    plan = slipcast.plan(path, device="cuda:9.0,80GiB", fp8="compute")
    assert plan.settings["fp8"].engaged == "compute"
    block = {path.removeprefix("layers.0."): m for path, m in modules_of(plan).items() if path.startswith("layers.0.")}
    quantised = {path for path, module in block.items() if module.codec is not None}
    assert {path for path in quantised if block[path].products is None} == {"adaLN_modulation.0"}  # of 256 inputs
    assert len(quantised) == 8
    assert block["adaLN_modulation.0"].reason == NARROW


def test_a_card_without_fp8_cores_gets_storage_and_says_why(tmp_path: Path) -> None:
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    ampere = slipcast.plan(path, device="cuda:8.6,12GiB", fp8=fp8_of("compute"))
    assert ampere.settings["fp8"].engaged == "storage"
    assert "does not multiply in float8" in ampere.settings["fp8"].reason
    assert all(module.products is None for module in ampere.modules)
    ada = slipcast.plan(path, device="cuda:8.9,24GiB", fp8=fp8_of("compute"))
    assert ada.settings["fp8"].engaged == "compute"


def other_family(tmp_path: Path, **lines: str) -> dict[str, object]:
    """Settings that read a file as a copy of the family with some lines of its fp8 section replaced."""
    text = (Path(__file__).parents[1] / "families" / "z-image.yaml").read_text().replace("id: z-image\n", "id: other\n")
    for field, value in lines.items():
        text, count = re.subn(rf"(?m)^    {field}: .*$", f"    {field}: {value}", text)
        assert count == 1
    (tmp_path / "other.yaml").write_text(text)
    return {"families": [str(tmp_path)], "family": "other"}


def test_a_family_may_want_one_scale_for_an_input(tmp_path: Path) -> None:
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    loaded = slipcast.load(
        path, device="cpu", fp8=fp8_of("compute"), **other_family(tmp_path, activation_scale="tensor")
    )
    assert modules_of(loaded.report.plan)[MODEL_OUT].activation_scale == "tensor"
    layer = loaded.model.get_submodule(MODEL_OUT)
    rows = torch.randn(3, layer.in_features).mul(torch.tensor([[1.0], [100.0], [1.0]])).to(layer.compute_dtype)
    alone, together = layer(rows[:1]), layer(rows)[:1]
    assert not torch.equal(alone, together)


@pytest.mark.parametrize(
    ("support", "engaged", "why"),
    [
        ("{unsupported: too coarse}", "storage", "too coarse"),
        ("{not_applicable: it has no matrices}", "storage", "no matrices"),
    ],
)
def test_a_family_that_can_t(tmp_path: Path, support: str, engaged: str, why: str) -> None:
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    plan = slipcast.plan(path, device="cpu", fp8=fp8_of("compute"), **other_family(tmp_path, compute=support))
    assert plan.settings["fp8"].engaged == engaged
    assert why in plan.settings["fp8"].reason


def test_a_saved_plan_of_compute_is_executed_as_it_stands(tmp_path: Path) -> None:
    path = with_input_scale(tmp_path, 0.25)
    plan = slipcast.Plan.from_json(
        json.loads(json.dumps(slipcast.plan(path, device="cpu", fp8=fp8_of("compute")).to_json()))
    )
    loaded = slipcast.load(path, plan=plan)
    assert Counter(type(m).__name__ for m in loaded.model.modules())["Float8ComputeLinear"] > 10
    assert loaded.report.differences == ()
