"""``slipcast generate``: pictures, videos, what it says of them, and what it refuses before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import slipcast
from slipcast.engine import loader
from slipcast.engine.pipeline import own_size, pipeline_plan
from slipcast.engine.pipeline.generate import GenerationProgress, generate
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.policy.sizes import AskedSize
from support.command_line import json_of, output_of, run
from support.isolation import isolate
from support.tiny_pipelines import write_pipeline, write_single

CALL = ("--prompt", "a seven", "--steps", "2", "--size", "64x64", "--device", "cpu", "--set", "dtype=bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = tmp_path_factory.mktemp("pipelines")
    return {family: write_pipeline(family, made / family) for family in ("z-image", "wan", "qwen-image", "lumina-2")}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def test_the_picture_is_the_one_that_the_pipeline_draws(folders: Mapping[str, Path], here: Path) -> None:
    told = json_of("generate", folders["z-image"], *CALL, "--seed", "5", "--guidance", "1.5", "--out", here / "a.png")
    assert (told["family"], told["variant"], told["pipeline"]) == ("z-image", "base", "ZImagePipeline")
    assert (told["width"], told["height"], told["frames"], told["seed"]) == (64, 64, 1, 5)
    assert told["arguments"] == {"num_inference_steps": 2, "guidance_scale": 1.5, "width": 64, "height": 64}
    assert told["status"]["dtype"] == {"requested": "bfloat16", "engaged": "bfloat16", "reason": "as requested"}
    pipe = slipcast.pipeline(folders["z-image"], device="cpu", dtype="bfloat16")
    call = {"num_inference_steps": 2, "guidance_scale": 1.5, "width": 64, "height": 64}
    (expected,) = pipe("a seven", generator=torch.Generator().manual_seed(5), **call).images
    with Image.open(here / "a.png") as drawn:
        assert np.array_equal(np.asarray(drawn), np.asarray(expected))


def test_steps_and_guidance_are_the_familys_for_the_variant(folders: Mapping[str, Path], here: Path) -> None:
    file = write_single(folders["z-image"], here / "z_image_turbo.safetensors")
    asked = ("--set", f"companions={folders['z-image']}", "--prompt", "a", "--size", "64x64", "--device", "cpu")
    told = json_of("generate", file, *asked, "--out", here / "a.png")
    assert told["variant"] == "turbo"
    assert (told["arguments"]["num_inference_steps"], told["arguments"]["guidance_scale"]) == (9, 0.0)


def test_the_plan_says_steps_and_guidance(folders: Mapping[str, Path], here: Path) -> None:
    file = write_single(folders["z-image"], here / "z_image_turbo.safetensors")
    asked = (file, "--set", f"companions={folders['z-image']}", "--dry-run", "--device", "cpu")
    told = json_of("generate", *asked)
    assert (told["steps"], told["guidance"]) == (9, 0.0)
    shown = output_of("generate", *asked, "--steps", "3", "--guidance", "1.5")
    assert re.search(r"^ +steps +3$", shown, re.MULTILINE)
    assert re.search(r"^ +guidance +1\.5$", shown, re.MULTILINE)


def test_help_and_message_list_the_same_endings(folders: Mapping[str, Path], here: Path) -> None:
    told = json_of("generate", folders["z-image"], "--prompt", "a", "--out", here / "a.bmp", exit_code=2)
    endings = told["expected"].removeprefix("a name that ends in ")
    assert endings == ".png, .jpg, .jpeg or .webp; of a video an animated .png, .gif or .webp"
    assert f"Where to write: {endings}." in " ".join(output_of("generate", "--help").split())


def test_guidance_goes_by_the_familys_argument_with_a_negative_prompt(folders: Mapping[str, Path], here: Path) -> None:
    told = json_of("generate", folders["qwen-image"], *CALL, "--guidance", "3", "--out", here / "a.png")
    assert told["arguments"]["true_cfg_scale"] == 3.0
    assert told["arguments"]["negative_prompt"] == " "
    told = json_of("generate", folders["qwen-image"], *CALL, "--negative", "blue", "--out", here / "b.png")
    assert told["arguments"]["negative_prompt"] == "blue"


def test_a_picture_to_start_from_is_brought_to_size_and_kept_at_little_strength(
    folders: Mapping[str, Path], here: Path
) -> None:
    Image.new("RGBA", (75, 70), (200, 30, 30, 255)).save(here / "red.png")
    asked = ("--prompt", "a", "--steps", "10", "--device", "cpu", "--image", here / "red.png", "--strength")
    told = json_of("generate", folders["z-image"], *asked, "0.1", "--out", here / "a.png")
    assert (told["pipeline"], told["width"], told["height"]) == ("ZImageImg2ImgPipeline", 64, 64)
    assert told["arguments"]["strength"] == 0.1
    json_of("generate", folders["z-image"], *asked, "1.0", "--out", here / "b.png")
    assert (here / "a.png").read_bytes() != (here / "b.png").read_bytes()


def test_the_frames_of_a_video_are_an_animated_picture(folders: Mapping[str, Path], here: Path) -> None:
    told = json_of("generate", folders["wan"], *CALL, "--frames", "5", "--out", here / "a.webp")
    assert told["frames"] == 5
    with Image.open(here / "a.webp") as drawn:
        assert (drawn.is_animated, drawn.size) == (True, (64, 64))  # frames that are alike are written as one


def test_the_plan_of_all_parts(folders: Mapping[str, Path]) -> None:
    plan = json_of("generate", folders["z-image"], "--dry-run", "--device", "cpu")
    assert list(plan["parts"]) == ["transformer", "text_encoder", "vae", "tokenizer", "scheduler"]
    assert plan["bytes"] == sum(part["bytes"] for part in plan["parts"].values())
    loaded = slipcast.pipeline(folders["z-image"], device="cpu")
    models = [part for part in loaded.components.values() if isinstance(part, torch.nn.Module)]
    buffers = sum(buffer.nbytes for model in models for buffer in model.buffers())
    assert plan["bytes"] == buffers + sum(weight.nbytes for model in models for weight in model.parameters())
    assert plan["parts"]["vae"]["found"] == "in the pipeline's folder"
    shown = output_of("generate", folders["z-image"], "--dry-run", "--device", "cpu")
    assert "flux-1-vae (flux-1)" in shown
    assert "ZImagePipeline of z-image (base)" in shown
    assert "flux-1-vae" in shown


REFUSED = [
    (("--size", "65x64"), "a width of 65 pixels", "give 64 or 80"),
    (("--size", "8x64"), "a width of 8 pixels", "give 16 or 32"),
    (("--frames", "5"), "num_frames for ZImagePipeline, which takes none", "leave it out"),
    (("--strength", "0.5"), "a strength of 0.5 without a picture to start from", "give a picture to start from"),
    (("--strength", "0"), "'--strength': 0.0 is not in the range 0<x<=1", ""),
    (("--guidance", "nan"), "guidance is nan", "give guidance such a value"),
    (("--guidance", "inf"), "guidance is inf", "give guidance such a value"),
    (("--out", "a.gif"), "one picture for a .gif file, which holds several frames", "another ending"),
    (("--size", "160000x160000"), "a pipeline that needs", "pixels, which takes"),
    (("--out", "a.tiff"), "the name ends in .tiff", "another ending"),
    (("--out", "missing/a.png"), "there is no such folder to write into", "make the folder"),
    (("--image", "no.png"), "the picture can't be read: there is no such file", "check the path that --image names"),
    (("--size", "64"), "'64' is no size; write it as 1024x768", ""),
    (("--device", "cuda:8.6,12GiB"), "which is not there", ""),
]


@pytest.mark.parametrize(("options", "found", "hint"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_what_is_refused_is_refused_before_anything_is_loaded(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], found: str, hint: str
) -> None:
    monkeypatch.setattr(loader, "execute", None)
    result = run("generate", folders["z-image"], *CALL, *options)
    assert result.exit_code == 2
    assert found in result.stderr
    assert hint in result.stderr


def test_a_video_is_refused_a_file_of_one_picture_before_it_is_loaded(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "execute", None)
    result = run("generate", folders["wan"], *CALL, "--frames", "5", "--out", "a.jpg")
    assert result.exit_code == 2
    assert "several frames for a .jpg file, which holds one picture" in result.stderr


def test_a_side_that_is_not_positive_is_planned_for_and_drawn_as_one_that_is_not_given(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    planned: list[object] = []
    own = pipeline_plan.make_pipeline_plan

    def plan(path: object, settings: object, size: object = None, **found: object) -> object:
        planned.append(size)
        return own(path, settings, size, **found)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline_plan, "make_pipeline_plan", plan)
    monkeypatch.setattr(own_size, "DEFAULT_SIDE", 96)
    told = json_of("generate", folders["z-image"], *CALL, "--size", "0x64", "--out", here / "a.png")
    assert (told["arguments"]["width"], told["arguments"]["height"]) == (told["width"], told["height"]) == (96, 64)
    assert planned == [AskedSize(None, 64)]


def test_a_family_without_such_a_pipeline_refuses_pictures(folders: Mapping[str, Path], here: Path) -> None:
    Image.new("RGB", (64, 64)).save(here / "black.png")
    result = run("generate", folders["lumina-2"], *CALL, "--image", here / "black.png")
    assert result.exit_code == 2
    assert "a picture to start from, for which diffusers has no pipeline like Lumina2Pipeline" in result.stderr


def test_nothing_is_written_over_unless_it_is_said(folders: Mapping[str, Path], here: Path) -> None:
    (here / "a.png").write_text("mine")
    result = run("generate", folders["z-image"], *CALL, "--out", here / "a.png")
    assert result.exit_code == 2
    assert (here / "a.png").read_text() == "mine"
    output_of("generate", folders["z-image"], *CALL, "--out", here / "a.png", "--overwrite")
    assert sorted(path.name for path in here.glob("*.p*")) == ["a.png"]


def test_a_prompt_is_wanted(folders: Mapping[str, Path]) -> None:
    result = run("generate", folders["z-image"])
    assert (result.exit_code, "Missing option '--prompt'" in result.stderr) == (2, True)


def test_what_the_libraries_fail_at_is_refused_without_a_traceback(folders: Mapping[str, Path], here: Path) -> None:
    asked = ("--prompt", "a", "--steps", "1", "--size", "16x16400", "--device", "cpu")
    told = json_of("generate", folders["z-image"], *asked, "--out", here / "a.png", exit_code=2)
    assert told["error"] == "SettingsError"
    assert "ZImagePipeline can't draw what was asked for: IndexError" in told["found"]
    assert "height: 16400" in told["items"]
    assert list(here.glob("*.png")) == []


def test_what_a_callers_function_raises_stays_what_it_is(folders: Mapping[str, Path]) -> None:
    def stop(at: GenerationProgress) -> None:
        raise ValueError("mine")

    pipe = slipcast.pipeline(folders["z-image"], device="cpu")
    with pytest.raises(ValueError, match=r"^mine$"):
        generate(pipe, GenerationRequest("a", steps=1, width=64, height=64), stop)
