"""The demonstration's model in each format that can be written: digits that it draws are still recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import slipcast
from slipcast.demo.recognise import count_recognised, train_recogniser
from slipcast.demo.run import CAPTIONS_FILE, CHECKPOINT, SAMPLES
from slipcast.demo.sampling import STEPS, load_captions, sample
from support.conversions import converted
from support.fp8_compute import fp8_of, multiplying
from support.isolation import isolate

FEWER = {"nvfp4": 6}
"""How many of 200 digits fewer may be recognised; of formats of 8 bits 2."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _recognised(path: Path, **settings: str) -> int:
    """How many digits of 200 are recognised that a checkpoint draws from the noise of seed 0."""
    loaded = slipcast.load(path, **settings)
    assert loaded.report.differences == ()
    assert bool(multiplying(loaded.report.plan)) is ("fp8" in settings)
    digits = tuple(index % 10 for index in range(SAMPLES))
    dtype = slipcast.compute_dtype(loaded.model)
    with torch.no_grad():
        images = sample(
            loaded.model, load_captions(CAPTIONS_FILE), digits, seed=0, steps=STEPS, compute_dtype=dtype, batch=100
        )
    return count_recognised(train_recogniser(), images, digits)


@pytest.fixture(scope="module")
def unquantised() -> int:
    return _recognised(CHECKPOINT)


@pytest.mark.parametrize("format_", ["fp8_scaled", "mxfp8", "nvfp4", "int8", "int8_convrot"])
def test_digits_are_recognised(tmp_path: Path, unquantised: int, format_: str) -> None:
    converted(CHECKPOINT, tmp_path / "digits.safetensors", format=format_)
    recognised = _recognised(tmp_path / "digits.safetensors")
    print(f"{format_}: {recognised} of {SAMPLES}, unquantised {unquantised}")
    assert recognised >= unquantised - FEWER.get(format_, 2)


def test_digits_are_recognised_in_fp8_compute(unquantised: int) -> None:
    """On a processor its numbers are emulated."""
    recognised = _recognised(CHECKPOINT, fp8=fp8_of("compute"))
    print(f"fp8 compute: {recognised} of {SAMPLES}, unquantised {unquantised}")
    assert recognised >= unquantised - 2
