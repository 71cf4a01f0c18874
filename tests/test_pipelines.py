"""Pipelines of every family against what diffusers builds of the same folder: the same picture, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import slipcast
from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in
from support.tiny_pipelines import PIPELINES, plain_pipeline, write_pipeline, write_single

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
