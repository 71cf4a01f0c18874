"""Loads to a GPU against loads to the CPU: equal bits, the memory that the plan predicts, and a close forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipcast
from slipcast.demo.sampling import draw_noise, load_captions
from slipcast.engine.driver_pool import DriverPool
from slipcast.engine.loader import execute
from slipcast.engine.prefetch import prefetch_obstacle
from slipcast.registry.errors import HeaderError
from slipcast.registry.inspection import identify_path
from slipcast.registry.settings import resolve_settings
from support.fp8_checkpoints import KEPT, QUANTISED, Scaled, fp8_file
from support.isolation import isolate
from support.number_formats import bytes_of, relative_l2
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEMO = Path(slipcast.__path__[0]) / "demo"
MIB = 2**20


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _bits(model: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (tensor.dtype, bytes_of(tensor).tobytes()) for name, tensor in model.state_dict().items()}


def _sources(tmp_path: Path) -> dict[str, Path]:
    tensors = tiny_tensors()
    scaled = fp8_file(tensors, QUANTISED[::2], Scaled(""))
    for layer in (*QUANTISED[1::2], *KEPT):
        scaled.scale_layer(layer, Scaled("N", "old"))
    blocks = fp8_file(tensors, QUANTISED, Scaled("NB1"))
    raw = fp8_file(tensors)
    for name in list(raw.native):
        raw.cast(name)
    return {
        "plain": write_native(tmp_path / "plain.safetensors", tensors, prefix="model.diffusion_model."),
        "scaled": scaled.write(tmp_path / "scaled.safetensors"),
        "blocks": blocks.write(tmp_path / "blocks.safetensors"),
        "raw": raw.write(tmp_path / "raw.safetensors"),
        "demo": DEMO / "digits.safetensors",
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fp8", ["auto", "off", "storage"])
@pytest.mark.parametrize("source", ["plain", "scaled", "blocks", "raw", "demo"])
def test_a_load_to_a_gpu_has_the_bits_of_one_to_the_cpu(tmp_path: Path, source: str, fp8: str, dtype: str) -> None:
    path = _sources(tmp_path)[source]
    on_cpu = slipcast.load(path, device="cpu", fp8=fp8, dtype=dtype)
    on_gpu = slipcast.load(path, device="cuda:0", fp8=fp8, dtype=dtype)
    assert on_gpu.report.differences == ()
    assert {tensor.device.type for tensor in (*on_gpu.model.parameters(), *on_gpu.model.buffers())} == {"cuda"}
    assert _bits(on_gpu.model) == _bits(on_cpu.model)
    assert on_gpu.report.resident == on_cpu.report.resident
    assert on_gpu.report.plan.settings["mmap"].engaged == "false"
    assert on_gpu.report.plan.modules == on_cpu.report.plan.modules


@pytest.mark.parametrize("chunk_mib", [1, 4])
@pytest.mark.parametrize("fp8", ["auto", "off", "storage"])
@pytest.mark.parametrize("source", ["plain", "scaled", "blocks", "raw", "demo"])
def test_device_memory_is_at_most_what_was_predicted(tmp_path: Path, source: str, fp8: str, chunk_mib: int) -> None:
    path = _sources(tmp_path)[source]
    settings: dict[str, Any] = {"device": "cuda:0", "fp8": fp8, "dtype": "bfloat16", "chunk_mib": chunk_mib}
    slipcast.load(path, **settings)  # what libraries allocate once is no part of a load
    loaded = slipcast.load(path, **settings)
    assert loaded.report.device_peak is not None
    assert loaded.report.resident <= loaded.report.device_peak <= loaded.report.plan.bytes.device_peak


READERS = [
    "slabs",
    pytest.param(
        "prefetch", marks=pytest.mark.skipif(prefetch_obstacle() is not None, reason=str(prefetch_obstacle()))
    ),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fp8", ["auto", "off", "storage"])
@pytest.mark.parametrize("source", ["plain", "scaled", "blocks", "raw", "demo"])
def test_every_reader_brings_the_same_bits_within_its_prediction(
    tmp_path: Path, source: str, fp8: str, reader: str
) -> None:
    path = _sources(tmp_path)[source]
    expected = _bits(slipcast.load(path, device="cpu", fp8=fp8, dtype="bfloat16").model)
    for chosen in ({}, {"chunk_mib": 1, "ahead_mib": 1, "threads": 2}):
        loaded = slipcast.load(path, device="cuda:0", fp8=fp8, dtype="bfloat16", reader=reader, **chosen)
        assert _bits(loaded.model) == expected
        report = loaded.report
        assert report.plan.settings["reader"].engaged == reader
        assert report.device_peak is not None
        assert report.device_peak <= report.plan.bytes.device_peak
    pool = DriverPool(0)
    assert pool.used == 0
    assert pool.reserved == 0


@pytest.mark.parametrize("reader", READERS)
def test_a_load_takes_a_small_part_of_the_file_beside_the_result(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "m.safetensors"
    write_checkpoint(recorded("z-image-turbo--comfy-bf16"), path, fill="zero", blocks=4)
    settings: dict[str, Any] = {"device": "cuda:0", "fp8": "storage", "reader": reader, "ahead_mib": 64, "chunk_mib": 8}
    loaded = slipcast.load(path, **settings)
    report, planned = loaded.report, loaded.report.plan.bytes
    assert report.device_peak is not None
    assert report.resident + 32 * MIB < report.device_peak <= planned.device_peak < report.resident + 224 * MIB
    assert report.host_peak_anonymous is not None
    assert report.host_peak_anonymous <= planned.host_peak_anonymous + 64 * MIB


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("after", [1, 9])
def test_a_cancelled_load_leaves_no_memory_on_the_device(tmp_path: Path, reader: str, after: int) -> None:
    path = _sources(tmp_path)["demo"]
    before = torch.cuda.memory_allocated()
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == after

    with pytest.raises(slipcast.SlipcastError) as caught:
        slipcast.load(path, device="cuda:0", dtype="float32", reader=reader, ahead_mib=1, cancelled=cancelled)
    assert "cancelled" in caught.value.found
    assert torch.cuda.memory_allocated() - before < MIB
    del caught
    assert DriverPool(0).used == 0


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_truncated_after_its_header_was_read_is_refused(tmp_path: Path, reader: str) -> None:
    path = _sources(tmp_path)["plain"]
    plan = slipcast.plan(path, device="cuda:0", reader=reader)
    header = identify_path(path, resolve_settings().values).main.header
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(HeaderError):
        execute(plan, header)
    assert DriverPool(0).used == 0


def _velocity(model: nn.Module, device: str) -> torch.Tensor:
    dtype = slipcast.compute_dtype(model)
    captions = load_captions(DEMO / "captions.safetensors").to(device, dtype)
    latents = [one[:, None].to(device, dtype) for one in draw_noise(2, seed=3)]
    with torch.no_grad():
        out = model(latents, torch.tensor([0.1, 0.9], device=device), [captions[4], captions[7]], return_dict=False)[0]
    return torch.stack([one.float() for one in out]).cpu()


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"dtype": "float32", "fp8": "off"}, 1e-3),
        ({"dtype": "bfloat16", "fp8": "off"}, 0.01),
        ({"dtype": "float32", "fp8": "storage"}, 0.02),
        ({"dtype": "bfloat16", "fp8": "storage"}, 0.02),
    ],
)
def test_a_forward_on_a_gpu_is_close_to_float32(settings: dict[str, str], bound: float) -> None:
    path = DEMO / "digits.safetensors"
    expected = _velocity(slipcast.load(path, device="cpu", dtype="float32", fp8="off").model, "cpu")
    model = slipcast.load(path, device="cuda:0", **settings).model
    assert model.dtype == getattr(torch, settings["dtype"])
    assert relative_l2(_velocity(model, "cuda:0"), expected) < bound


def test_auto_means_the_current_gpu() -> None:
    plan = slipcast.plan(DEMO / "digits.safetensors")
    assert plan.device == f"cuda:{torch.cuda.current_device()}"
    assert plan.settings["device"].requested == "auto"
    assert plan.verdict is not None
    assert plan.verdict.fits
    properties = torch.cuda.get_device_properties(0)
    assert plan.verdict.available == properties.total_memory - max(512 * MIB, properties.total_memory // 20)


def test_a_model_moves_between_devices_with_its_bits(tmp_path: Path) -> None:
    model = slipcast.load(_sources(tmp_path)["scaled"], device="cuda:0", dtype="bfloat16").model
    before = _bits(model)
    assert _bits(model.to("cpu")) == before
    assert _bits(model.to("cuda:0")) == before
