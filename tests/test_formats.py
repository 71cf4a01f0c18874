"""Checkpoints of every format, loaded: each weight is what an independent decoder says, kept or dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipcast
from slipcast.engine.layers import QuantisedModule
from support.fp8_compute import fp8_of, multiplying
from support.isolation import isolate
from support.quantised_cases import CASES, CONFIGS, ROW, TENSOR, draw_file, is_close, promised_codecs


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _held_bytes(model: nn.Module) -> int:
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def _check_forward(model: nn.Module, config: Mapping[str, Any]) -> None:
    dtype = slipcast.compute_dtype(model)
    latents = [torch.randn(config["in_channels"], 1, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)]
    captions = [torch.randn(5, config["cap_feat_dim"], generator=torch.Generator().manual_seed(1)).to(dtype)]
    with torch.no_grad():
        (output,) = model(latents, torch.tensor([0.3]), captions, return_dict=False)[0]
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_dequantised(tmp_path: Path, name: str, config: str) -> None:
    case = CASES[name]
    file = draw_file(case, config)
    path = file.write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    formats = dict(slipcast.inspect(path).formats)
    assert formats.pop("plain") > 20
    assert formats == {case.format: len(file.values)}
    expected = file.expected()
    for mmap, threads in ((True, 1), (False, 3)):
        loaded = slipcast.load(path, device="cpu", dtype="float32", fp8="off", mmap=mmap, threads=threads)
        _check_report(loaded)
        held = loaded.model.state_dict()
        assert held.keys() == expected.keys()
        assert [key for key, tensor in expected.items() if not is_close(held[key], tensor)] == []
        assert {tensor.dtype for tensor in held.values()} == {torch.float32}
    assert loaded.report.plan.folded.keys() == set(file.values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_resident_bytes_are_predicted(tmp_path: Path, name: str, dtype: str) -> None:
    """In each precision that can be asked for, to the byte."""
    case = CASES[name]
    path = draw_file(case, "uneven").write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    for mode in ("auto", "off", "storage", "compute"):
        for remainder in ("keep", "quantise"):
            settings = fp8_of(mode, remainder=remainder, hints="ignore")  # one case is marked for full precision
            loaded = slipcast.load(path, device="cpu", dtype=dtype, fp8=settings)
            _check_report(loaded)
            if mode == "compute" and case.codec in (TENSOR, ROW):
                assert multiplying(loaded.report.plan)
            resident = loaded.report.resident
            print(f"{name}, {dtype}, {mode}, {remainder}: {loaded.report.plan.bytes.resident} predicted, {resident}")


def _check_report(loaded: slipcast.Loaded) -> None:
    assert loaded.report.differences == ()
    assert loaded.report.plan.bytes.resident == loaded.report.resident == _held_bytes(loaded.model)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_kept(tmp_path: Path, name: str, config: str) -> None:
    case = CASES[name]
    file = draw_file(case, config)
    path = file.write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra, prefix="diffusion_model.")
    expected = file.expected()
    for mmap, threads in ((True, 1), (False, 3)):
        loaded = slipcast.load(path, device="cpu", dtype="float32", mmap=mmap, threads=threads)
        _check_report(loaded)
        layers = {key: module for key, module in loaded.model.named_modules() if isinstance(module, QuantisedModule)}
        held = dict(loaded.model.named_parameters())
        for key, tensor in expected.items():
            layer = layers.get(key.removesuffix(".weight"))
            assert is_close(held[key] if layer is None else layer.dequantised_weight(), tensor), key
        codecs = {key: module.codec.name for key, module in layers.items()}
        assert codecs == promised_codecs(case, file)
    _check_forward(loaded.model, CONFIGS[config])
