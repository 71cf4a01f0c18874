"""The trained models on a GPU: fp8 compute against the emulation on a CPU, tiers of memory, and how many digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from torch import nn

import slipcast
from slipcast.demo.prompted import NAMES, PIPELINE, draw, draw_prompt
from slipcast.demo.recognise import as_recognised, count_recognised, train_recogniser
from slipcast.demo.sampling import draw_noise, load_captions, sample
from slipcast.engine.pipeline.assemble import pipeline_record
from support.command_line import json_of
from support.isolation import isolate
from support.number_formats import relative_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEMO = Path(slipcast.__path__[0]) / "demo"
DIGITS = list(range(10)) * 20


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def loaded(device: str, fp8: str) -> nn.Module:
    return slipcast.load(DEMO / "digits.safetensors", device=device, dtype="bfloat16", fp8=fp8).model


def forward(model: nn.Module, device: str) -> torch.Tensor:
    captions = load_captions(DEMO / "captions.safetensors")
    latents = [image.unsqueeze(1) for image in draw_noise(4, seed=1).to(device, torch.bfloat16)]
    times = torch.tensor([0.1, 0.4, 0.7, 0.9], device=device, dtype=torch.bfloat16)
    texts = [captions[digit].to(device, torch.bfloat16) for digit in range(4)]
    with torch.no_grad():
        return torch.stack(model(latents, times, texts, return_dict=False)[0]).float().cpu()


def drawn(model: nn.Module, device: str) -> torch.Tensor:
    captions = load_captions(DEMO / "captions.safetensors").to(device)
    return sample(model, captions, DIGITS, seed=0, steps=8, compute_dtype=torch.bfloat16).cpu()


def test_a_gpu_computes_what_the_emulation_does() -> None:
    on_cpu, on_gpu = loaded("cpu", fp8="compute"), loaded("cuda:0", fp8="compute")
    one_forward = relative_l2(forward(on_gpu, "cuda:0"), forward(on_cpu, "cpu"))
    emulated, computed = drawn(on_cpu, "cpu"), drawn(on_gpu, "cuda:0")
    sampled = relative_l2(computed, emulated)
    plain = drawn(loaded("cuda:0", fp8="off"), "cuda:0")
    classifier = train_recogniser()
    counts = {
        name: count_recognised(classifier, images, DIGITS)
        for name, images in (("emulated", emulated), ("gpu", computed), ("bfloat16", plain))
    }
    print(f"\none forward {one_forward:.4f}, sampled {sampled:.4f}, recognised of 200: {counts}")
    assert one_forward <= 0.025
    assert sampled <= 0.035
    assert abs(counts["gpu"] - counts["bfloat16"]) <= 2
    assert abs(counts["emulated"] - counts["bfloat16"]) <= 2


@pytest.mark.parametrize("fp8", ["storage", "compute"])
def test_streaming_half_of_the_blocks_changes_no_bit(fp8: str) -> None:
    resident, streamed = loaded("cuda:0", fp8=fp8), loaded("cuda:0", fp8=fp8)
    blocks = list(streamed.get_submodule("layers").children())
    for block in blocks[: len(blocks) // 2]:
        block.to("cpu")
        block.register_forward_pre_hook(lambda module, _: module.to("cuda:0") and None)
        block.register_forward_hook(lambda module, _, __: module.to("cpu") and None)
    assert torch.equal(forward(streamed, "cuda:0"), forward(resident, "cuda:0"))
    assert next(blocks[0].parameters()).device.type == "cpu"


# --- the pipeline -----------------------------------------------------------------------------------------------------

PROMPTS = [NAMES[digit] for digit in DIGITS]


def pipeline(**settings: Any) -> Any:
    return slipcast.pipeline(PIPELINE, device="cuda:0", dtype="bfloat16", **settings)


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    """The 200 pictures in bfloat16."""
    return draw(pipeline(), PROMPTS, seed=0)


def recognised(pictures: torch.Tensor) -> int:
    return count_recognised(train_recogniser(), as_recognised(pictures), DIGITS)


def test_prompts_are_recognised(plain: torch.Tensor) -> None:
    print(f"\nrecognised of 200: {recognised(plain)}")
    assert recognised(plain) >= 190


@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        ({"fp8": "storage"}, 4),
        ({"fp8": "compute"}, 4),
        ({"text_encoder": "fp8"}, 4),
        ({"fp8": "storage", "text_encoder": "fp8"}, 4),
        ({"text_encoder": "nvfp4"}, 10),
        ({"speed": "default", "fp8": "storage"}, 4),
        ({"speed": "max"}, 4),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_settings_change_how_many_are_recognised_by_little(
    plain: torch.Tensor, settings: dict[str, str], apart: int
) -> None:
    pictures = draw(pipeline(**settings), PROMPTS, seed=0)
    print(f"\n{settings}: recognised {recognised(pictures)}, relative L2 {relative_l2(pictures, plain):.4f}")
    assert abs(recognised(pictures) - recognised(plain)) <= apart


def test_speed_off_draws_what_diffusers_draws(plain: torch.Tensor) -> None:
    own = ZImagePipeline.from_pretrained(PIPELINE, dtype=torch.bfloat16).to("cuda:0")
    assert torch.equal(draw(pipeline(speed="off"), PROMPTS, seed=0), draw(own, PROMPTS, seed=0))


@pytest.mark.parametrize("memory", ["balanced", "low"])
@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_tiers_of_memory_change_no_bit(memory: str, fp8: str) -> None:
    pipe = pipeline(memory=memory, fp8=fp8)
    status = slipcast.status(pipe)["memory"]
    assert status.engaged != "resident", status.reason
    names = list(NAMES)
    assert torch.equal(draw(pipe, names, seed=1), draw(pipeline(memory="fast", fp8=fp8), names, seed=1))


def test_a_cpu_and_a_gpu_draw_alike() -> None:
    on_gpu = draw_prompt("seven", {"device": "cuda:0", "dtype": "float32"}, seed=2)
    on_cpu = draw_prompt("seven", {"device": "cpu", "dtype": "float32"}, seed=2)
    assert on_gpu.digit == on_cpu.digit == 7
    assert relative_l2(on_gpu.picture, on_cpu.picture) < 0.01


def test_bench_measures_the_device(tmp_path: Path) -> None:
    asked = ("--device", "cuda:0", "--iterations", "3")
    drawn = ("--prompt", "seven", "--size", "64x64", "--steps", "4", "--guidance", "0")
    facts = json_of("bench", PIPELINE, *drawn, *asked, "--save", tmp_path / "reference.json")
    weights = pipeline_record(pipeline()).plan.nbytes
    assert facts["peak_of"] == "device"
    assert facts["machine"] == torch.cuda.get_device_name(0)
    assert weights < facts["peak_bytes"] < weights + 2**28
    again = json_of("bench", PIPELINE, *asked, "--against", tmp_path / "reference.json", "--min-psnr", "60")
    assert again["regressions"] == []
