"""``slipcast convert`` as users and programs meet it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from slipcast.registry.catalogue import load_catalogue
from support.command_line import json_of, output_of, run
from support.tiny_pipelines import write_all_in_one, write_pipeline
from support.tiny_z_image import natively, tiny_tensors, write_native


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return write_native(tmp_path / "native.safetensors", tiny_tensors())


def test_there_and_back(tmp_path: Path, native: Path) -> None:
    folder, back = tmp_path / "transformer", tmp_path / "back.safetensors"
    written = json_of("convert", native, folder, "--layout", "diffusers")
    assert written["family"] == "z-image"
    assert written["layout"] == {"from": "native", "to": "diffusers"}
    assert written["files"] == [str(folder / "diffusion_pytorch_model.safetensors"), str(folder / "config.json")]
    assert (written["left_out"], written["altered"], written["prefix"]) == ({}, [], "")
    assert written["tensors"] == len(tiny_tensors())
    assert written["bytes"] == sum(tensor.nbytes for tensor in tiny_tensors().values())
    shown = output_of("convert", folder, back, "--layout", "native", "--prefix", "model.diffusion_model.")
    assert "from diffusers to native" in shown
    assert "model.diffusion_model." in shown
    expected = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(native).items()}
    actual = load_file(back)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    tensors = natively(tiny_tensors())
    save_file({**tensors, "norm_final.weight": torch.ones(64)}, tmp_path / "native.safetensors")
    shown = output_of("convert", tmp_path / "native.safetensors", tmp_path / "out.safetensors", "--layout", "diffusers")
    assert "norm_final.weight: the norm has no weight in the model class" in shown
    assert "is lost" in shown


def test_nothing_is_replaced_unless_asked(tmp_path: Path, native: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    error = json_of("convert", native, out, "--layout", "diffusers", exit_code=2)
    assert error["error"] == "UnsupportedFileError"
    assert out.read_bytes() == b"mine"
    json_of("convert", native, out, "--layout", "diffusers", "--overwrite")
    assert len(load_file(out)) == len(tiny_tensors())


def test_tensors_that_may_be_left_over(tmp_path: Path) -> None:
    path, out = tmp_path / "native.safetensors", tmp_path / "out.safetensors"
    save_file({**natively(tiny_tensors()), "extra.weight": torch.ones(2)}, path)
    assert run("convert", path, out, "--layout", "diffusers").exit_code == 2
    written = json_of("convert", path, out, "--layout", "diffusers", "--set", "unexpected=[extra.*]")
    assert list(written["left_out"]) == ["extra.weight"]


def test_another_format(tmp_path: Path, native: Path) -> None:
    out, plain = tmp_path / "int8.safetensors", tmp_path / "plain.safetensors"
    written = json_of("convert", native, out, "--format", "int8", "--scale", "tensor")
    quantised = written["formats"]["to"]["int8"]
    assert quantised > 20
    assert written["formats"] == {
        "from": {"plain": len(load_file(native))},
        "to": {"plain": len(load_file(native)) - quantised, "int8": quantised},
    }
    assert (written["folded"], written["layout"]) == ({}, {"from": "native", "to": "native"})
    stayed = written["stayed"]
    assert (
        stayed.pop("t_embedder.mlp.0.weight")
        == "the family keeps its time embedding unquantised: the forward looks at its weight's dtype"
    )
    layers = {name for name, tensor in load_file(native).items() if tensor.ndim > 1 and name.endswith(".weight")}
    in_codes = {name.removesuffix("_scale") for name in load_file(out) if name.endswith(".weight_scale")}
    assert set(stayed) == layers - in_codes - {"t_embedder.mlp.0.weight"}
    assert load_file(out)["layers.0.attention.qkv.weight_scale"].shape == ()
    shown = output_of("convert", out, plain, "--format", "fp32", "--layout", "diffusers")
    assert f"int8 ({quantised})" in shown
    assert "from native to diffusers" in shown
    assert {tensor.dtype for tensor in load_file(plain).values()} == {torch.float32}


def test_the_legacy_spelling(tmp_path: Path, native: Path) -> None:
    out = tmp_path / "out.safetensors"
    json_of("convert", native, out, "--format", "fp8_scaled", "--spelling", "legacy")
    assert {"scaled_fp8", "layers.0.attention.qkv.scale_weight"} <= load_file(out).keys()
    error = json_of("convert", native, out, "--format", "int8", "--spelling", "legacy", "--overwrite", exit_code=2)
    assert (error["error"], error["field"]) == ("SettingsError", "spelling")


def test_the_remainder_is_a_setting(tmp_path: Path, native: Path) -> None:
    layer = "layers.0.feed_forward.w1"
    tensors = load_file(native)
    path, out = tmp_path / "one.safetensors", tmp_path / "out.safetensors"
    scale = {f"{layer}.weight_scale": torch.tensor(0.01)}
    save_file({**tensors, f"{layer}.weight": torch.ones(170, 64, dtype=torch.int8), **scale}, path)
    assert json_of("convert", path, out, "--format", "int8")["formats"]["to"]["int8"] == 1
    more = json_of("convert", path, out, "--format", "int8", "--overwrite", "--set", "fp8.remainder=quantise")
    assert more["formats"]["to"]["int8"] > 20


def test_weights_that_lose_their_codes_are_shown(tmp_path: Path, native: Path) -> None:
    model, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    json_of("convert", native, model, "--format", "nvfp4", "--layout", "diffusers")
    shown = output_of("convert", model, out, "--layout", "native")
    assert re.search(r"  dequantised +the weights whose rows make it have different scales[^\n]*:\n {17}\S", shown)
    assert re.search(r"^ {17}layers\.\{0…2\}\.attention\.qkv\.weight \(3\)$", shown, re.MULTILINE)


def test_layers_that_do_not_get_the_format_are_said_with_the_reason(tmp_path: Path, native: Path) -> None:
    small, smaller = tmp_path / "small.safetensors", tmp_path / "smaller.safetensors"
    shown = output_of("convert", native, small, "--format", "fp8_scaled")
    assert re.search(r"  stayed +cap_embedder\.1\.weight: the family keeps its text embedding unquantised\n", shown)
    assert "t_embedder.mlp.{0,2}.weight (2): the family keeps its time embedding unquantised: the forward" in shown
    written = json_of("convert", small, smaller, "--format", "mxfp8")
    padded = {name for name, reason in written["stayed"].items() if "padded" in reason}
    assert len(padded) == written["formats"]["to"]["fp8_scaled"] > 0
    assert json_of("convert", small, tmp_path / "plain.safetensors", "--format", "bf16")["stayed"] == {}


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("format_", ["fp8_scaled", "int8"])
def test_a_family_without_fp8_storage_gets_no_codes_in_either_naming(tmp_path: Path, layout: str, format_: str) -> None:
    family = load_catalogue()["flux-1-vae"]
    assert family.tiny is not None
    save_file(AutoencoderKL(**family.tiny.config).state_dict(), tmp_path / "diffusers.safetensors")
    json_of("convert", tmp_path / "diffusers.safetensors", tmp_path / "native.safetensors", "--layout", "native")
    path, out = tmp_path / f"{layout}.safetensors", tmp_path / "out.safetensors"
    written = json_of("convert", path, out, "--format", format_)
    assert set(written["formats"]["to"]) == {"plain"}
    said = json_of("plan", path, "--set", "fp8=storage")["settings"]["fp8"]["reason"]
    assert said == f"flux-1-vae: {family.precision.fp8.storage.reason}"
    assert set(written["stayed"].values()) == {said}
    assert any("attn_1.q" in name or "to_q" in name for name in written["stayed"])
    shown = output_of("convert", path, out, "--format", format_, "--overwrite")
    assert shown.count(said) == 1


def test_layers_that_a_quantised_file_left_alone_name_the_setting(tmp_path: Path, native: Path) -> None:
    layer = "layers.0.feed_forward.w1"
    tensors = load_file(native)
    scale = {f"{layer}.weight_scale": torch.tensor(0.01)}
    path = tmp_path / "one.safetensors"
    save_file({**tensors, f"{layer}.weight": torch.ones(170, 64, dtype=torch.int8), **scale}, path)
    stayed = json_of("convert", path, tmp_path / "out.safetensors", "--format", "int8")["stayed"]
    said = "the file is quantised already, and the setting fp8.remainder is keep"
    assert stayed["layers.1.feed_forward.w1.weight"] == said
    assert f"{layer}.weight" not in stayed
    assert (
        stayed["t_embedder.mlp.0.weight"]
        == "the family keeps its time embedding unquantised: the forward looks at its weight's dtype"
    )


def test_what_stays_is_not_called_a_change(tmp_path: Path, native: Path) -> None:
    shown = output_of("convert", native, tmp_path / "out.safetensors", "--prefix", "diffusion_model.")
    assert re.search(r"  layout +native, as it was\n", shown)
    assert re.search(rf"  formats +plain \({len(load_file(native))}\), as they were\n", shown)


def test_what_is_of_other_models_is_counted_and_named_on_demand(tmp_path: Path) -> None:
    path = write_all_in_one("sdxl", write_pipeline("sdxl", tmp_path / "sdxl"), tmp_path / "all.safetensors")
    asked = ("--set", "component=vae", "--overwrite")
    left_out = json_of("convert", path, tmp_path / "vae.safetensors", *asked)["left_out"]
    text = output_of("convert", path, tmp_path / "vae.safetensors", *asked)
    unet = [name for name in left_out if name.startswith("model.diffusion_model.")]
    assert f"{len(unet)} tensors: part of model.diffusion_model in the same file (Stable Diffusion XL)" in text
    assert len(text.splitlines()) < 15
    assert sum(int(count) for count in re.findall(r"(\d+) tensors: part", text)) == len(left_out)
    named = output_of("convert", path, tmp_path / "vae.safetensors", *asked, "--verbose")
    assert "model.diffusion_model.input_blocks.0.0.bias" in named
    assert "model.diffusion_model.input_blocks.0.0.bias" not in text
