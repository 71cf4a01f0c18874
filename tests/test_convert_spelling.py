"""How converted checkpoints spell what stands beside their codes, and what a folder says of its layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.demo.run import CHECKPOINT
from slipcast.engine import padded_codes, written_sides
from slipcast.registry.errors import AccountingError, SettingsError
from support.conversions import check_values, converted, match_of, metadata_of
from support.fp8_checkpoints import in_model_names
from support.isolation import isolate
from support.quantised_checkpoints import UNEVEN, fp8, int8, nvfp4, quantised_file, small_tensors
from support.tiny_z_image import natively


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def test_from_one_spelling_to_the_other(tmp_path: Path) -> None:
    file = quantised_file(fp8("1", spelling="scale_weight", input_scale="scale_input"))
    old, new, again = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "again"))
    file.write(old, extra={"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)})
    converted(old, new, spelling="comfy")
    tensors = load_file(new)
    assert "scaled_fp8" not in tensors
    for layer in file.markers:
        assert json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist())) == {
            "format": "float8_e4m3fn",
            "full_precision_matrix_mult": True,
        }
        assert tensors[f"{layer}.weight_scale"].shape == ()
        assert tensors[f"{layer}.input_scale"] == 0.25
        assert f"{layer}.scale_weight" not in tensors
    check_values(new, file)
    converted(new, again, spelling="legacy")
    tensors = load_file(again)
    assert tensors["scaled_fp8"].shape == (2,)
    assert {name for name in tensors if "scale" in name} == {name for name in load_file(old) if "scale" in name}
    check_values(again, file)


def test_the_legacy_spelling_says_of_all_layers_what_it_can_not_say_of_one(tmp_path: Path) -> None:
    file = quantised_file(fp8())
    file.markers["layers.0.attention.qkv"]["full_precision_matrix_mult"] = True
    new = file.write(tmp_path / "new.safetensors", marked="metadata")
    conversion = converted(new, tmp_path / "old.safetensors", spelling="legacy").conversion
    assert any("1 of 14 layers are marked to be multiplied in full precision" in line for line in conversion.altered)
    bundles = match_of(tmp_path / "old.safetensors").bundles
    assert all(bundle.full_precision for bundle in bundles.values() if not bundle.is_plain)
    assert "_quantization_metadata" not in metadata_of(tmp_path / "old.safetensors")


def test_the_legacy_spelling_is_of_fp8_alone(tmp_path: Path) -> None:
    path = quantised_file(int8()).write(tmp_path / "int8.safetensors", marked="tensors")
    with pytest.raises(SettingsError, match=r"the spelling 'legacy' for codes in int8(.|\n)*spelling comfy"):
        converted(path, tmp_path / "out.safetensors", spelling="legacy")


def test_metadata_that_can_not_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    file = quantised_file(fp8("N"))
    path = tmp_path / "m.safetensors"
    save_file(file.native, path, {"_quantization_metadata": "{", "title": "kept"})
    conversion = converted(path, tmp_path / "out.safetensors", "diffusers").conversion
    assert conversion.altered == ("the metadata _quantization_metadata can't be read and is left out",)
    assert metadata_of(tmp_path / "out.safetensors") == {"title": "kept", "format": "pt"}


def test_a_folder_says_what_its_layers_are_in(tmp_path: Path) -> None:
    """So diffusers refuses it, and slipcast reads it, rotation and byte layout included."""
    for draw, marked in ((int8(group=16), "tensors"), (nvfp4(comfy=False), ""), (fp8(), "metadata")):
        file = quantised_file(draw, block=16)
        native = file.write(tmp_path / "native.safetensors", marked=marked)
        converted(native, tmp_path / "folder", "diffusers", overwrite=True)
        config = json.loads((tmp_path / "folder" / "config.json").read_text())
        modules = config["quantization_config"]["modules"]
        assert config["quantization_config"]["quant_method"] == "slipcast"
        assert modules["layers.0.attention.to_k"] in ("int8/row/convrot16", "nvfp4/linear", "float8_e4m3fn/tensor")
        check_values(tmp_path / "folder", file)
        converted(tmp_path / "folder", tmp_path / "back.safetensors", "native", overwrite=True)
        check_values(tmp_path / "back.safetensors", file)
    with pytest.raises(ValueError, match="slipcast"):
        ZImageTransformer2DModel.from_pretrained(tmp_path / "folder")


def test_a_folder_of_codes_alone(tmp_path: Path) -> None:
    """Norms and biases in fp8 are no layers that a config.json would describe."""
    native = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in natively(small_tensors(UNEVEN)).items()}
    save_file(native, tmp_path / "native.safetensors")
    for wanted in ({}, {"format": "fp8_scaled"}):
        converted(tmp_path / "native.safetensors", tmp_path / "folder", "diffusers", overwrite=True, **wanted)
        loaded = slipcast.load(tmp_path / "folder", device="cpu", dtype="float32")
        assert loaded.report.differences == ()
        assert loaded.report.plan.precisions["fp8"] > 20
        state = slipcast.load(tmp_path / "folder", device="cpu", dtype="float32", fp8="off").model.state_dict()
        for name, tensor in in_model_names(native).items():
            assert torch.equal(state[name], tensor.float().reshape(state[name].shape))


def test_the_legacy_marker_lies_at_the_component_s_prefix(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    converted(CHECKPOINT, out, format="fp8_scaled", spelling="legacy")
    names = set(load_file(out))
    assert {name for name in names if "scaled_fp8" in name} == {"model.diffusion_model.scaled_fp8"}
    moved = tmp_path / "moved.safetensors"
    converted(out, moved, prefix="diffusion_model.")
    assert {name.replace("model.diffusion_model.", "diffusion_model.") for name in names} == set(load_file(moved))


def test_a_model_that_was_saved_comes_back_native(tmp_path: Path) -> None:
    """A saved folder has no markers: its config.json alone says that columns are rotated."""
    file = quantised_file(int8(group=16), block=16)
    loaded = slipcast.load(file.write(tmp_path / "m.safetensors", marked="tensors"), device="cpu", dtype="float32")
    loaded.model.save_pretrained(tmp_path / "folder")
    converted(tmp_path / "folder", tmp_path / "native.safetensors", "native")
    tensors = load_file(tmp_path / "native.safetensors")
    marker = json.loads(bytes(tensors["layers.0.attention.qkv.comfy_quant"].tolist()))
    assert marker == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
    check_values(tmp_path / "native.safetensors", file)


def test_a_file_that_would_not_be_read_as_what_it_is_does_not_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantised_file(int8(group=16), block=16).write(tmp_path / "m.safetensors", marked="tensors")
    monkeypatch.setattr(written_sides, "marker_of", lambda *_, **__: {"format": "int8_tensorwise"})
    with pytest.raises(AccountingError) as caught:
        converted(path, tmp_path / "out.safetensors", format="int8_convrot", spelling="comfy")
    assert caught.value.found == "what was written would not be read as what it is; nothing is left of it"
    assert "layers.0.attention.qkv.weight is in int8/row/convrot16, and reads as int8/row" in caught.value.items
    assert [found.name for found in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_file_that_would_look_like_another_model_does_not_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_codes.PaddedCodes, "hides_sizes", lambda *_: False)
    with pytest.raises(AccountingError) as caught:
        converted(CHECKPOINT, tmp_path / "out.safetensors", format="nvfp4")
    assert "in_channels is 1 in the input, and reads as 4" in caught.value.items
    assert list(tmp_path.iterdir()) == []
