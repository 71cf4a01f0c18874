"""Models of one file by what a user calls them, and the parts that no family claims."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import slipcast
from slipcast.registry.errors import IdentificationError
from support.command_line import json_of, output_of
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_folder

PIPELINES = {
    "sdxl--base-1.0-aio": ("conditioner.embedders.1.model", "conditioner.embedders.0.transformer"),
    "sd3-medium--incl-clips-aio": ("text_encoders.clip_g.transformer", "text_encoders.clip_l.transformer"),
}
LTX_2 = "ltx2-19b-dev--aio"
PARTS = {"vocoder": 194, "vae": 187, "audio_vae": 102, "text_embedding_projection": 1}
"""Counted in the recorded header: what lies in its file outside the denoiser's prefix."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def _written(name: str) -> Path:
    return write_checkpoint(recorded(name), Path(f"{name}.safetensors"))


@pytest.mark.parametrize(("name", "places"), PIPELINES.items())
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_kind_that_two_models_have_is_refused_with_what_to_type(
    name: str, places: tuple[str, str], command: str
) -> None:
    path = _written(name)
    error = json_of(command, path, "--set", "component=text_encoder", exit_code=2)
    assert error["found"] == "the component 'text_encoder', which 2 models of this checkpoint are"
    assert error["items"] == [
        f"clip-g: text_encoder, family clip-g, in {places[0]}",
        f"clip-l: text_encoder, family clip-l, in {places[1]}",
    ]
    assert error["hint"] == "choose with component=clip-g or component=clip-l"
    for wanted, place in zip(("clip-g", "clip-l"), places, strict=True):
        for said in (wanted, place):
            found = json_of("inspect", path, "--set", f"component={said}")
            assert (found["family"], found["prefix"]) == (wanted, f"{place}.")
    assert json_of("inspect", path, "--set", "component=vae")["components"][0]["kind"] == "vae"


def test_two_models_of_one_family_are_told_apart_by_where_they_are() -> None:
    for name in ("first", "second"):
        write_folder(Path("pipeline", name), tiny_tensors())
    classes = {name: ["diffusers", "ZImageTransformer2DModel"] for name in ("first", "second")}
    Path("pipeline", "model_index.json").write_text(json.dumps(classes))
    with pytest.raises(IdentificationError) as caught:
        slipcast.plan("pipeline", component="z-image")
    assert caught.value.hint == "choose with component=first or component=second"
    assert slipcast.inspect("pipeline", component="second").main.name == "second"


def test_an_unknown_component_lists_names_kinds_and_families() -> None:
    error = json_of("plan", _written("sd35-large--aio-dit-vae"), "--set", "component=unet", exit_code=2)
    assert error["found"] == "the component 'unet'"
    assert "its name, its folder, its family's id or its kind" in error["expected"]
    assert set(error["items"]) == {
        "sd3: denoiser, family sd3, in model.diffusion_model",
        "flux-1-vae: vae, family flux-1-vae, in first_stage_model",
    }


def test_parts_that_no_family_claims_are_counted_also_where_a_family_drops_them() -> None:
    path = _written(LTX_2)
    problems = json_of("inspect", path)["problems"]
    outside = [name for name in recorded(LTX_2).tensors if not name.startswith("model.diffusion_model.")]
    assert sum(PARTS.values()) == len(outside)
    begin = ["begins" if count == 1 else "begin" for count in PARTS.values()]
    tensors = ["tensor" if count == 1 else "tensors" for count in PARTS.values()]
    assert [problem.split(": ")[0] for problem in problems] == [
        f"no family claims {count} {tensors[n]} that {begin[n]} with {name}"
        for n, (name, count) in enumerate(PARTS.items())
    ]
    assert problems[1].endswith("with vae: the VAE of pictures, which is a model of its own")
    assert problems[0] in output_of("inspect", path)


def test_a_part_that_is_known_and_can_t_be_loaded_is_called_so() -> None:
    error = json_of("plan", _written(LTX_2), "--set", "component=vae", exit_code=2)
    assert error["found"].startswith("the component 'vae', which can't be loaded: no family claims 187 tensors")
    assert "another program" in error["hint"]
    assert error["items"] == ["ltx-2: denoiser, family ltx-2"]


def test_single_tensors_that_a_family_drops_are_no_part() -> None:
    tensors = recorded("sdxl--base-1.0-aio").tensors | {"v_pred": ("F32", ()), "ztsnr": ("F32", ())}
    assert slipcast.inspect(write_checkpoint(tensors, Path("v.safetensors"))).problems == ()


def test_an_adapter_is_told_where_it_belongs() -> None:
    error = json_of("inspect", _written("lora-flux1--kohya"), exit_code=2)
    assert "it looks like an adapter" in error["found"]
    assert error["expected"] == "a model"
    assert "load_lora_weights, add_adapter" in error["hint"]
    assert "slipcast new" not in error["hint"]
    assert error["items"] == []


def test_no_family_is_called_near_that_found_nothing() -> None:
    error = json_of("inspect", write_checkpoint({"zzz.weight": ("F32", (2, 2))}, Path("a.safetensors")), exit_code=2)
    assert (error["expected"], error["items"]) == ("the evidence of one family", [])
    assert "slipcast new" in error["hint"]
    near = dict(recorded("z-image-turbo--comfy-bf16").tensors)
    del near["x_pad_token"]
    with pytest.raises(IdentificationError) as caught:
        slipcast.inspect(write_checkpoint(near, Path("b.safetensors")))
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"  expected: the evidence of one family; the nearest is [a-z0-9-]+, which misses:", lines[1])
    assert lines[2] == f"    {caught.value.items[0]}"
    assert lines[-1].startswith("  to do: ")
