"""Scales that can't be and codes that are no numbers: refused or noted while they are read, in every format."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import slipcast
from slipcast.registry.errors import QuantisationError
from support.command_line import output_of, run
from support.conversions import converted
from support.fp8_compute import fp8_of
from support.isolation import isolate
from support.quantised_cases import CASES, draw_file
from support.quantised_checkpoints import QuantisedFile

LAYER = "layers.0.attention.out"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _write(tmp_path: Path, name: str, file: QuantisedFile) -> Path:
    case = CASES[name]
    return file.write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)


def _side(file: QuantisedFile, leaf: str) -> tuple[str, torch.Tensor]:
    """A layer's scale, by its name, as bytes or floats that can be written to."""
    name = next(each for each in (f"{LAYER}.{leaf}", f"{LAYER}.scale_weight") if each in file.native)
    tensor = file.native[name]
    return name, tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


FLOATS = ("legacy", "legacy by rows", "unmarked, by rows", "unmarked, by blocks", "legacy e5m2, marked e4m3")
INTEGERS = ("int8 by rows", "int8, one scale", "int8, unmarked", "int8, rotated", "int8, rotated, one scale")
ODD: list[tuple[str, str, float]] = [
    *((name, "weight_scale", value) for name in (*FLOATS, *INTEGERS) for value in (NAN, INF, -1e-3)),
    ("legacy", "weight_scale", 1e36),
    ("mxfp8", "weight_scale", 255),
    ("mxfp8, scales as E8M0", "weight_scale", 250),
    *(
        (name, "weight_scale", byte)
        for name in ("nvfp4", "nvfp4, unmarked", "nvfp4, linear")
        for byte in (0x7F, 0xFF, 0xB8)
    ),
    *(("nvfp4", "weight_scale_2", value) for value in (NAN, INF, -1.0, 1e36)),
    ("nvfp4, linear", "weight_scale_2", NAN),
]


@pytest.mark.parametrize(("name", "leaf", "value"), ODD)
def test_a_scale_that_can_t_be_is_refused(tmp_path: Path, name: str, leaf: str, value: float) -> None:
    """One of many is enough. What was loaded would be noise, or not a number, without a word."""
    file = draw_file(CASES[name], "uneven")
    tensor, scale = _side(file, leaf)
    scale.view(-1)[min(16, scale.numel() - 1)] = value
    path = _write(tmp_path, name, file)
    attempts: list[dict[str, Any]] = [{}, {"fp8": "off"}, {"fp8": fp8_of("compute"), "mmap": False}]
    for settings in attempts:
        with pytest.raises(QuantisationError) as caught:
            slipcast.load(path, device="cpu", dtype="float32", **settings)
        assert f"1 scales of {LAYER}.weight that are not finite, negative or beyond all measure" in caught.value.found
        assert f"in the tensor {tensor}" in caught.value.found
        assert "finite and not negative" in caught.value.expected
        assert "get another copy" in caught.value.hint
        assert caught.value.path == str(path)
    with pytest.raises(QuantisationError, match="1 scales of"):
        converted(path, tmp_path / "out.safetensors", format="bf16")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", ["legacy", "legacy by rows", "int8 by rows", "mxfp8", "nvfp4", "nvfp4, linear"])
def test_a_scale_of_zero_is_that_of_zeros(tmp_path: Path, name: str) -> None:
    file = draw_file(CASES[name], "uneven")
    _, scale = _side(file, "weight_scale")
    scale.zero_()
    for settings in ({}, {"fp8": "off"}):
        loaded = slipcast.load(_write(tmp_path, name, file), device="cpu", dtype="float32", **settings)
        layer: Any = loaded.model.get_submodule("layers.0.attention.to_out.0")
        weight = layer.weight if settings else layer.dequantised_weight()
        assert not weight.any()
        note = f"{LAYER}.weight has a scale of 0, so that it is all zeros whatever its codes: the file may be damaged"
        assert loaded.report.notes == ((note,) if scale.ndim == 0 else ())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_lies_in_the_padding_of_scales_does_not_matter(tmp_path: Path, name: str) -> None:
    """Programs leave there what was in memory. 48 rows are not a whole tile of 128."""
    file = draw_file(CASES[name], "uneven")
    _, scale = _side(file, "weight_scale")
    before = {key: tensor.clone() for key, tensor in file.values.items()}
    padding = scale.view(-1)  # row r lies at (r % 32) * 16 + (r % 128) // 32 * 4, so rows from 96 on at 12 of each 16
    padding.view(-1, 16)[:, 12:] = 0xFF
    loaded = slipcast.load(_write(tmp_path, name, file), device="cpu", dtype="float32")
    layer: Any = loaded.model.get_submodule("layers.0.attention.to_out.0")
    torch.testing.assert_close(layer.dequantised_weight(), before[f"{LAYER}.weight"], rtol=1e-6, atol=0)


NO_NUMBERS = {
    "legacy": (0x7F, 0xFF),
    "markers without scales": (0x7F, 0xFF),
    "markers, bytes": (0xFF,),
    "legacy e5m2, marked e4m3": (0x7C, 0xFC, 0x7E, 0xFF),
    "mxfp8": (0x7F, 0xFF),
}


@pytest.mark.parametrize(("name", "byte"), [(name, byte) for name, bytes_ in NO_NUMBERS.items() for byte in bytes_])
def test_codes_that_mean_no_number_are_noted(
    tmp_path: Path, name: str, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = draw_file(CASES[name], "uneven")
    file.native[f"{LAYER}.weight"].view(torch.uint8)[5, 7] = byte
    path = _write(tmp_path, name, file)
    note = f"{LAYER}.weight holds codes that mean NaN or infinity: the file is damaged, and so are the model's outputs"
    kept = CASES[name].codec != ""
    for settings in ({"fp8": "off"}, {"mmap": False}, {"fp8": {"mode": "storage", "remainder": "keep"}}):
        with caplog.at_level(logging.WARNING, logger="slipcast"):
            loaded = slipcast.load(path, device="cpu", dtype="float32", **settings)
        seen = not kept or "mmap" in settings or settings["fp8"] == "off"
        # codes that stay in the mapped file are not read by a load, and so not looked at
        assert loaded.report.notes == ((note,) if seen else ())
        assert (note in caplog.messages) is seen
        assert (note in loaded.report.to_dict()["notes"]) is seen
        caplog.clear()
    said = run("load", path, "--device", "cpu", "--set", "mmap=false", "--json").stdout
    assert note in json.loads(said)["notes"], said


@pytest.mark.parametrize("name", CASES)
def test_the_largest_codes_are_numbers(tmp_path: Path, name: str) -> None:
    """Those just below the bytes that mean NaN or infinity; of integers and 4 bits every byte is a number."""
    file = draw_file(CASES[name], "uneven")
    largest = 0x7B if "e5m2" in name else 0x7E
    codes = file.native[f"{LAYER}.weight"].view(torch.uint8)
    codes[5, 7], codes[5, 8] = largest, 0x80 | largest
    loaded = slipcast.load(_write(tmp_path, name, file), device="cpu", dtype="float32", fp8="off", mmap=False)
    assert loaded.report.notes == ()


def test_a_note_is_shown(tmp_path: Path) -> None:
    file = draw_file(CASES["legacy"], "uneven")
    file.native[f"{LAYER}.weight"].view(torch.uint8)[5, 7] = 0xFF
    path = _write(tmp_path, "legacy", file)
    assert "holds codes that mean NaN" in output_of("load", path, "--device", "cpu", "--set", "fp8=off")
