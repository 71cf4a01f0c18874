"""Whole pipelines on a GPU: every memory tier draws the same bits, and their peaks fall in order."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import slipcast
from slipcast.engine.policy.memory import TIERS, Tier, decide_memory
from slipcast.engine.policy.streaming import Streamer
from support.isolation import isolate
from support.tiny_pipelines import heavy_z_image, plain_pipeline, write_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose denoiser and text encoder are much larger than what they work on."""
    made = tmp_path_factory.mktemp("gpu") / "pipeline"
    heavy_z_image().save_pretrained(str(made))
    return made


def drawn(pipe: Any, output_type: str = "latent") -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a seven", "num_inference_steps": 2, "height": 64, "width": 64, "guidance_scale": 0.0}
    generator = torch.Generator().manual_seed(3)
    images = pipe(**call, generator=generator, output_type=output_type, return_dict=False)[0]
    return torch.as_tensor(images).detach().cpu()


def in_tier(tier: Tier, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The pipeline, placed in a tier whatever would fit."""
    with monkeypatch.context() as patch:
        patch.setattr("slipcast.engine.pipeline.policies.decide_memory", partial(decide_memory, placed=tier))
        return slipcast.pipeline(folder, device="cuda:0", dtype="bfloat16", **settings)


def released() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("settings", [{}, {"fp8": "storage", "text_encoder": "fp8"}, {"text_encoder": "nvfp4"}])
def test_every_tier_draws_the_same_bits_and_peaks_fall(
    settings: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[str, torch.Tensor] = {}
    peaks: dict[str, int] = {}
    drawn(in_tier("resident", folder, monkeypatch, **settings))  # what libraries keep for themselves
    for tier in TIERS:
        before = released()
        pipe = in_tier(tier, folder, monkeypatch, **settings)
        drawn(pipe)  # the first pass notes the order of the blocks
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for output_type in ("latent", "pt"):
            found = drawn(pipe, output_type)
            assert torch.isfinite(found).all()
            assert torch.equal(found, expected.setdefault(output_type, found)), (tier, output_type)
        peaks[tier] = torch.cuda.max_memory_allocated() - before
        assert slipcast.status(pipe)["memory"].engaged == tier
        del pipe
        assert released() <= before + 2**20, f"{tier} leaves something behind"
    print({tier: f"{peak / 2**20:.1f} MiB" for tier, peak in peaks.items()})
    assert peaks["resident"] > peaks["streamed"] > peaks["streamed_encoders"] >= peaks["whole_modules"]
    assert peaks["resident"] > peaks["in_turn"]


def test_streamed_blocks_are_two_at_a_time_however_far_the_host_is_ahead() -> None:
    width, count = 2048, 12
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))
    model = torch.nn.Sequential(*blocks).requires_grad_(False)
    holder = torch.nn.Module()
    holder.blocks, holder.forward = blocks, model.forward
    x = torch.randn(8192, width, device="cuda")
    expected = copy.deepcopy(model).to("cuda")(x)
    before = released()
    streamer = Streamer(holder, [f"blocks.{n}" for n in range(count)], torch.device("cuda"))
    block = streamer._units[0].nbytes
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        torch.cuda._sleep(50_000_000)  # the host enqueues all of it before the device begins
        found = holder(x)
        assert streamer.held_bytes == 0
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert torch.cuda.max_memory_allocated() - before <= 2 * block + 4 * x.nbytes
    assert all(parameter.device.type == "cpu" and parameter.is_pinned() for parameter in holder.parameters())


def test_codes_cross_the_bus_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = in_tier("whole_modules", folder, monkeypatch, fp8="storage", text_encoder="fp8")
    drawn(pipe)
    for model in (pipe.transformer, pipe.text_encoder):
        weights = [parameter for parameter in model.parameters() if parameter.dtype == torch.float8_e4m3fn]
        assert weights
        assert all(weight.device.type == "cpu" for weight in weights)


def test_speed_off_draws_what_diffusers_draws(folder: Path) -> None:
    ours = slipcast.pipeline(folder, device="cuda:0", dtype="bfloat16", speed="off")
    plain = plain_pipeline(type(ours), folder).to("cuda:0")
    assert torch.equal(drawn(ours, "pt"), drawn(plain, "pt"))


def test_speed_modes_draw_nearly_the_same_and_say_what_they_did(folder: Path) -> None:
    expected = drawn(slipcast.pipeline(folder, device="cuda:0", dtype="bfloat16"), "pt").float()
    flags = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    for speed, words in (("default", ("channels-last VAE", "compiled blocks")), ("max", ("TF32", "compiled blocks"))):
        pipe = slipcast.pipeline(folder, device="cuda:0", dtype="bfloat16", speed=speed)
        found = drawn(pipe, "pt").float()
        assert float((found - expected).norm() / expected.norm()) < 0.05
        assert all(word in slipcast.status(pipe)["speed"].engaged for word in words)
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == (speed == "max")
        del pipe
        released()
        assert flags == (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)


def test_every_family_draws_the_same_bits_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("flux-1", "sd3", "sdxl"):
        made = write_pipeline(family, tmp_path / family)
        expected = drawn(in_tier("resident", made, monkeypatch))
        for tier in ("in_turn", "whole_modules"):
            assert torch.equal(drawn(in_tier(tier, made, monkeypatch)), expected), (family, tier)
