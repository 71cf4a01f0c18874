"""Loading fp8 checkpoints: every shape and spelling of a scale against a decoder of our own, kept and dequantised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AceStepTransformer1DModel
from safetensors.torch import load_file, save_file
from torch import nn

import slipcast
from slipcast.engine import chunks
from support.convolutions import ACE, ACE_CONFIG
from support.fp8_checkpoints import KEPT, QUANTISED, Fp8File, Scaled, decoded, fp8_file
from support.fp8_compute import fp8_of, multiplying
from support.isolation import isolate
from support.number_formats import bytes_of, relative_l2
from support.tiny_z_image import Tensors, tiny_tensors

E5M2 = torch.float8_e5m2
SCALES = {
    "one for the weight": Scaled(""),
    "one for the weight, of one dimension": Scaled("1", "old"),
    "one for each row": Scaled("N"),
    "one for each row, in a column": Scaled("N1", "old"),
    "in bfloat16": Scaled("", dtype=torch.bfloat16),
    "in float16, by row": Scaled("N", "old", dtype=torch.float16),
    "one for each block of columns": Scaled("NB1"),
    "one for each block of columns, of two dimensions": Scaled("NB", "old"),
}
FOLDED = {
    "e5m2 with one scale": (Scaled("1", "old", E5M2), "its codes are e5m2, which no layer keeps"),
    "e5m2 by row": (Scaled("N1", codes=E5M2), "its codes are e5m2, which no layer keeps"),
}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


def _load(file: Fp8File, tmp_path: Path, *, metadata: Mapping[str, str] | None = None, **settings: Any) -> Any:
    path = file.write(tmp_path / "m.safetensors", metadata=metadata)
    loaded = slipcast.load(path, **{"device": "cpu", "dtype": "float32", **settings})
    assert loaded.report.differences == ()
    fates = [tensor.name for tensor in loaded.report.plan.tensors]
    assert sorted(fates) == sorted(file.native)
    return loaded


def _check_values(model: nn.Module, file: Fp8File) -> None:
    """Every weight in float32, decoded where it is kept, against what codes and scales say."""
    held = dict(model.state_dict())
    for name, expected in file.expected().items():
        scale = held.pop(name.removesuffix(".weight") + ".weight_scale", None)
        tensor = held.pop(name).detach()
        values = decoded(tensor, scale) if tensor.element_size() == 1 else tensor.float()
        torch.testing.assert_close(values, expected.reshape(values.shape), rtol=1e-6, atol=0, msg=name)
    assert held == {}


def _codecs(loaded: Any) -> dict[str, str]:
    return {module.path: module.codec for module in loaded.report.plan.modules if module.codec is not None}


def _kept_targets(loaded: Any) -> set[str]:
    return {target.name for target in loaded.report.plan.targets if target.how == "keep"}


@pytest.mark.parametrize(("mmap", "rows"), [(True, None), (False, 7)])
@pytest.mark.parametrize("kind", SCALES | {kind: how for kind, (how, _) in FOLDED.items()})
def test_dequantised_weights_are_codes_times_scale(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, kind: str, mmap: bool, rows: int | None
) -> None:
    if rows is not None:
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    file = fp8_file(tensors, QUANTISED, SCALES.get(kind) or FOLDED[kind][0])
    loaded = _load(file, tmp_path, fp8="off", mmap=mmap)
    _check_values(loaded.model, file)
    assert _codecs(loaded) == {}
    assert all(not hasattr(module, "weight_scale") for module in loaded.model.modules())
    folded = loaded.report.plan.folded
    assert folded.keys() == {f"{layer}.weight" for layer in QUANTISED}
    assert set(folded.values()) == {"dequantised: fp8 is off"}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("kind", SCALES)
def test_kept_codes_are_the_file_s_bit_by_bit(tmp_path: Path, tensors: Tensors, kind: str, mmap: bool) -> None:
    file = fp8_file(tensors, QUANTISED, SCALES[kind])
    loaded = _load(file, tmp_path, dtype="bfloat16", mmap=mmap)
    state = loaded.model.state_dict()
    codes = file.expected_codes()
    assert len(codes) == 35
    for name, expected in codes.items():
        assert (bytes_of(state[name]) == bytes_of(expected)).all(), name
        scale = state[name.removesuffix("weight") + "weight_scale"]
        shape = {"": (), "1": (), "N": expected.shape[:1], "N1": expected.shape[:1]}
        assert (scale.dtype, scale.shape) == (torch.float32, shape.get(SCALES[kind].scale, (expected.shape[0], 2, 1)))
    assert _kept_targets(loaded) == codes.keys()
    assert all(target.mapped is mmap for target in loaded.report.plan.targets if target.how == "keep")
    assert loaded.report.plan.settings["fp8"].engaged == "storage"
    _check_values(loaded.model.float(), file)


@pytest.mark.parametrize("kind", FOLDED)
def test_codes_that_no_layer_keeps_are_dequantised_with_the_reason(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    how, reason = FOLDED[kind]
    file = fp8_file(tensors, QUANTISED, how)
    loaded = _load(file, tmp_path)
    _check_values(loaded.model, file)
    assert set(loaded.report.plan.folded.values()) == {f"dequantised: {reason}"}
    fp8 = loaded.report.plan.settings["fp8"]
    assert (fp8.requested, fp8.engaged) == ("auto", "off")


def test_layers_that_the_family_keeps_are_dequantised_with_their_scale(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, (*QUANTISED, *KEPT), Scaled("N", "old"))
    loaded = _load(file, tmp_path)
    _check_values(loaded.model, file)
    assert loaded.report.plan.folded.keys() == {f"{layer}.weight" for layer in KEPT}
    assert "keeps its text embedding unquantised" in loaded.report.plan.folded["cap_embedder.1.weight"]
    assert not set(KEPT) & _codecs(loaded).keys()
    for layer in KEPT:
        assert loaded.model.get_submodule(layer).weight.dtype == torch.float32


def test_codes_without_a_scale_stay_in_layers_and_are_decoded_elsewhere(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors)
    for name in list(file.native):
        file.cast(name)
    loaded = _load(file, tmp_path, dtype="bfloat16")
    assert set(_codecs(loaded).values()) == {"float8_e4m3fn/none"}
    assert len(_codecs(loaded)) == 42
    _check_values(loaded.model, file)
    folded = loaded.report.plan.folded
    assert folded["x_pad_token"] == folded["x_embedder.bias"] == "dequantised: only weights of layers keep codes"
    assert folded["layers.0.attention_norm1.weight"].startswith("dequantised: a RMSNorm does not keep codes")
    plain = loaded.report.plan.settings["dtype"]
    assert plain.requested == "bfloat16"
    off = _load(file, tmp_path, fp8="off")
    _check_values(off.model, file)
    assert off.report.plan.folded.keys() == file.native.keys()


def test_codes_of_e5m2_without_a_scale(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors)
    for layer in QUANTISED:
        file.cast(f"{layer}.weight", E5M2)
    _check_values(_load(file, tmp_path).model, file)


def test_a_layer_with_a_scale_among_layers_without(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, QUANTISED[::2], Scaled(""))
    for layer in QUANTISED[1::2]:
        file.cast(f"{layer}.weight")
    loaded = _load(file, tmp_path)
    _check_values(loaded.model, file)
    assert set(_codecs(loaded).values()) == {"float8_e4m3fn/none", "float8_e4m3fn/tensor"}
    assert loaded.model.get_submodule("layers.0.attention.to_q").codec.name == "float8_e4m3fn/tensor"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("place", ["metadata", "tensors", "one for the file"])
def test_markers_belong_to_their_weights(tmp_path: Path, tensors: Tensors, place: str, prefix: str) -> None:
    file = fp8_file(tensors, QUANTISED, Scaled(""))
    metadata: dict[str, str] = {}
    marker = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    if place == "metadata":
        layers = {prefix + layer: marker for layer in QUANTISED}
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    elif place == "tensors":
        for layer in QUANTISED:
            raw = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
            file.native[f"{layer}.comfy_quant"] = raw
    else:
        file.native["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    path = file.write(tmp_path / "m.safetensors", prefix=prefix, metadata=metadata)
    loaded = slipcast.load(path, device="cpu", dtype="float32")
    assert loaded.report.differences == ()
    _check_values(loaded.model, file)
    plan = loaded.report.plan
    assert len(_codecs(loaded)) == 35
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(prefix + name for name in file.native)
    assert plan.notes == ("variant base: no tensor and no file name says otherwise",)


def test_a_marker_that_contradicts_the_codes_is_noted(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, QUANTISED[:1], Scaled("", codes=E5M2))
    layers = {QUANTISED[0]: {"format": "float8_e4m3fn"}}
    loaded = _load(file, tmp_path, metadata={"_quantization_metadata": json.dumps({"layers": layers})})
    _check_values(loaded.model, file)
    assert f"{QUANTISED[0]}.weight: marked as 'float8_e4m3fn', stored as F8_E5M2" in loaded.report.plan.notes


def test_a_calibrated_input_scale_is_dropped_where_no_product_takes_it(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, QUANTISED[:2], Scaled("1", "old"))
    file.native[f"{QUANTISED[0]}.scale_input"] = torch.tensor(0.5)
    loaded = _load(file, tmp_path)
    _check_values_without(loaded.model, file, f"{QUANTISED[0]}.scale_input")
    fates = {tensor.name: tensor for tensor in loaded.report.plan.tensors}
    side = fates[f"{QUANTISED[0]}.scale_input"]
    assert (side.fate, side.reason) == (
        "dropped",
        "no product of its layer takes it: its products are in the compute dtype",
    )


def _check_values_without(model: nn.Module, file: Fp8File, name: str) -> None:
    del file.native[name]
    _check_values(model, file)


@pytest.mark.parametrize("remainder", ["keep", "quantise"])
def test_what_a_producer_left_alone(tmp_path: Path, tensors: Tensors, remainder: str) -> None:
    scaled = [layer for layer in QUANTISED if layer.startswith("layers.")]
    file = fp8_file(tensors, scaled, Scaled(""))
    loaded = _load(file, tmp_path, fp8={"mode": "storage", "remainder": remainder})
    codecs = _codecs(loaded)
    assert codecs["layers.0.attention.to_k"] == "float8_e4m3fn/tensor"
    refiner = codecs.get("noise_refiner.0.attention.to_k")
    assert refiner == (None if remainder == "keep" else "float8_e4m3fn/row")
    decision = loaded.report.plan.settings["fp8.remainder"]
    assert (decision.requested, decision.engaged) == (remainder, remainder)
    kept = {name for name in file.expected_codes() if name.startswith("layers.")}
    assert _kept_targets(loaded) == kept
    state = loaded.model.state_dict()
    assert all((bytes_of(state[name]) == bytes_of(file.expected_codes()[name])).all() for name in kept)


@pytest.mark.parametrize("mode", ["auto", "storage", "compute"])
@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("kind", FOLDED)
def test_codes_that_no_layer_keeps_are_quantised_anew_on_request(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int | None, mode: str
) -> None:
    """e5m2 has fewer bits than e4m3: what is lost on the way is what quantising loses anyhow."""
    if rows is not None:
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    how, reason = FOLDED[kind]
    file = fp8_file(tensors, (*QUANTISED, *KEPT), how)
    file.native[f"{QUANTISED[0]}.input_scale"] = torch.tensor(0.5)
    loaded = _load(file, tmp_path, fp8=fp8_of(mode, remainder="quantise"), mmap=rows is None)
    plan = loaded.report.plan
    assert plan.settings["fp8"].engaged == ("compute" if mode == "compute" else "storage")
    assert loaded.report.resident == plan.bytes.resident
    codes = file.expected_codes()
    assert set(_codecs(loaded).values()) == {"float8_e4m3fn/row"}
    assert {f"{path}.weight" for path in _codecs(loaded)} >= {name for name in codes if name[:-7] not in KEPT}
    values = file.expected()
    for path in _codecs(loaded):
        assert relative_l2(loaded.model.get_submodule(path).dequantised_weight(), values[f"{path}.weight"]) <= 0.03
    for layer in QUANTISED:
        assert plan.folded[f"{layer}.weight"].startswith(f"quantised anew, as fp8.remainder asks: {reason}")
    for layer in KEPT:
        assert "unquantised" in plan.folded[f"{layer}.weight"]
        assert relative_l2(loaded.model.get_submodule(layer).weight, values[f"{layer}.weight"]) <= 1e-6
    why = plan.dropped[f"{QUANTISED[0]}.input_scale"]
    assert ("was calibrated with other codes" if mode == "compute" else "in the compute dtype") in why
    assert bool(multiplying(plan)) is (mode == "compute")


def test_codes_on_a_convolution_are_quantised_anew_on_request(tmp_path: Path) -> None:
    """Layers other than Linears keep codes that slipcast made, and no others."""
    torch.manual_seed(0)
    model = AceStepTransformer1DModel(**ACE_CONFIG, audio_acoustic_hidden_dim=16)
    model.save_pretrained(tmp_path / "ace")
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "ace.yaml").write_text(ACE)
    file = tmp_path / "ace" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    values = {name: weights[f"{name}.weight"].to(torch.float8_e4m3fn) for name in ("proj_in_conv", "proj_out_conv")}
    save_file({**weights, **{f"{name}.weight": codes for name, codes in values.items()}}, file, {"format": "pt"})
    settings = {"families": [str(tmp_path / "families")], "device": "cpu", "dtype": "float32"}
    for remainder in ("keep", "quantise"):
        loaded = slipcast.load(tmp_path / "ace", fp8={"mode": "storage", "remainder": remainder}, **settings)
        assert loaded.report.differences == ()
        for name, codes in values.items():
            layer: Any = loaded.model.get_submodule(name)
            weight = layer.weight if remainder == "keep" else layer.dequantised_weight()
            assert relative_l2(weight, codes.float()) <= (0 if remainder == "keep" else 0.04)
            assert ("quantised anew" in loaded.report.plan.folded[f"{name}.weight"]) is (remainder == "quantise")


@pytest.mark.parametrize("fp8", ["auto", "off"])
def test_progress_counts_each_scale_once(
    tmp_path: Path, tensors: Tensors, fp8: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: 20)
    file = fp8_file(tensors, QUANTISED, Scaled("N"))
    file.native[f"{QUANTISED[0]}.input_scale"] = torch.tensor(1.0)
    steps: list[int] = []
    loaded = _load(file, tmp_path, fp8=fp8, mmap=False, progress=lambda done, _: steps.append(done))
    assert steps == sorted(set(steps))
    held = sum(tensor.nbytes for name, tensor in file.native.items() if not name.endswith("input_scale"))
    assert steps[-1] == loaded.report.plan.bytes.read == held


def test_the_compute_dtype_beside_codes_is_the_family_s_default(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file({name: tensor.float() for name, tensor in tensors.items()}, QUANTISED, Scaled(""))
    plan = slipcast.plan(file.write(tmp_path / "m.safetensors"), device="cuda:8.9,24GiB")
    assert plan.compute_dtype == "bfloat16"
    assert "the family's default" in plan.settings["dtype"].reason


def test_plain_weights_are_quantised_to_nvfp4_where_that_is_asked_for(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "plain.safetensors"
    save_file(tensors, path)
    settings = {"device": "cpu", "dtype": "float32", "fp8": {"mode": "storage", "weights": "nvfp4"}}
    loaded = slipcast.load(path, **settings)
    plan = loaded.report.plan
    assert loaded.report.differences == ()
    assert {module.precision for module in plan.modules if module.codec} == {"nvfp4"}
    assert {module.path for module in plan.modules if module.codec} == {
        module.path for module in slipcast.plan(path, device="cpu", fp8="storage").modules if module.codec
    }
    layer = next(module.path for module in plan.modules if module.codec)
    quantised = loaded.model.get_submodule(layer)
    plain = slipcast.load(path, device="cpu", dtype="float32").model.get_submodule(layer)
    inputs = torch.randn(5, plain.in_features, generator=torch.Generator().manual_seed(0))
    assert 0.02 < relative_l2(quantised(inputs), plain(inputs)) < 0.15
    again = slipcast.load(path, plan=plan)
    assert again.report.plan == plan
