"""Checkpoints written in each format: the bytes as ComfyUI reads them, their loss, and what loading them gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.demo.run import CHECKPOINT
from slipcast.engine import safetensors_writer
from slipcast.registry.errors import QuantisationError, SettingsError
from support import quantised_formats
from support.conversions import check_values, converted, metadata_of
from support.fp8_checkpoints import in_model_names
from support.isolation import isolate
from support.number_formats import bytes_of, e4m3, relative_l2
from support.quantised_checkpoints import QUANTISED, UNEVEN, fp8, int8, nvfp4, quantised_file, small_tensors
from support.tiny_z_image import Tensors, natively

READABLE = {torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn}
"""Dtypes, of those that are written, that ComfyUI's reader knows; float8_e8m0fnu it does not."""

KEPT = {"t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"}
LINEARS = {
    "x_embedder",
    "final_layer.linear",
    "final_layer.adaLN_modulation.1",
    *(f"{block}.adaLN_modulation.0" for block in ("layers.0", "layers.1", "noise_refiner.0")),
    *(
        f"{block}.{leaf}"
        for block in ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0")
        for leaf in ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    ),
}
"""Layers, by native name, that may be quantised."""

UNSAFE = {"mxfp8": {"x_embedder"}}
"""Layers whose 48 rows would be padded to 64, and look like a model of another width."""

FORMATS: dict[str, tuple[dict[str, str], str, float]] = {
    "fp8": ({"format": "fp8_scaled"}, "float8_e4m3fn/tensor", 0.03),
    "fp8 by rows": ({"format": "fp8_scaled", "scale": "row"}, "float8_e4m3fn/row", 0.03),
    "fp8, legacy": ({"format": "fp8_scaled", "spelling": "legacy"}, "float8_e4m3fn/tensor", 0.03),
    "mxfp8": ({"format": "mxfp8"}, "mxfp8", 0.03),
    "nvfp4": ({"format": "nvfp4"}, "nvfp4/comfy", 0.11),
    "int8": ({"format": "int8"}, "int8/row", 0.008),
    "int8, one scale": ({"format": "int8", "scale": "tensor"}, "int8/tensor", 0.012),
    "int8 rotated": ({"format": "int8_convrot"}, "int8/row/convrot{group}", 0.009),
    "int8 rotated, one scale": ({"format": "int8_convrot", "scale": "tensor"}, "int8/tensor/convrot{group}", 0.012),
}
"""What is asked for, the codec that comes of it, and the largest loss of a weight drawn from a normal distribution."""


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.safetensors"
    save_file(natively(small_tensors(UNEVEN)), path, {"title": "kept"})
    return path


def _read(layer: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> np.ndarray:
    """A weight as ComfyUI reads it: by its marker, float64."""
    weight, scale = tensors[f"{layer}.weight"], tensors.get(f"{layer}.weight_scale")
    marker = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))
    assert scale is not None
    if marker["format"] == "float8_e4m3fn":
        assert (weight.dtype, scale.dtype, weight.shape) == (torch.float8_e4m3fn, torch.float32, shape)
        assert scale.shape in ((), (shape[0], 1))
        return e4m3(bytes_of(weight)) * scale.double().numpy()
    if marker["format"] == "mxfp8":
        assert (weight.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
        return quantised_formats.mxfp8(bytes_of(weight), bytes_of(scale), *shape)
    if marker["format"] == "nvfp4":
        assert (weight.dtype, scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
        second = tensors[f"{layer}.weight_scale_2"]
        assert (second.dtype, second.shape) == (torch.float32, ())
        return quantised_formats.nvfp4(bytes_of(weight), bytes_of(scale), float(second), *shape, comfy=True)
    assert marker.pop("format") == "int8_tensorwise"
    assert (weight.dtype, scale.dtype, weight.shape) == (torch.int8, torch.float32, shape)
    assert scale.shape in ((), (shape[0], 1))
    group = marker["convrot_groupsize"] if marker.get("convrot") else 0
    return quantised_formats.int8(weight.numpy(), scale.double().numpy(), group)


def _in_comfy_spelling(tensors: Tensors) -> Tensors:
    """A file in the legacy spelling in the other one, as ComfyUI turns it round itself."""
    if "scaled_fp8" not in tensors:
        return tensors
    assert (tensors["scaled_fp8"].dtype, tensors["scaled_fp8"].numel()) == (torch.float8_e4m3fn, 0)
    marker = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    renamed = {name.replace(".scale_weight", ".weight_scale"): tensor for name, tensor in tensors.items()}
    return renamed | {
        name.replace(".scale_weight", ".comfy_quant"): marker for name in tensors if name.endswith(".scale_weight")
    }


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_what_comfyui_reads(tmp_path: Path, plain: Path, name: str) -> None:
    wanted, codec, bound = FORMATS[name]
    out = tmp_path / "out.safetensors"
    written = converted(plain, out, **wanted)
    before, after = load_file(plain), _in_comfy_spelling(load_file(out))
    layers = LINEARS - UNSAFE.get(codec, set())
    assert {key.removesuffix(".comfy_quant") for key in after if key.endswith("comfy_quant")} == layers
    errors = {}
    for layer in layers:
        weight = before[f"{layer}.weight"]
        errors[layer] = relative_l2(torch.from_numpy(_read(layer, after, tuple(weight.shape))), weight)
    assert max(errors.values()) <= bound
    for key, tensor in before.items():
        if key.removesuffix(".weight") not in layers:
            assert torch.equal(after[key], tensor)
    assert {tensor.dtype for tensor in after.values()} <= READABLE
    assert (written.conversion.left_out, written.conversion.folded, written.conversion.altered) == ({}, {}, ())
    assert metadata_of(out) == {"title": "kept"}


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_loads(tmp_path: Path, plain: Path, name: str, layout: str) -> None:
    wanted, codec, bound = FORMATS[name]
    out = tmp_path / "out.safetensors"
    written = converted(plain, out, layout, prefix="model.diffusion_model.", **wanted)
    loaded = slipcast.load(out, device="cpu", dtype="float32")
    assert loaded.report.differences == ()
    codecs = {module.path: module.codec for module in loaded.report.plan.modules if module.codec}
    linears = LINEARS - UNSAFE.get(codec, set())
    assert len(codecs) == len(linears) + 2 * 4
    assert codecs.keys().isdisjoint(KEPT)
    for path, found in codecs.items():
        columns = loaded.model.get_submodule(path).in_features
        assert found == codec.format(group=16 if columns % 64 else 64 if columns % 256 else 256)
    formats = dict(slipcast.inspect(out).formats)
    assert formats == written.conversion.formats
    del formats["plain"]
    assert formats == {str(wanted["format"]): len(linears) if layout == "native" else len(codecs)}
    exact = small_tensors(UNEVEN)
    state = slipcast.load(out, device="cpu", dtype="float32", fp8="off").model.state_dict()
    for key, tensor in exact.items():
        if key.removesuffix(".weight") in codecs:
            assert relative_l2(state[key], tensor) <= bound * 1.2, key
        else:
            assert torch.equal(state[key], tensor.float()), key


BOUNDS = {
    "fp8": 0.029,
    "fp8 by rows": 0.029,
    "fp8, legacy": 0.029,
    "mxfp8": 0.029,
    "nvfp4": 0.106,
    "int8": 0.008,
    "int8 rotated": 0.01,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_loss_on_a_trained_checkpoint(tmp_path: Path, name: str) -> None:
    out = tmp_path / "digits.safetensors"
    converted(CHECKPOINT, out, **FORMATS[name][0])
    exact = slipcast.load(CHECKPOINT, device="cpu", dtype="float32", fp8="off").model.state_dict()
    state = slipcast.load(out, device="cpu", dtype="float32", fp8="off").model.state_dict()
    quantised = [key for key, tensor in exact.items() if not torch.equal(state[key], tensor)]
    assert len(quantised) == (49 if name in ("mxfp8", "nvfp4") else 50)
    errors = {key: relative_l2(state[key], exact[key]) for key in quantised}
    print(f"{name}: {len(errors)} weights, largest relative L2 {max(errors.values()):.4f}, allowed {BOUNDS[name]}")
    assert max(errors.values()) <= BOUNDS[name], max(errors, key=lambda key: errors[key])


@pytest.mark.parametrize("format_", ["int8", "int8_convrot"])
def test_no_single_scale_loses_less(tmp_path: Path, format_: str) -> None:
    """Rows of a trained weight differ, so one scale for all loses more than on normal weights; none would lose less."""
    out = tmp_path / "digits.safetensors"
    converted(CHECKPOINT, out, format=format_, scale="tensor")
    before, after = load_file(CHECKPOINT), load_file(out)
    for name in ("layers.3.feed_forward.w2", "noise_refiner.0.feed_forward.w1"):
        layer = f"model.diffusion_model.{name}"
        weight = before[f"{layer}.weight"].double().numpy()
        written = _read(layer, after, weight.shape)
        if format_ == "int8_convrot":
            groups = weight.reshape(weight.shape[0], -1, 256 if weight.shape[1] % 256 == 0 else 64)
            turned = (groups @ quantised_formats.hadamard(groups.shape[2])).reshape(weight.shape)
        else:
            turned = weight
        lost = np.linalg.norm(weight - written) / np.linalg.norm(weight)
        largest = np.abs(turned).max()
        best = min(
            np.linalg.norm(turned - np.clip(np.round(turned / scale), -127, 127) * scale)
            for scale in largest / 127 * np.linspace(0.5, 1, 51)
        )
        print(f"{format_}, one scale, {name}: {lost:.4f}, the best scale {best / np.linalg.norm(weight):.4f}")
        assert np.linalg.norm(weight - written) <= 1.01 * best
        assert np.linalg.norm(weight - written) <= 0.013 * np.linalg.norm(weight)


def test_codes_that_would_hide_a_size_stay_plain(tmp_path: Path) -> None:
    """The trained model takes 4 values of a patch; padded to 16 they would make the file look like another model's."""
    for format_, group in (("nvfp4", "plain"), ("mxfp8", "plain"), ("int8_convrot", "int8")):
        out = tmp_path / f"{format_}.safetensors"
        written = converted(CHECKPOINT, out, format=format_)
        assert written.conversion.codecs.get("x_embedder.weight", "plain").partition("/")[0] == group
        assert slipcast.inspect(out).config["in_channels"] == 1
        assert slipcast.inspect(out).config == slipcast.inspect(CHECKPOINT).config


@pytest.mark.parametrize("format_", ["fp8_scaled", "nvfp4", "bf16", "int8_convrot"])
def test_memory_is_that_of_one_weight(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    asked: list[int] = []
    read = safetensors_writer.BufferedReader.elements

    def elements(self, tensor, start, stop):  # type: ignore[no-untyped-def]
        asked.append((stop - start) * tensor.nbytes // tensor.elements)
        return read(self, tensor, start, stop)

    monkeypatch.setattr(safetensors_writer.BufferedReader, "elements", elements)
    converted(plain, tmp_path / "out.safetensors", format=format_)
    sizes = [tensor.nbytes for tensor in load_file(plain).values()]
    assert max(asked) <= max(sizes)
    assert sum(asked) == sum(sizes)


def test_progress_counts_what_is_written(tmp_path: Path, plain: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = converted(
        plain, tmp_path / "out.safetensors", format="nvfp4", progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (written.conversion.nbytes, written.conversion.nbytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    tensors = small_tensors(UNEVEN)
    tensors["layers.1.feed_forward.w1.weight"][5, 7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    for format_ in ("fp8_scaled", "nvfp4", "mxfp8", "int8_convrot"):
        with pytest.raises(QuantisationError, match=r"^layers\.1\.feed_forward\.w1\.weight: a weight with values that"):
            converted(tmp_path / "model.safetensors", tmp_path / "out.safetensors", format=format_)
        assert not (tmp_path / "out.safetensors").exists()


def test_codes_that_are_in_the_format_already_stay(tmp_path: Path) -> None:
    file = quantised_file(fp8("N", spelling="scale_weight"))
    path = file.write(tmp_path / "m.safetensors")
    written = converted(path, tmp_path / "out.safetensors", format="fp8_scaled").conversion
    before, after = load_file(path), load_file(tmp_path / "out.safetensors")
    assert written.altered == ()
    for layer in QUANTISED:
        assert (bytes_of(after[f"{layer}.weight"]) == bytes_of(before[f"{layer}.weight"])).all()
        assert torch.equal(after[f"{layer}.weight_scale"][:, 0], before[f"{layer}.scale_weight"])
    assert written.formats["fp8_scaled"] == len(QUANTISED)
    check_values(tmp_path / "out.safetensors", file)


@pytest.mark.parametrize("wanted", [{"format": "fp8_scaled"}, {"spelling": "legacy"}])
def test_codes_without_a_scale_get_a_scale_of_one(tmp_path: Path, wanted: dict[str, str]) -> None:
    """Else theirs could be lost, in a file that has scales."""
    file = quantised_file(fp8("none"))
    path = file.write(tmp_path / "m.safetensors")
    written = converted(path, tmp_path / "out.safetensors", **wanted).conversion
    tensors = load_file(tmp_path / "out.safetensors")
    assert {float(tensors[name]) for name in tensors if "scale" in name and tensors[name].numel()} == {1.0}
    assert written.formats["fp8_scaled"] == len(QUANTISED)
    assert "fp8_raw" not in written.formats
    check_values(tmp_path / "out.safetensors", file)


def test_codes_that_are_no_matrix_stay_without_a_scale(tmp_path: Path) -> None:
    native = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in natively(small_tensors(UNEVEN)).items()}
    save_file(native, tmp_path / "m.safetensors")
    converted(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "diffusers", format="fp8_scaled")
    tensors = load_file(tmp_path / "out.safetensors")
    assert {tensors[name].dtype for name in tensors if name.endswith(("bias", "_token"))} == {torch.float8_e4m3fn}
    assert "layers.0.attention_norm1.weight_scale" not in tensors
    state = slipcast.load(tmp_path / "out.safetensors", device="cpu", dtype="float32", fp8="off").model.state_dict()
    for name, tensor in in_model_names(native).items():
        assert torch.equal(state[name], tensor.float().reshape(state[name].shape))


def test_nvfp4_in_the_linear_layout_becomes_comfyui_s(tmp_path: Path) -> None:
    file = quantised_file(nvfp4(comfy=False), block=16)
    path = file.write(tmp_path / "m.safetensors")
    written = converted(path, tmp_path / "out.safetensors", format="nvfp4").conversion
    assert set(written.codecs.values()) == {"nvfp4/comfy"}
    assert written.altered == ()
    check_values(tmp_path / "out.safetensors", file)


@pytest.mark.parametrize("remainder", ["keep", "quantise"])
def test_layers_that_the_producer_left_alone(tmp_path: Path, remainder: str) -> None:
    file = quantised_file(int8())
    path = file.write(tmp_path / "m.safetensors", marked="tensors")
    written = converted(path, tmp_path / "out.safetensors", format="int8", remainder=remainder).conversion
    assert written.formats["int8"] == (len(QUANTISED) if remainder == "keep" else len(LINEARS) + 2)


def test_quantising_again_is_said(tmp_path: Path) -> None:
    file = quantised_file(fp8())
    path = file.write(tmp_path / "m.safetensors", marked="tensors")
    written = converted(path, tmp_path / "out.safetensors", format="int8").conversion
    again = len(QUANTISED) - 2
    line = "they are decoded and quantised again, so that both errors add up"
    assert written.altered == (f"{again} weights were in fp8_scaled: {line}",)
    assert (written.formats["int8"], written.formats["fp8_scaled"]) == (again, 2)
    state = slipcast.load(tmp_path / "out.safetensors", device="cpu", dtype="float32", fp8="off").model.state_dict()
    for key, tensor in file.expected().items():
        assert relative_l2(state[key], tensor) <= 0.02, key


@pytest.mark.parametrize(
    ("wanted", "found", "hint"),
    [
        ({"format": "gguf"}, "the format 'gguf' to write", "other formats can only be read"),
        ({"format": "fp8_raw"}, "the format 'fp8_raw' to write", "other formats can only be read"),
        ({"format": "nvfp4", "scale": "row"}, "scales by row in the format nvfp4", "leave the scale out"),
        ({"scale": "row"}, "scales by row in the format that the file has", "leave the scale out"),
        ({"format": "bf16", "spelling": "comfy"}, "the spelling 'comfy' for weights in bf16", "leave the spelling out"),
        (
            {"format": "int8", "spelling": "legacy"},
            "the spelling 'legacy' for codes in int8",
            "take the spelling comfy",
        ),
    ],
)
def test_what_can_not_be_asked_for(tmp_path: Path, plain: Path, wanted: dict[str, Any], found: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        converted(plain, tmp_path / "out.safetensors", **wanted)
    assert caught.value.found == found
    assert hint in caught.value.hint
    assert not (tmp_path / "out.safetensors").exists()
