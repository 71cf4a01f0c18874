"""Checkpoints of every format on a GPU: what is kept there, and what is decoded there, is what the CPU has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import slipcast
from slipcast.engine.layers import QuantisedModule
from support.isolation import isolate
from support.quantised_cases import CASES, CONFIGS, draw_file, is_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.mark.parametrize("chunk_mib", [4, 1])
@pytest.mark.parametrize("fp8", ["auto", "off"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_holds_what_the_cpu_holds(tmp_path: Path, name: str, config: str, fp8: str, chunk_mib: int) -> None:
    case = CASES[name]
    path = draw_file(case, config).write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    for dtype in ("float32", "bfloat16"):
        settings = {"dtype": dtype, "fp8": fp8, "chunk_mib": chunk_mib}
        here, there = (slipcast.load(path, device=device, **settings) for device in ("cpu", "cuda"))
        assert there.report.differences == ()
        assert there.report.resident == there.report.plan.bytes.resident == here.report.resident
        assert _peak(there) <= there.report.plan.bytes.device_peak + _SLACK
        state = there.model.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cuda"}
        rotated = "rotated" in name  # sums of many products, which a GPU adds in another order
        held = here.model.state_dict()
        assert [key for key, tensor in held.items() if not _is_same(state[key], tensor, rotated)] == []
        for path_, module in there.model.named_modules():
            if isinstance(module, QuantisedModule):
                other: QuantisedModule = here.model.get_submodule(path_)  # type: ignore[assignment]
                assert is_close(module.dequantised_weight().cpu(), other.dequantised_weight().float()), path_
        _check_forward(there.model, CONFIGS[config])


_SLACK = 8 * 2**20
"""CUDA's allocator takes memory in blocks of 2 MiB, for small and for large tensors apart."""


def _peak(loaded: slipcast.Loaded) -> int:
    return loaded.report.device_peak or 0


def _is_same(there: torch.Tensor, here: torch.Tensor, rotated: bool) -> bool:
    there, here = there.detach().cpu(), here.detach()
    if (there.dtype, there.shape) != (here.dtype, here.shape):
        return False
    if here.dtype.itemsize == 1:
        return torch.equal(there.view(torch.uint8), here.view(torch.uint8))
    if here.dtype == torch.float32:
        return is_close(there, here)
    if rotated:
        return float((there.float() - here.float()).norm()) <= 2**-9 * float(here.float().norm())
    return torch.equal(there, here)


def _check_forward(model: torch.nn.Module, config: Mapping[str, Any]) -> None:
    dtype = slipcast.compute_dtype(model)
    latents = [torch.randn(config["in_channels"], 1, 4, 4, dtype=dtype, device="cuda")]
    captions = [torch.randn(5, config["cap_feat_dim"], dtype=dtype, device="cuda")]
    with torch.no_grad():
        (output,) = model(latents, torch.tensor([0.3], device="cuda"), captions, return_dict=False)[0]
    assert torch.isfinite(output).all()
