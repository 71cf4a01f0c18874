"""Pipelines of every family against what diffusers builds of the same folder: the same picture, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slipcast
from support.tiny_pipelines import PIPELINES, write_pipeline

FAMILIES = sorted(PIPELINES)
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_pipeline(family, tmp_path_factory.mktemp(family) / "pipeline") for family in FAMILIES}


def picture(pipe: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    images: np.ndarray = pipe("a seven", generator=torch.Generator().manual_seed(3), **CALL).images
    return images


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_a_single_file_draw_what_diffusers_draws(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[family]
    ours = slipcast.pipeline(folder, device="cpu", dtype="bfloat16")
    plain = type(ours).from_pretrained(folder, dtype=torch.bfloat16)
    expected = picture(plain)
    assert expected.std() > 0.05
    assert np.array_equal(picture(ours), expected)
    single = tmp_path / "model.safetensors"
    slipcast.convert(folder, single, layout="native")
    assert np.array_equal(
        picture(slipcast.pipeline(single, device="cpu", dtype="bfloat16", companions=folder)), expected
    )
