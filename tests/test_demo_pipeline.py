"""The trained pipeline: the digit that a prompt names, in every precision, and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from PIL import Image
from torch import Tensor

import slipcast
from slipcast.demo import prompted
from slipcast.demo import run as demo
from slipcast.demo.picture import to_picture
from slipcast.demo.prompted import NAMES, PIPELINE, draw, draw_prompt, start_noise
from slipcast.demo.recognise import as_recognised, count_recognised, train_recogniser
from slipcast.registry.errors import SlipcastError
from support.command_line import json_of, output_of, run
from support.isolation import isolate
from support.number_formats import relative_l2

DIGITS = list(range(10)) * 20
PROMPTS = [NAMES[digit] for digit in DIGITS]
CPU = {"device": "cpu", "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def pipeline(**settings: Any) -> Any:
    return slipcast.pipeline(PIPELINE, **CPU, **settings)


def recognised(pictures: Tensor) -> int:
    return count_recognised(train_recogniser(), as_recognised(pictures), DIGITS)


@pytest.fixture(scope="module")
def plain() -> Tensor:
    """The 200 pictures in bfloat16."""
    return draw(pipeline(), PROMPTS, seed=0)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_prompts_are_drawn_so_that_the_classifier_recognises_them(plain: Tensor) -> None:
    assert plain.shape == (200, 3, 64, 64)
    assert recognised(plain) >= 190


@pytest.mark.parametrize(
    ("denoiser", "encoder", "apart"),
    [
        ({"fp8": "storage"}, {}, 4),
        ({}, {"fp8": "storage"}, 4),
        ({"fp8": "storage"}, {"fp8": "storage"}, 4),
        ({}, {"fp8": "storage", "fp8.weights": "nvfp4"}, 10),
    ],
    ids=["fp8 storage", "fp8 text encoder", "both in fp8", "nvfp4 text encoder"],
)
def test_quantised_weights_change_how_many_are_recognised_by_little(
    plain: Tensor, denoiser: dict[str, str], encoder: dict[str, str], apart: int
) -> None:
    pipe = pipeline(**denoiser)
    if encoder:
        pipe.text_encoder = slipcast.load(PIPELINE / "text_encoder", **CPU, **encoder).model
    pictures = draw(pipe, PROMPTS, seed=0)
    count, changed = recognised(pictures), relative_l2(pictures, plain)
    print(f"\nrecognised {count}, relative L2 {changed:.4f}")
    assert 0.001 < changed < 0.1
    assert abs(count - recognised(plain)) <= apart


def test_speed_off_draws_what_diffusers_draws() -> None:
    own = ZImagePipeline.from_pretrained(PIPELINE, dtype=torch.bfloat16)
    ours = pipeline(speed="off")
    assert type(ours) is ZImagePipeline
    names = list(NAMES)
    assert torch.equal(draw(ours, names, seed=4), draw(own, names, seed=4))
    own.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 2.5}
    (first, second) = (
        pipe("nine", **call, generator=torch.Generator().manual_seed(1), output_type="pt").images
        for pipe in (ours, own)
    )
    assert torch.equal(first, second)


def test_all_that_is_shipped_stays_under_12_mb() -> None:
    shipped = [path for path in PIPELINE.parent.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {path.suffix for path in shipped} == {".safetensors", ".json", ".jinja"}
    assert 3_000_000 < sum(path.stat().st_size for path in shipped) < 12_000_000


# --- drawing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe() -> Any:
    return slipcast.pipeline(PIPELINE, device="cpu", dtype="float32")


def test_the_batch_changes_rounding_alone(pipe: Any) -> None:
    at_once = draw(pipe, PROMPTS[:5], seed=2, steps=2)
    seen: list[tuple[int, int]] = []
    parted = draw(pipe, PROMPTS[:5], seed=2, steps=2, batch=2, progress=lambda *done: seen.append(done))
    assert relative_l2(parted, at_once) < 1e-4
    assert seen == [(step, 6) for step in range(1, 7)]


def test_noise_is_of_the_seed_and_what_the_pipeline_makes_of_it(pipe: Any) -> None:
    made = pipe.prepare_latents(1, 16, 64, 64, torch.float32, "cpu", torch.Generator("cpu").manual_seed(5))
    assert torch.equal(start_noise(1, seed=5), made)
    assert not torch.equal(start_noise(1, seed=6), made)


def test_a_long_prompt_is_read_to_its_end(pipe: Any) -> None:
    long = "seven" + " " * 90
    last = [draw(pipe, [long + word], seed=0, steps=1) for word in ("one", "two")]
    assert not torch.equal(*last)


@pytest.mark.parametrize("wrong", [{"prompts": []}, {"steps": 0}, {"batch": 0}])
def test_nothing_to_draw_is_refused(pipe: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(SlipcastError, match=r"(?s)prompts in .* steps.*at least one prompt"):
        draw(pipe, **{"prompts": ["one"], "seed": 0, **wrong})


def test_a_picture_has_the_pixels_that_diffusers_gives(pipe: Any) -> None:
    tensor = draw(pipe, ["six"], seed=0)
    (expected,) = pipe.image_processor.postprocess(tensor, output_type="pil")
    assert to_picture(tensor[0]).tobytes() == expected.tobytes()
    assert to_picture(tensor[0][:, :32]).size == (64, 32)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_prompt_draws_its_digit(folder: Path) -> None:
    answer = json_of("demo", "--prompt", "seven", "--device", "cpu", "--seed", "3", "--set", "fp8=storage")
    assert (answer["prompt"], answer["seed"], answer["steps"], answer["recognised"]) == ("seven", 3, 8, 7)
    assert answer["settings"]["fp8"]["engaged"] == "storage"
    assert answer["settings"].keys() == slipcast.status(pipeline()).keys()
    assert answer["bytes"] < draw_prompt("x", CPU, steps=1).nbytes
    with Image.open(folder / answer["picture"]) as picture:
        expected = draw(pipeline(fp8="storage"), ["seven"], seed=3)[0]
        assert picture.tobytes() == to_picture(expected).tobytes()


def test_the_command_says_what_the_classifier_sees(folder: Path) -> None:
    text = output_of("demo", "--prompt", "the digit 4", "--steps", "5", "--device", "cpu", "--out", "four.png")
    assert text.splitlines()[0] == "'the digit 4': the classifier sees a 4"
    assert "in 5 steps, seed 0" in text
    assert text.splitlines()[-1] == "The picture is four.png."
    assert [path.name for path in folder.iterdir()] == ["four.png"]


def test_steps_without_a_prompt_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(demo, "compare", None)
    error = json_of("demo", "--steps", "4", exit_code=2)
    assert "'--steps' needs '--prompt'" in error["found"]


def test_a_picture_that_is_there_is_kept_unless_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "slipcast-demo.png").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(prompted, "draw_prompt", None)
        assert run("demo", "--prompt", "one").exit_code == 2
    assert (folder / "slipcast-demo.png").read_text() == "mine"
    output_of("demo", "--prompt", "one", "--steps", "1", "--device", "cpu", "--overwrite")
    Image.open(folder / "slipcast-demo.png").verify()
