"""Models that are saved after a load, and what slipcast and diffusers make of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AceStepTransformer1DModel, ZImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn

import slipcast
from slipcast.registry.errors import ConfigError, UnsupportedFormatError
from support.conversions import converted
from support.convolutions import ACE, ACE_CONFIG
from support.fp8_checkpoints import QUANTISED, Scaled, fp8_file
from support.isolation import isolate
from support.number_formats import bytes_of, relative_l2
from support.tiny_z_image import Tensors, tiny_tensors, write_native


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


def _bits(model: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (tensor.dtype, bytes_of(tensor).tobytes()) for name, tensor in model.state_dict().items()}


def _arguments(model: Any) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in model.config.items() if key[0] != "_"
    }


def _sources(tmp_path: Path, tensors: Tensors) -> dict[str, tuple[Path, dict[str, Any]]]:
    scaled = fp8_file(tensors, QUANTISED[::2], Scaled(""))
    for layer in QUANTISED[1::2]:
        scaled.scale_layer(layer, Scaled("N"))
    raw = fp8_file(tensors)
    for layer in QUANTISED:
        raw.cast(f"{layer}.weight")
    return {
        "plain": (write_native(tmp_path / "plain.safetensors", tensors), {}),
        "storage": (write_native(tmp_path / "storage.safetensors", tensors), {"fp8": "storage"}),
        "scaled": (scaled.write(tmp_path / "scaled.safetensors"), {}),
        "raw": (raw.write(tmp_path / "raw.safetensors"), {}),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("source", ["plain", "storage", "scaled", "raw"])
def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path, tensors: Tensors, source: str, dtype: str) -> None:
    path, settings = _sources(tmp_path, tensors)[source]
    first = slipcast.load(path, device="cpu", dtype=dtype, **settings)
    first.model.save_pretrained(tmp_path / "saved")
    assert (json.loads((tmp_path / "saved/config.json").read_text()).get("quantization_config") is None) is (
        source == "plain"
    )
    for mmap in (True, False):
        again = slipcast.load(tmp_path / "saved", device="cpu", dtype=dtype, mmap=mmap)
        assert again.report.differences == ()
        assert _bits(again.model) == _bits(first.model)
        assert {m.path: m.codec for m in again.report.plan.modules} == {
            m.path: m.codec for m in first.report.plan.modules
        }
        assert again.model.dtype == first.model.dtype == getattr(torch, dtype)
        assert _arguments(again.model) == _arguments(first.model)
        assert not any("quantization_config" in note for note in again.report.plan.notes)
    assert again.report.resident == first.report.resident


def test_diffusers_refuses_codes_and_reads_values(tmp_path: Path, tensors: Tensors) -> None:
    path = write_native(tmp_path / "m.safetensors", tensors)
    slipcast.load(path, device="cpu", dtype="bfloat16", fp8="storage").model.save_pretrained(tmp_path / "fp8")
    with pytest.raises(ValueError, match="Unknown quantization type, got slipcast"):
        ZImageTransformer2DModel.from_pretrained(tmp_path / "fp8")
    slipcast.load(path, device="cpu", dtype="bfloat16").model.save_pretrained(tmp_path / "plain")
    theirs = ZImageTransformer2DModel.from_pretrained(tmp_path / "plain", torch_dtype=torch.bfloat16)
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_a_mapped_model_is_saved_in_shards_of_the_size_that_was_asked(tmp_path: Path, tensors: Tensors) -> None:
    """Tensors that all look like one storage would go into one file."""
    path = write_native(tmp_path / "m.safetensors", tensors)
    loaded = slipcast.load(path, device="cpu", dtype="bfloat16")
    assert all(target.mapped for target in loaded.report.plan.targets)
    loaded.model.save_pretrained(tmp_path / "saved", max_shard_size="600KB")
    shards = sorted((tmp_path / "saved").glob("*-of-*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 700_000 for shard in shards)
    again = slipcast.load(tmp_path / "saved", device="cpu", dtype="bfloat16")
    assert _bits(again.model) == _bits(loaded.model)


def test_the_compute_dtype_comes_back_where_the_device_has_it(tmp_path: Path, tensors: Tensors) -> None:
    path = write_native(tmp_path / "m.safetensors", tensors)
    slipcast.load(path, device="cpu", dtype="float32", fp8="storage").model.save_pretrained(tmp_path / "saved")
    decision = slipcast.plan(tmp_path / "saved", device="cuda:9.0,80GiB").settings["dtype"]
    assert (decision.engaged, decision.reason) == ("float32", "the model computed in it when it was saved")


def test_saved_codes_can_be_dequantised(tmp_path: Path, tensors: Tensors) -> None:
    path = write_native(tmp_path / "m.safetensors", tensors)
    first = slipcast.load(path, device="cpu", dtype="float32", fp8="storage").model
    first.save_pretrained(tmp_path / "saved")
    model = slipcast.load(tmp_path / "saved", device="cpu", dtype="float32", fp8="off").model
    for name, module in first.named_modules():
        if hasattr(module, "dequantised_weight"):
            assert torch.equal(model.get_submodule(name).weight, module.dequantised_weight()), name


@pytest.fixture
def ace(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of a model with convolutions, one of them transposed and square."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "ace.yaml").write_text(ACE)
    torch.manual_seed(0)
    model = AceStepTransformer1DModel(**ACE_CONFIG, audio_acoustic_hidden_dim=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_().mul_(torch.logspace(-2, 1, parameter.shape[-1]))
            if parameter.ndim > 1:
                parameter.mul_(torch.logspace(-2, 1, parameter.shape[1]).view(1, -1, *[1] * (parameter.ndim - 2)))
    model.save_pretrained(tmp_path / "ace")
    return tmp_path / "ace", {"families": [str(tmp_path / "families")], "device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize("channels", [16, 10])
def test_convolutions_come_back_with_scales_along_their_outputs(
    tmp_path: Path, ace: tuple[Path, dict[str, Any]], channels: int
) -> None:
    folder, settings = ace
    if channels != 16:
        weights = load_file(folder / "diffusion_pytorch_model.safetensors")
        weights["proj_out_conv.weight"] = weights["proj_out_conv.weight"][:, :channels].contiguous()
        weights["proj_out_conv.bias"] = weights["proj_out_conv.bias"][:channels].clone()
        save_file(weights, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "audio_acoustic_hidden_dim": channels}))
    first = slipcast.load(folder, fp8="storage", **settings)
    codecs = {module.path: module.codec for module in first.report.plan.modules if module.codec}
    assert codecs["proj_out_conv"] == "float8_e4m3fn/row@1"
    assert codecs["proj_in_conv"] == "float8_e4m3fn/row"
    assert first.report.differences == ()
    plain = slipcast.load(folder, fp8="off", **settings).model
    weight = plain.get_submodule("proj_out_conv").weight
    quantised: Any = first.model.get_submodule("proj_out_conv")
    assert quantised.weight_scale.shape == (channels,)
    for index in range(channels):
        assert relative_l2(quantised.dequantised_weight()[:, index], weight[:, index]) < 0.04
    first.model.save_pretrained(tmp_path / "saved")
    again = slipcast.load(tmp_path / "saved", **settings)
    assert _bits(again.model) == _bits(first.model)
    assert {module.path: module.codec for module in again.report.plan.modules if module.codec} == codecs
    off = slipcast.load(tmp_path / "saved", fp8="off", **settings)
    assert off.report.differences == ()
    for path in codecs:
        values = first.model.get_submodule(path).dequantised_weight()
        assert torch.equal(off.model.get_submodule(path).weight, values), path


def test_a_transposed_convolution_whose_rows_lie_apart_stays_plain(
    tmp_path: Path, ace: tuple[Path, dict[str, Any]]
) -> None:
    folder, settings = ace
    family = ACE + 'keys: {"proj_a + proj_b": proj_out_conv}\n'
    (tmp_path / "families" / "ace.yaml").write_text(family.replace("proj_out_conv.weight, ", ""))
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    whole, bias = weights.pop("proj_out_conv.weight"), weights.pop("proj_out_conv.bias")
    for name, rows in (("proj_a", slice(0, 7)), ("proj_b", slice(7, None))):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = whole[rows].contiguous(), bias[rows].clone()
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    loaded = slipcast.load(folder, fp8="storage", **settings)
    module = {module.path: module for module in loaded.report.plan.modules}["proj_out_conv"]
    assert module.codec is None
    assert module.reason == "float8_e4m3fn/row@1 needs all rows at once, which several tensors hold"
    assert torch.equal(loaded.model.get_submodule("proj_out_conv").weight, whole)


def _with_quantization(tmp_path: Path, tensors: Tensors, change: Callable[[dict[str, Any]], None]) -> Path:
    path = write_native(tmp_path / "m.safetensors", tensors)
    slipcast.load(path, device="cpu", dtype="bfloat16", fp8="storage").model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))
    return tmp_path / "saved"


@pytest.mark.parametrize("fp8", ["auto", "off"])
@pytest.mark.parametrize(
    "codec",
    ["int8/row", "float8_e4m3fn/tensor", "float8_e4m3fn/none", "float8_e5m2/row", "float8_e4m3fn/block8", "mxfp8"],
)
def test_a_config_that_names_another_codec_than_the_tensors_are_in(
    tmp_path: Path, tensors: Tensors, codec: str, fp8: str
) -> None:
    name = "layers.0.attention.to_q"
    folder = _with_quantization(tmp_path, tensors, lambda said: said["modules"].update({name: codec}))
    with pytest.raises(ConfigError) as caught:
        slipcast.plan(folder, device="cpu", fp8=fp8)
    assert codec in caught.value.found
    assert name in caught.value.found
    assert any("weight_scale F32 [64]" in item for item in caught.value.items)


def test_a_config_of_a_newer_version_or_beyond_reading(tmp_path: Path, tensors: Tensors) -> None:
    folder = _with_quantization(tmp_path, tensors, lambda said: said.update(version=99))
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(folder, device="cpu")
    assert "in version 99" in caught.value.found
    assert "upgrade" in caught.value.hint


LINE = "layers.0.attention.to_q"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([], "quantization_config: it is a list"),
        ("slipcast", "quantization_config: it is a str"),
        ({"version": -1}, "version: -1, which never was"),
        ({"version": True}, "version: Input should be a valid integer"),
        ({"version": 1.0}, "version: Input should be a valid integer"),
        ({"version": "1"}, "version: Input should be a valid integer"),
        ({"version": None}, "version: Input should be a valid integer"),
        ({"compute_dtype": "int4"}, "compute_dtype: Input should be 'bfloat16', 'float16' or 'float32'"),
        ({"compute_dtype": ["bfloat16"]}, "compute_dtype: Input should be"),
        ({"compute_dtype": None}, "compute_dtype: Input should be"),
        ({"modules": 3}, "modules: Input should be a valid dictionary"),
        ({"modules": [LINE]}, "modules: Input should be a valid dictionary"),
        ({"modules": {LINE: 8}}, f"modules.{LINE}: Input should be a valid string"),
        ({"modules": {LINE: "fp3"}}, f"modules.{LINE}: the codec name 'fp3' is unknown"),
        ({"modules": {LINE: "float8_e4m3fn/block-16"}}, f"modules.{LINE}: the codec name"),
        ({"modules": {LINE: "float8_e4m3fn/block0"}}, f"modules.{LINE}: the codec name"),
        ({"modules": {LINE: "int8/row/convrot8"}}, f"modules.{LINE}: the codec name"),
        ({"modules": {LINE: "gguf/Q9_9"}}, f"modules.{LINE}: the codec name"),
        ({"modules": {"layers.0.x": "mxfp8"}}, "modules.layers.0.x: the files have no layers.0.x.weight"),
        ({"full_precision_matrix_mult": True}, "full_precision_matrix_mult: Input should be a valid list"),
        ({"full_precision_matrix_mult": [3]}, "full_precision_matrix_mult.0: Input should be a valid string"),
        ({"full_precision_matrix_mult": ["x"]}, "full_precision_matrix_mult: x is none of the modules"),
        ({"bits": 4}, "bits: Extra inputs are not permitted"),
    ],
)
def test_nonsense_in_a_config_is_refused_by_field(tmp_path: Path, tensors: Tensors, wrong: Any, problem: str) -> None:
    folder = _with_quantization(tmp_path, tensors, dict.copy)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **wrong} if isinstance(wrong, dict) else wrong
    (folder / "config.json").write_text(json.dumps(config))
    for attempt in (
        lambda: slipcast.plan(folder, device="cpu"),
        lambda: converted(folder, tmp_path / "out.safetensors", "native"),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert "a quantization_config that can't be read" in caught.value.found
        assert problem in caught.value.found
        assert "compute_dtype, modules (path: codec)" in caught.value.expected
        assert "save the model again" in caught.value.hint
    assert len(slipcast.inspect(folder).components) == 1


def test_a_config_that_calls_a_plain_weight_quantised(tmp_path: Path, tensors: Tensors) -> None:
    folder = _with_quantization(tmp_path, tensors, lambda said: said["modules"].update({"cap_embedder.1": "mxfp8"}))
    for attempt in (
        lambda: slipcast.plan(folder, device="cpu"),
        lambda: converted(folder, tmp_path / "out.safetensors", "native"),
    ):
        with pytest.raises(ConfigError, match="is stored as mxfp8, which its tensors are not") as caught:
            attempt()
        assert "cap_embedder.1.weight" in caught.value.found


def test_layers_that_the_config_forgot_are_kept_as_a_stranger_s(tmp_path: Path, tensors: Tensors) -> None:
    folder = _with_quantization(tmp_path, tensors, lambda said: said["modules"].clear())
    loaded = slipcast.load(folder, device="cpu", dtype="bfloat16")
    assert loaded.report.differences == ()
    assert sum(module.codec is not None for module in loaded.report.plan.modules) == 42
