"""Weights and draws that are not finite: said as they load where they are looked at, and of every draw."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.pipeline.generate import Generated, generate
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.seen_values import SeenValues, not_finite
from support.command_line import json_of, output_of
from support.tiny_pipelines import write_pipeline
from support.tiny_z_image import natively, tiny_tensors

NAME = "layers.0.feed_forward.w2.weight"


def damaged(path: Path, name: str, *values: float) -> Path:
    """The path, with such values at the end of a tensor of its one file."""
    file = path if path.is_file() else next(path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name].view(-1)[-len(values) :] = torch.tensor(values)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture
def native(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(natively(tiny_tensors()), path)
    return path


def notes(path: Path, **settings: Any) -> tuple[str, ...]:
    return slipcast.load(path, device="cpu", **settings).report.notes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_cast_are_looked_at(native: Path, value: float) -> None:
    held = load_file(native)[NAME].dtype
    other = "float32" if held != torch.float32 else "bfloat16"
    assert notes(native, dtype=other) == ()
    damaged(native, NAME, value, value)
    (note,) = notes(native, dtype=other)
    count = load_file(native)[NAME].numel()
    assert note.startswith(f"1 tensor holds values that are NaN or infinite, in {NAME} (2 of {count:,})")


def test_what_a_cast_is_not_made_of_is_not_read(native: Path) -> None:
    held = str(load_file(native)[NAME].dtype).removeprefix("torch.")
    assert notes(damaged(native, NAME, float("nan")), dtype=held) == ()


def test_a_sum_that_overflows_is_no_damage() -> None:
    seen, values = SeenValues(), torch.full((64,), 60000.0, dtype=torch.float16)
    seen.look_at("a", values)
    assert seen.suspects() == {"a"}
    assert not_finite(seen.suspects(), {"a": values}) is None


def test_infinities_that_cancel_are_found() -> None:
    seen, values = SeenValues(), torch.tensor([float("inf"), float("-inf"), 1.0])
    seen.look_at("a", values)
    seen.look_at("a", torch.ones(3))
    assert "a (2 of 3)" in (not_finite(seen.suspects(), {"a": values}) or "")


def test_only_the_first_names_are_shown() -> None:
    tensors = {f"t{number:02}": torch.tensor([float("nan")]) for number in range(20)}
    sentence = not_finite(tensors, tensors) or ""
    assert sentence.startswith("20 tensors")
    assert "t05" in sentence
    assert "t06" not in sentence
    assert "14 more" in sentence


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline("z-image", tmp_path_factory.mktemp("original") / "z-image")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "z-image")


def drawn(folder: Path, **settings: Any) -> Generated:
    pipe = slipcast.pipeline(folder, device="cpu", **settings)
    result = generate(pipe, GenerationRequest("a fox", steps=1, width=64, height=64))
    assert "decode" not in vars(pipe.vae) or pipe.vae.decode.__qualname__.startswith("VaeCalls")  # as it was
    assert all(not part._forward_hooks for part in (pipe.transformer, pipe.text_encoder))
    return result


def test_a_draw_of_finite_values_says_nothing(folder: Path) -> None:
    assert drawn(folder).notes == ()


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("transformer", "layers.0.feed_forward.w2.weight"),
        ("text_encoder", "layers.0.mlp.up_proj.weight"),
        ("vae", "decoder.conv_in.weight"),
    ],
)
def test_a_black_picture_is_said_with_the_weights_at_fault(
    folder: Path, caplog: pytest.LogCaptureFixture, role: str, name: str
) -> None:
    tensors = load_file(next((folder / role).glob("*.safetensors")))
    (full,) = (own for own in tensors if own.endswith(name))
    damaged(folder / role, full, *[float("nan")] * tensors[full].numel())
    with caplog.at_level(logging.WARNING, "slipcast"):
        (note,) = drawn(folder).notes
    assert note in caplog.text
    assert f"{role} gave the first of them" in note
    assert name in note
    assert f"({tensors[full].numel():,} of {tensors[full].numel():,})" in note


def test_a_draw_that_overflows_names_the_dtype(folder: Path) -> None:
    pipe = slipcast.pipeline(folder, device="cpu", dtype="float32")
    plain = pipe.vae.decoder.forward
    pipe.vae.decoder.forward = lambda *given: plain(*given) * float("inf")
    (note,) = generate(pipe, GenerationRequest("a fox", steps=1, width=64, height=64)).notes
    assert "vae gave the first of them; no weight of it is" in note
    assert "float32" in note


def test_the_command_says_it_too(folder: Path, tmp_path: Path) -> None:
    damaged(folder / "vae", "decoder.conv_in.weight", *[float("nan")] * 9)
    asked = ("generate", folder, "--prompt", "x", "--steps", "1", "--size", "64x64", "--overwrite")
    asked = (*asked, "--out", tmp_path / "x.png", "--set", "device=cpu")
    assert "decoder.conv_in.weight (9 of" in json_of(*asked)["notes"][0]
    assert "decoder.conv_in.weight (9 of" in output_of(*asked).replace("\n", " ")
