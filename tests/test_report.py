"""The report of a load: what is said where the outcome is not what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipcast
from slipcast.engine.devices import resolve_device
from slipcast.engine.measure import Peaks, anonymous_bytes, count_bytes
from slipcast.engine.report import Report, make_report
from support.isolation import isolate
from support.tiny_z_image import tiny_tensors, write_native


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def loaded(tmp_path: Path) -> slipcast.Loaded:
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    return slipcast.load(path, device="cpu", dtype="bfloat16", fp8="storage")


def _report_on(loaded: slipcast.Loaded) -> Report:
    device, _ = resolve_device("cpu")
    with Peaks(device) as peaks:
        pass
    return make_report(loaded.report.plan, loaded.model, peaks)


def test_a_load_that_kept_its_word_has_no_differences(loaded: slipcast.Loaded) -> None:
    assert _report_on(loaded).differences == ()


def test_what_is_there_and_was_not_planned(loaded: slipcast.Loaded) -> None:
    loaded.model.register_buffer("table", torch.ones(3))
    report = _report_on(loaded)
    planned = loaded.report.plan.bytes.resident
    assert report.differences == (
        f"{planned:,} bytes were predicted, {planned + 12:,} are resident",
        "table is there and was not planned",
    )
    assert report.to_dict()["differences"] == list(report.differences)
    assert report.to_dict()["actual_bytes"] == planned + 12


def test_what_was_planned_and_is_not_there(loaded: slipcast.Loaded) -> None:
    model: Any = loaded.model
    del model.layers[0].attention.to_q.weight_scale
    model.x_pad_token = nn.Parameter(model.x_pad_token.detach().float())
    differences = _report_on(loaded).differences
    assert "layers.0.attention.to_q.weight_scale: float32 [64] was planned, nothing is there" in differences
    assert "x_pad_token: bfloat16 [1, 64] was planned, float32 [1, 64] is there" in differences
    assert differences[0].endswith("are resident")
    assert len(differences) == 3


def test_each_tensor_is_counted_once_whatever_its_names() -> None:
    model = nn.Module()
    model.a = nn.Linear(4, 4, bias=False)
    model.b = nn.Linear(4, 4, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("kept", torch.ones(5, dtype=torch.int8))
    model.register_buffer("computed", torch.ones(3, dtype=torch.bfloat16), persistent=False)
    assert count_bytes(model) == 64 + 5 + 6


@pytest.mark.skipif(anonymous_bytes() is None, reason="the system does not say")
def test_a_peak_is_seen_although_it_is_gone_at_the_end() -> None:
    device, _ = resolve_device("cpu")
    with Peaks(device) as peaks:
        block = torch.ones(20_000_000)
        for _ in range(5):
            block.add_(1)
        del block
    assert peaks.host_anonymous is not None
    assert 70e6 < peaks.host_anonymous < 120e6
    assert peaks.device is None
    assert peaks.seconds > 0
