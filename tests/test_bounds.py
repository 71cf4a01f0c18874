"""Configurations by which a class would take memory beyond reason: each is refused before it is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipcast
from slipcast.engine.bounds import BoundedResults, TooLargeError, refuse_large_tables
from slipcast.engine.build import build_on_meta
from slipcast.registry.errors import ConfigError
from support.tiny_pipelines import write_pipeline

GIB = 1 << 30


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for family in ("wan", "z-image", "sd-1"):
        write_pipeline(family, folder / family)
    return folder


def refused(model: Path, key: str, value: Any) -> ConfigError:
    config = model / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), key: value}))
    try:
        with pytest.raises(ConfigError) as caught:
            slipcast.plan(model, device="cpu")
    finally:
        config.write_text(before)
    return caught.value


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("wan", "rope_max_seq_len", 10**9),
        ("z-image", "axes_lens", [10**12, 512, 512]),
        ("z-image", "axes_lens", [1536, -(10**12), 512]),
    ],
)
def test_numbers_beyond_reason_are_refused(originals: Path, family: str, key: str, value: Any) -> None:
    error = refused(originals / family / "transformer", key, value)
    assert f"{key}: {value}" in error.items
    assert "1,048,576" in error.expected


@pytest.mark.parametrize(
    ("part", "key"),
    [("sd-1/unet", "layers_per_block"), ("sd-1/unet", "transformer_layers_per_block"), ("wan/vae", "num_res_blocks")],
)
def test_layers_beyond_reason_are_refused_before_all_are_made(originals: Path, part: str, key: str) -> None:
    error = refused(originals / part, key, 1_000_000)
    assert "makes more than 32,768 tensors" in error.found
    assert f"{key}: 1000000" in error.items


def test_a_base_of_angles_counts_nothing(originals: Path) -> None:
    config = json.loads((originals / "z-image" / "transformer" / "config.json").read_text())
    own = {key: value for key, value in config.items() if not key.startswith("_")}
    build_on_meta("diffusers.ZImageTransformer2DModel", {**own, "rope_theta": 10**7})


def test_tables_out_of_proportion_are_refused_with_what_makes_them(originals: Path) -> None:
    error = refused(originals / "wan" / "transformer", "rope_max_seq_len", 1 << 20)
    assert "tables of" in error.found or "would take" in error.found
    assert any("rope_max_seq_len" in item and str(1 << 20) in item for item in error.items)


class Tables(nn.Module):
    """A table in a buffer that is not stored, one in an attribute, one in a state dict, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(GIB // 4))
        self.register_buffer("stored", torch.empty(GIB // 4))
        self.register_buffer("made", torch.empty(100 << 18), persistent=False)
        self.kept = [torch.empty(500 << 18)]


def test_only_what_the_class_computes_counts() -> None:
    with torch.device("meta"):
        model = Tables()
    with pytest.raises(ConfigError) as caught:
        refuse_large_tables(model, 1000, Path("model"), {"length": 7, "flag": True})
    assert caught.value.found.endswith(f"{600 << 20:,} bytes")
    assert caught.value.items == (f"kept.0: {500 << 20:,} bytes", f"made: {100 << 20:,} bytes", "length is 7")
    refuse_large_tables(model, 1200 << 20, Path("model"), {})


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.arange(0, 10**12),
        lambda: torch.ones(10**6, 10**6),
        lambda: torch.zeros(10**12, device="cpu"),
        lambda: torch.outer(torch.arange(10**6), torch.arange(10**6)),
        lambda: torch.arange(1000).repeat(10**9),
        lambda: torch.linspace(0, 1, 10**12, device="meta"),
        lambda: torch.cat([torch.arange(10**3).expand(10**9, 1000)] * 2),
    ],
)
def test_no_step_takes_more_than_its_bound(compute: Any) -> None:
    with BoundedResults(), pytest.raises(TooLargeError, match="would take"):
        compute()


def test_parameters_have_no_bound_and_values_stay_what_they_are() -> None:
    with BoundedResults():
        with torch.device("meta"):
            assert nn.Linear(10**6, 10**6).weight.shape == (10**6, 10**6)
        assert torch.arange(4).outer(torch.arange(3.0)).tolist()[3] == [0.0, 3.0, 6.0]
        assert torch.polar(torch.ones(2), torch.zeros(2)).tolist() == [1, 1]
        assert torch.ones(3).split(2)[1].tolist() == [1.0]
