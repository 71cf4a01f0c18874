"""The trained model in fp8 compute: a GPU against the emulation on a CPU, and streamed against resident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import slipcast
from slipcast.demo.recognise import count_recognised, train_recogniser
from slipcast.demo.sampling import draw_noise, load_captions, sample
from support.fp8_compute import fp8_of, multiplying
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
    result = slipcast.load(DEMO / "digits.safetensors", device=device, dtype="bfloat16", fp8=fp8_of(fp8))
    assert bool(multiplying(result.report.plan)) is (fp8 == "compute")
    return result.model


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
