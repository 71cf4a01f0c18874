"""Pipelines of every family against what diffusers builds of the same folder: the same picture, bit for bit."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import slipcast
from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in
from slipcast.engine.pipeline.assemble import pipeline_record
from slipcast.engine.pipeline.generate import generate
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.registry.errors import Cancelled, CompanionError
from support.tiny_pipelines import (
    ALL_IN_ONE,
    PIPELINES,
    plain_pipeline,
    without_models,
    write_all_in_one,
    write_pipeline,
    write_single,
)

FAMILIES = sorted(PIPELINES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_pipeline(family, tmp_path_factory.mktemp(family) / "pipeline") for family in FAMILIES}


def picture(pipe: Any) -> np.ndarray:
    """The picture, or the frames, of one prompt and seed."""
    call: dict[str, Any] = {"prompt": "a seven", "num_inference_steps": 2, "height": 64, "width": 64}
    call |= {"output_type": "np", "generator": torch.Generator().manual_seed(3)}
    pipe.set_progress_bar_config(disable=True)
    if isinstance(pipe, diffusers.ModularPipeline):
        with torchvision_or_stand_in(pipe.transformer):
            return np.asarray(pipe(**call, output="images"))
    if isinstance(pipe, diffusers.WanPipeline):
        return np.asarray(pipe(**call, num_frames=5).frames)
    if isinstance(pipe, diffusers.QwenImagePipeline):
        call |= {"negative_prompt": " ", "true_cfg_scale": 4.0}
    return np.asarray(pipe(**call).images)


def models_of(pipe: Any) -> dict[str, nn.Module]:
    return {role: part for role, part in pipe.components.items() if isinstance(part, nn.Module)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_a_single_file_draw_what_diffusers_draws(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[family]
    ours = slipcast.pipeline(folder, device="cpu", dtype="bfloat16")
    plain = plain_pipeline(type(ours), folder)
    expected = picture(plain)
    assert expected.std() > 0.03
    assert np.array_equal(picture(ours), expected)
    single = write_single(folder, tmp_path / "model.safetensors")
    again = slipcast.pipeline(single, device="cpu", dtype="bfloat16", companions=folder)
    assert type(again) is type(plain)
    assert np.array_equal(picture(again), expected)


@pytest.mark.parametrize("family", sorted(ALL_IN_ONE))
def test_a_file_of_the_whole_pipeline_needs_tokenizers_alone(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[family]
    whole = write_all_in_one(family, folder, tmp_path / "whole.safetensors")
    rest = without_models(folder, tmp_path / "rest")
    pipe = slipcast.pipeline(whole, device="cpu", dtype="bfloat16", companions=rest)
    plain = plain_pipeline(type(pipe), folder)
    kinds = [{role: type(model) for role, model in models_of(made).items()} for made in (pipe, plain)]
    assert kinds[0] == kinds[1]
    assert np.array_equal(picture(pipe), picture(plain))


@pytest.mark.parametrize("family", ["flux-1", "sd-1", "sd3", "sdxl"])
def test_in_float16_what_would_overflow_computes_in_float32_beside_it(family: str, folders: dict[str, Path]) -> None:
    pipe = slipcast.pipeline(folders[family], device="cpu", dtype="float16")
    dtypes = {role: slipcast.compute_dtype(model) for role, model in models_of(pipe).items()}
    assert dtypes["vae"] == torch.float32
    assert dtypes.get("unet", dtypes.get("transformer")) == torch.float16
    drawn, precise = picture(pipe), picture(slipcast.pipeline(folders[family], device="cpu", dtype="float32"))
    assert np.linalg.norm(drawn - precise) < 0.03 * np.linalg.norm(precise)
    image = (drawn[0] * 255).round().astype("uint8")
    again = generate(pipe, GenerationRequest("a seven", steps=2, image=Image.fromarray(image), strength=0.5))
    assert np.asarray(again.images[0]).std() > 0


@pytest.mark.parametrize("family", ["z-image", "sdxl"])
def test_a_denoiser_in_fp8_storage_draws_nearly_the_same(family: str, folders: dict[str, Path]) -> None:
    pipe = slipcast.pipeline(folders[family], device="cpu", dtype="bfloat16", fp8="storage")
    assert slipcast.status(pipe)["fp8"].engaged == "storage"
    record = pipeline_record(pipe)
    denoiser = record.plan.denoiser.role
    planned = {role: part.plan for role, part in record.plan.parts.items() if part.plan is not None}
    assert {role for role, plan in planned.items() if "fp8" in plan.precisions} == {denoiser}
    assert all(report.differences == () for report in record.reports.values())
    expected = picture(slipcast.pipeline(folders[family], device="cpu", dtype="bfloat16"))
    assert 0 < np.linalg.norm(picture(pipe) - expected) < 0.1 * np.linalg.norm(expected)


def test_a_cancelled_load_ends_in_the_part_that_it_is_in(folders: dict[str, Path]) -> None:
    seen: list[tuple[int, int]] = []
    plan = pipeline_record(slipcast.pipeline(folders["z-image"], device="cpu")).plan
    first = plan.denoiser.plan
    assert first is not None
    with pytest.raises(Cancelled):
        slipcast.pipeline(
            folders["z-image"],
            device="cpu",
            progress=lambda done, total: seen.append((done, total)),
            cancelled=lambda: seen[-1][0] > first.bytes.read,
        )
    total = sum(part.plan.bytes.read for part in plan.parts.values() if part.plan is not None)
    assert {end for _, end in seen} == {total}
    assert sorted(seen) == seen
    assert seen[-1][0] < total


def test_what_slipcast_did_not_make_has_no_status() -> None:
    with pytest.raises(CompanionError, match="that slipcast did not put together"):
        slipcast.status(object())


def test_of_two_experts_in_a_folder_both_are_loaded(tmp_path: Path) -> None:
    made = PIPELINES["wan"]()
    second = copy.deepcopy(made.transformer)
    with torch.no_grad():
        second.proj_out.weight.mul_(-1)
    kind = type(made)
    two = kind(**{**made.components, "transformer_2": second}, boundary_ratio=0.6)
    two.save_pretrained(tmp_path / "two")
    ours = slipcast.pipeline(tmp_path / "two", device="cpu", dtype="bfloat16")
    assert ours.config.boundary_ratio == 0.6
    assert torch.equal(ours.transformer_2.proj_out.weight, second.proj_out.weight)
    assert np.array_equal(picture(ours), picture(plain_pipeline(kind, tmp_path / "two")))


def test_what_a_folder_has_and_the_family_does_not_name_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders["sd-1"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    plan = pipeline_record(slipcast.pipeline(folder, device="cpu")).plan
    assert "it is not loaded" in plan.absent["safety_checker"]
