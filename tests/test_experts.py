"""Pipelines of two denoisers, each from a file of its own, against diffusers' pipeline of both."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import slipcast
from slipcast.engine.pipeline.assemble import pipeline_record
from slipcast.engine.pipeline.policies import policy_parts
from slipcast.engine.policy.memory import peak_of
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import CompanionError
from slipcast.registry.experts import expert_of, is_twin
from support.tiny_pipelines import PIPELINES, plain_pipeline

HIGH, LOW = "wan2.2_t2v_high_noise_14B_bf16.safetensors", "wan2.2_t2v_low_noise_14B_bf16.safetensors"
SAMPLING = load_catalogue()["wan"].variants["t2v-a14b"].sampling


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder with both."""
    made = PIPELINES["wan"]()
    second = copy.deepcopy(made.transformer)
    with torch.no_grad():
        second.proj_out.weight.mul_(-1)
    folder = tmp_path_factory.mktemp("experts") / "published"
    type(made)(**{**made.components, "transformer_2": second}, boundary_ratio=0.875).save_pretrained(folder)
    return folder


@pytest.fixture
def files(published: Path, tmp_path: Path) -> Path:
    """A folder with one file of each, and the other parts in a folder of theirs."""
    (tmp_path / "models").mkdir()
    slipcast.convert(published / "transformer", tmp_path / "models" / HIGH, layout="native")
    slipcast.convert(published / "transformer_2", tmp_path / "models" / LOW, layout="native")
    for role in ("text_encoder", "vae", "tokenizer", "scheduler"):
        shutil.copytree(published / role, tmp_path / "others" / role)
    return tmp_path / "models"


def video(pipe: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a seven", "num_inference_steps": 4, "height": 32, "width": 32, "num_frames": 5}
    frames: np.ndarray = pipe(**call, generator=torch.Generator().manual_seed(3), output_type="np").frames
    return frames


def loaded(path: Path, **settings: Any) -> Any:
    companions = {"folder": str(path.parents[1] / "others"), **settings.pop("companions", {})}
    return slipcast.pipeline(path, device="cpu", companions=companions, speed="off", **settings)


def test_two_files_draw_what_diffusers_draws_with_both(published: Path, files: Path) -> None:
    plain = plain_pipeline(diffusers.WanPipeline, published)
    expected = video(plain)
    ours = loaded(files / HIGH)
    assert type(ours) is diffusers.WanPipeline
    assert ours.config.boundary_ratio == 0.875
    assert np.array_equal(video(ours), expected)
    plain.transformer_2 = plain.transformer
    assert not np.array_equal(video(plain), expected), "both take part"
    elsewhere = files.parent / "elsewhere.safetensors"
    (files / LOW).rename(elsewhere)
    with pytest.raises(CompanionError, match="transformer_2"):
        loaded(files / HIGH)
    assert np.array_equal(video(loaded(files / HIGH, companions={"transformer_2": str(elsewhere)})), expected)


def test_each_has_a_precision_of_its_own_and_memory_counts_both(files: Path) -> None:
    quantised = files / LOW.replace("bf16", "fp8_scaled")
    slipcast.convert(files / LOW, quantised, layout="native", format="fp8_scaled")
    (files / LOW).unlink()
    record = pipeline_record(loaded(files / HIGH, mmap=False))
    parts = record.plan.parts
    precisions = {role: set(plan.precisions) for role in ("transformer", "transformer_2") if (plan := parts[role].plan)}
    assert "fp8" in precisions["transformer_2"]
    assert "fp8" not in precisions["transformer"]
    known = policy_parts(parts, record.plan.found.sampling, ImageSize(32, 32))
    first, second = (part for part in known if part.role in ("transformer", "transformer_2"))
    assert first.kind == second.kind == "denoiser"
    assert first.block_bytes
    assert second.block_bytes
    assert 0 < second.weight_bytes < first.weight_bytes
    without = tuple(part for part in known if part is not second)
    assert peak_of("resident", known) >= peak_of("resident", without) + second.weight_bytes


def test_the_wrong_order_and_one_file_for_both_are_refused(files: Path) -> None:
    with pytest.raises(CompanionError) as refusal:
        loaded(files / LOW)
    assert "as the transformer" in refusal.value.found
    assert "by its name the transformer_2" in refusal.value.found
    assert "begin from the transformer, and name the other by companions.transformer_2" in refusal.value.hint
    with pytest.raises(CompanionError, match=r"as the transformer_2: .* by its name the transformer"):
        loaded(files / HIGH, companions={"transformer_2": str(files / HIGH)})
    unnamed = files / "wan2.2.safetensors"
    os.link(files / HIGH, unnamed)
    for other in (unnamed, files / "link.safetensors"):
        if not other.exists():
            other.symlink_to(unnamed)
        with pytest.raises(CompanionError, match="one file as the transformer and as the transformer_2"):
            loaded(unnamed, companions={"transformer_2": str(other)})


def test_of_several_files_beside_the_one_of_the_same_name_is_taken(files: Path) -> None:
    for name in ("wan2.2_t2v_low_noise_14B_other.safetensors", "wan2.2_t2v_high_noise_14B_other.safetensors"):
        shutil.copy(files / LOW, files / name)
    record = pipeline_record(loaded(files / HIGH))
    assert record.plan.parts["transformer_2"].companion.path == files / LOW
    (files / LOW).rename(files / "wan2.2_t2v_low_noise_14B_third.safetensors")
    with pytest.raises(CompanionError, match="2 files that could be the transformer_2"):
        loaded(files / HIGH)


@pytest.mark.parametrize(
    ("high", "low"),
    [
        (HIGH, LOW),
        ("Wan2.2-T2V-A14B-HighNoise-Q4_K_M.gguf", "Wan2.2-T2V-A14B-LowNoise-Q4_K_M.gguf"),
        (
            "Wan2_2-T2V-A14B_HIGH_fp8_e4m3fn_scaled_KJ.safetensors",
            "Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ.safetensors",
        ),
        ("high_noise_model", "low_noise_model"),
    ],
)
def test_published_names_say_which_is_which(high: str, low: str) -> None:
    assert expert_of(Path(high), SAMPLING) == "transformer"
    assert expert_of(Path(low), SAMPLING) == "transformer_2"
    assert is_twin(Path(high), Path(low), SAMPLING)
    assert not is_twin(Path(high), Path(f"x{low}"), SAMPLING)


@pytest.mark.parametrize("name", ["wan.safetensors", "high_noise_low_noise.gguf", "highlow"])
def test_other_names_say_nothing(name: str) -> None:
    assert expert_of(Path(name), SAMPLING) is None
