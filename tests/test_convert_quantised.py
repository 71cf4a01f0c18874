"""Quantised checkpoints in another naming or spelling: codes go with their scales, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.registry.catalogue import load_family_file
from slipcast.registry.errors import QuantisationError
from support import links as executor
from support.conversions import check_values, converted, described_layers, match_of, metadata_of
from support.fp8_checkpoints import in_model_names
from support.isolation import isolate
from support.number_formats import bytes_of
from support.quantised_cases import BF16, CASES, CONFIGS, E5M2, Case, draw_file, is_close, promised_codecs
from support.quantised_checkpoints import UNEVEN, QuantisedFile, fp8, int8, mxfp8, nvfp4, quantised_file, small_tensors
from support.tiny_z_image import Tensors

PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _differing(actual: Tensors, expected: Tensors) -> list[str]:
    names = list(actual.keys() ^ expected.keys())
    for name in actual.keys() & expected.keys():
        mine, theirs = actual[name], expected[name]
        same = (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if not same or not (bytes_of(mine) == bytes_of(theirs)).all():
            names.append(f"{name} {mine.dtype} {list(mine.shape)}, {theirs.dtype} {list(theirs.shape)}")
    return names


def _rewritten(case: Case) -> bool:
    """Whether the way back can't give the same bytes: bytes come back as float8, and padding as zeros."""
    rewritten = ("markers, bytes", "metadata, bytes of e5m2", "mxfp8, scales as E8M0", "nvfp4, unmarked")
    return case in (CASES[name] for name in rewritten)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: Path, name: str, config: str) -> None:
    case = CASES[name]
    file = draw_file(case, config)
    native, model, back = (tmp_path / f"{stage}.safetensors" for stage in ("native", "model", "back"))
    file.write(native, marked=case.marked, extra=case.extra, prefix=PREFIX)
    there = converted(native, model, "diffusers").conversion
    assert (there.folded, there.left_out, there.altered) == ({}, {}, ())
    assert there.codecs.keys() == in_model_names(file.values).keys()
    check_values(model, file)
    plan = slipcast.plan(model, device="cpu")
    assert {module.path: module.codec for module in plan.modules if module.codec} == promised_codecs(case, file)
    converted(model, back, "native", prefix=PREFIX)
    check_values(back, file)
    if not _rewritten(case):
        assert _differing(load_file(back), load_file(native)) == []
    assert ("_quantization_metadata" in metadata_of(back)) == (case.marked == "metadata")
    if case.marked == "metadata":
        assert described_layers(back) == described_layers(native)
        assert "layers.0.attention.to_k" in described_layers(model)
        assert "layers.0.attention.to_out.0" in described_layers(model)


def test_scales_go_with_their_rows(tmp_path: Path) -> None:
    """What the parts of one fused layer are, spelt out."""
    file = quantised_file(fp8("N1", dtype=BF16, spelling="scale_weight", input_scale="scale_input"))
    native, model = tmp_path / "native.safetensors", tmp_path / "model.safetensors"
    converted(file.write(native, extra={"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}), model, "diffusers")
    fused, parts = load_file(native), load_file(model)
    for index, part in enumerate(("to_q", "to_k", "to_v")):
        rows = slice(48 * index, 48 * (index + 1))
        for leaf in ("weight", "scale_weight"):
            whole = fused[f"layers.0.attention.qkv.{leaf}"]
            mine = parts[f"layers.0.attention.{part}.{leaf}"]
            assert mine.dtype == whole.dtype
            assert (bytes_of(mine) == bytes_of(whole[rows])).all()
        assert parts[f"layers.0.attention.{part}.scale_input"] == fused["layers.0.attention.qkv.scale_input"]
    assert (parts["scaled_fp8"].dtype, parts["scaled_fp8"].shape) == (torch.float8_e4m3fn, (2,))


def test_one_scale_becomes_three(tmp_path: Path) -> None:
    native, model = tmp_path / "native.safetensors", tmp_path / "model.safetensors"
    converted(quantised_file(fp8()).write(native, marked="tensors"), model, "diffusers")
    fused, parts = load_file(native), load_file(model)
    for part in ("to_q", "to_k", "to_v"):
        for leaf in ("weight_scale", "comfy_quant"):
            assert torch.equal(parts[f"layers.0.attention.{part}.{leaf}"], fused[f"layers.0.attention.qkv.{leaf}"])


APART = ("to_q", "to_k", "to_v")


def _apart(tmp_path: Path, draw: Any, *, marked: str = "tensors", **sides: list[float]) -> tuple[Path, QuantisedFile]:
    """A file in the model's names whose q, k and v are drawn apart, so that their scales differ."""
    path = tmp_path / "apart.safetensors"
    tensors = small_tensors(UNEVEN)
    file = QuantisedFile(tensors, {}, {})
    random = np.random.default_rng(0)
    for index, part in enumerate(APART):
        layer = f"layers.0.attention.{part}"
        drawn = draw(random, 48, 48)
        tensors.update({f"{layer}.{leaf}": tensor for leaf, tensor in drawn.tensors.items()})
        tensors.update({f"{layer}.{leaf}": torch.tensor(values[index]) for leaf, values in sides.items()})
        file.values[f"{layer}.weight"] = torch.from_numpy(drawn.weight).float()
        file.markers[layer] = drawn.marker
    return file.write(path, marked=marked), file


QKV = "layers.0.attention.qkv"


def _check_qkv(path: Path, file: QuantisedFile) -> None:
    state = slipcast.load(path, device="cpu", dtype="float32", fp8="off").model.state_dict()
    for name, values in file.values.items():
        assert is_close(state[name], values), name


@pytest.mark.parametrize("draw", [fp8(), fp8("1", dtype=BF16), fp8("N"), int8(""), int8("N1", group=16)])
def test_different_scales_become_scales_of_rows(tmp_path: Path, draw: Any) -> None:
    apart, file = _apart(tmp_path, draw)
    back = tmp_path / "native.safetensors"
    conversion = converted(apart, back, "native").conversion
    assert conversion.folded == {}
    scale = load_file(back)[f"{QKV}.weight_scale"]
    assert scale.numel() == 144
    assert len(scale.unique()) >= 3
    _check_qkv(back, file)


def test_nvfp4_under_different_scales_is_dequantised_and_said(tmp_path: Path) -> None:
    apart, file = _apart(tmp_path, nvfp4())
    back = tmp_path / "native.safetensors"
    conversion = converted(apart, back, "native").conversion
    assert list(conversion.folded) == [f"{QKV}.weight"]
    assert "different scales, of which nvfp4 has one" in conversion.folded[f"{QKV}.weight"]
    tensors = load_file(back)
    assert tensors[f"{QKV}.weight"].dtype == torch.bfloat16
    assert not [name for name in tensors if (name.startswith(QKV) and "scale" in name) or "comfy_quant" in name]
    state = slipcast.load(back, device="cpu", dtype="float32").model.state_dict()
    for name, values in file.values.items():
        assert torch.equal(state[name], values.to(torch.bfloat16).float())


def test_mxfp8_is_joined_whatever_its_scales(tmp_path: Path) -> None:
    apart, file = _apart(tmp_path, mxfp8())
    conversion = converted(apart, tmp_path / "native.safetensors", "native").conversion
    assert conversion.codecs[f"{QKV}.weight"] == "mxfp8"
    _check_qkv(tmp_path / "native.safetensors", file)


def test_scales_of_activations_that_differ_are_left_out_and_said(tmp_path: Path) -> None:
    apart, _ = _apart(tmp_path, fp8("N"), input_scale=[0.5, 0.25, 0.5])
    conversion = converted(apart, tmp_path / "native.safetensors", "native").conversion
    assert list(conversion.left_out) == [f"layers.0.attention.{part}.input_scale" for part in APART]
    assert set(conversion.left_out.values()) == {
        f"the weights that make {QKV}.weight have different scales of activations"
    }
    assert f"{QKV}.input_scale" not in load_file(tmp_path / "native.safetensors")


@pytest.mark.parametrize("value", [1.0, 0.125, float("nan")])
def test_equal_scales_of_activations_stay(tmp_path: Path, value: float) -> None:
    apart, _ = _apart(tmp_path, fp8(), input_scale=[value] * 3)
    conversion = converted(apart, tmp_path / "native.safetensors", "native").conversion
    assert conversion.left_out == {}
    kept = load_file(tmp_path / "native.safetensors")[f"{QKV}.input_scale"]
    torch.testing.assert_close(kept, torch.tensor(value), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("marked", ["tensors", "metadata"])
def test_one_part_in_full_precision_makes_the_whole_so(tmp_path: Path, marked: str) -> None:
    apart, file = _apart(tmp_path, int8(), marked="")
    file.markers["layers.0.attention.to_k"]["full_precision_matrix_mult"] = True
    file.write(apart, marked=marked)
    converted(apart, tmp_path / "native.safetensors", "native")
    bundles = match_of(tmp_path / "native.safetensors").bundles
    assert bundles[f"{QKV}.weight"].full_precision
    assert bundles[f"{QKV}.weight"].format == "int8"


def test_quantised_and_plain_rows_of_one_tensor(tmp_path: Path) -> None:
    apart, file = _apart(tmp_path, fp8("N"))
    tensors = load_file(apart)
    del tensors["layers.0.attention.to_v.weight_scale"], tensors["layers.0.attention.to_v.comfy_quant"]
    tensors["layers.0.attention.to_v.weight"] = file.values.pop("layers.0.attention.to_v.weight")
    save_file(tensors, apart)
    conversion = converted(apart, tmp_path / "native.safetensors", "native").conversion
    assert conversion.folded == {f"{QKV}.weight": "quantised and plain rows make one weight"}
    assert load_file(tmp_path / "native.safetensors")[f"{QKV}.weight"].dtype == torch.bfloat16


EVERY_OPERATION = """\
schema: 1
id: every-operation
title: Every operation of the language
kind: denoiser
model: diffusers.ZImageTransformer2DModel
identify: {has: [turned, fused.to_apart.0]}
config: CONFIG
keys:
  turned: transpose(t_embedder.mlp.0)
  swapped: swap_halves(cap_embedder.1)
  convolution: conv1x1(all_final_layer.2-1.linear)
  "fused.to_apart.{i}": swap_halves(layers.{i}.attention.to_q) + layers.{i}.attention.to_k + layers.{i}.attention.to_v
  "apart.{i}.first + apart.{i}.second": layers.{i}.feed_forward.w1
precision: {fp16: safe, fp8: {storage: supported, compute: supported}}
"""
LAYERS = ("turned", "swapped", "fused.to_apart.0", "apart.0.first", "apart.0.second", "convolution")


@pytest.mark.parametrize(
    ("draw", "folded", "convolutions", "marked"),
    [
        (fp8(), {"turned"}, True, "tensors"),
        (fp8("N"), {"turned"}, True, "tensors"),
        (fp8("N1", codes=E5M2), {"turned"}, True, ""),
        (fp8("NB1"), {"turned"}, False, ""),
        (fp8("none"), set(), True, "tensors"),
        (fp8("none"), set(), True, ""),
        (int8(), {"turned"}, True, "tensors"),
        (int8("", group=16), {"turned"}, False, "tensors"),
        (mxfp8(), {"turned"}, False, "tensors"),
        (nvfp4(), {"turned", "apart.0.first"}, False, "tensors"),
        (nvfp4(comfy=False), {"turned", "apart.0.first"}, False, ""),
    ],
)
def test_every_operation_takes_codes_along(
    tmp_path: Path, draw: Any, folded: set[str], convolutions: bool, marked: str
) -> None:
    """Native codes become the model's; expected is what the language means, done on decoded values."""
    (tmp_path / "every-operation.yaml").write_text(EVERY_OPERATION.replace("CONFIG", json.dumps(UNEVEN)))
    family = load_family_file(tmp_path / "every-operation.yaml")
    model = small_tensors(UNEVEN)
    links = family.key_map.links(model)
    native = {name: tensor.contiguous() for name, tensor in executor.save(links, model).items()}
    file = QuantisedFile(native, {}, {})
    random = np.random.default_rng(0)
    for layer in LAYERS:
        whole = native[f"{layer}.weight"]
        drawn = draw(random, whole.shape[0], whole.shape[1])
        if layer == "convolution" and not convolutions:
            continue
        drawn.tensors["weight"] = drawn.tensors["weight"].view(*drawn.tensors["weight"].shape, *whole.shape[2:])
        native.update({f"{layer}.{leaf}": tensor for leaf, tensor in drawn.tensors.items()})
        file.values[f"{layer}.weight"] = torch.from_numpy(drawn.weight).float().view(whole.shape)
        file.markers[layer] = drawn.marker
    path = file.write(tmp_path / "native.safetensors", marked=marked)
    conversion = converted(path, tmp_path / "model.safetensors", "diffusers", {family.id: family}).conversion
    decoded = {**{name: native[name].float() for name in native if name not in file.values}, **file.values}
    expected = executor.load(links, decoded, {name: tuple(tensor.shape) for name, tensor in model.items()})
    taken = {term.model for link in links for term in link.terms if link.files[0].removesuffix(".weight") in folded}
    assert conversion.folded.keys() == {name for name in taken if name.endswith(".weight")}
    loaded = slipcast.load(
        tmp_path / "model.safetensors", device="cpu", dtype="float32", fp8="off", families=[str(tmp_path)],
        family="every-operation",
    ).model.state_dict()  # fmt: skip
    for name, tensor in expected.items():
        rounded = tensor.to(torch.bfloat16).float() if name in conversion.folded else tensor
        close = torch.equal(loaded[name], rounded) if name in conversion.folded else is_close(loaded[name], tensor)
        assert close, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_dequantised_to_one_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    case = CASES[name]
    file = draw_file(case, "uneven")
    file.native["x_embedder.bias"] = file.native["x_embedder.bias"].float()
    native, plain = tmp_path / "native.safetensors", tmp_path / "plain.safetensors"
    file.write(native, marked=case.marked, extra=case.extra, prefix=PREFIX)
    written = converted(native, plain, format=dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tensors = load_file(plain)
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    assert written.conversion.formats == {"plain": len(tensors)}
    assert (written.conversion.folded, written.conversion.left_out) == ({}, {})
    assert "_quantization_metadata" not in metadata_of(plain)
    exact = slipcast.load(native, device="cpu", dtype="float32", fp8="off").model.state_dict()
    state = slipcast.load(plain, device="cpu", dtype="float32").model.state_dict()
    assert [key for key, tensor in exact.items() if not torch.equal(state[key], tensor.to(wanted).float())] == []


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    tensors = small_tensors(UNEVEN)
    tensors["layers.1.feed_forward.w1.weight"][5, 7] = 70000.0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(QuantisationError) as caught:
        converted(tmp_path / "model.safetensors", tmp_path / "out.safetensors", format="fp16")
    assert caught.value.found == "layers.1.feed_forward.w1.weight: values beyond the 65504 at which float16 ends"
    assert "bf16" in caught.value.hint
    assert not (tmp_path / "out.safetensors").exists()
