"""The compiled way to float8 codes: bit for bit that of torch, and torch's where it can't be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import slipcast
from slipcast.engine.codecs import native
from slipcast.engine.codecs.base import CODES, SCALE
from slipcast.engine.codecs.float8 import Float8
from slipcast.registry.errors import QuantisationError
from support.isolation import isolate
from support.number_formats import bytes_of
from support.tiny_z_image import tiny_tensors

ROW = Float8("row")
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_compiled", {})


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    pytest.importorskip("numba")
    assert all(native.prepare(dtype) for dtype in FLOATS)
    yield
    native._compiled.clear()


def by_torch(rows: torch.Tensor, codec: Float8 = ROW) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_compiled", {})
        return codec.encode(rows)


def natively(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = {name: part.empty("cpu") for name, part in ROW.parts(tuple(rows.shape)).items()}
    assert native.encode_rows(rows, parts[CODES], parts[SCALE])
    return parts


def assert_same_bits(rows: torch.Tensor) -> None:
    expected, parts = by_torch(rows), natively(rows)
    assert torch.equal(parts[SCALE], expected[SCALE])
    assert np.array_equal(bytes_of(parts[CODES]), bytes_of(expected[CODES]))


def finite_patterns(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of 16-bit floats, or as many of float32: ordered by magnitude, negative ones last."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = values.to(torch.int16).view(dtype) if dtype.itemsize == 2 else (values * 65521).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 16, 77, 256, 3840])
def test_every_value_gets_the_bits_of_torch(dtype: torch.dtype, columns: int) -> None:
    """Sorted, so that a row's values are near its largest; shuffled, so that most are far below."""
    values = finite_patterns(dtype)
    values = values[: len(values) // columns * columns]
    assert_same_bits(values.view(-1, columns))
    assert_same_bits(values[torch.randperm(len(values))].view(-1, columns))


@given(st.sampled_from(FLOATS), st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 300), st.integers(-140, 120))
def test_random_rows_get_the_bits_of_torch(
    dtype: torch.dtype, seed: int, rows: int, columns: int, exponent: int
) -> None:
    limits = torch.finfo(dtype)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert_same_bits((values * 2.0**exponent).clamp(limits.min, limits.max).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ties_round_to_even_codes(dtype: torch.dtype) -> None:
    """Under a scale of 1, halfway between neighbours among normal and subnormal codes."""
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[:-1] + codes[1:]) / 2
    rows = torch.cat([halves, -halves, torch.tensor([448.0, 2.0**-10, -(2.0**-10), -0.0])])[None].to(dtype)
    assert natively(rows)[SCALE].item() == 1
    assert_same_bits(rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_and_the_smallest_values_get_the_bits_of_torch(dtype: torch.dtype) -> None:
    smallest = torch.tensor([1, 2, 3, 5], dtype=BITS[dtype]).view(dtype)
    assert_same_bits(torch.stack([smallest, -smallest, torch.zeros(4, dtype=dtype), -torch.zeros(4, dtype=dtype)]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_in_the_same_words(bad: float, dtype: torch.dtype) -> None:
    rows = torch.ones(4, 40, dtype=dtype)
    rows[2, 33] = bad
    with pytest.raises(QuantisationError) as error:
        ROW.encode(rows)
    with pytest.raises(QuantisationError, match="not finite, under 1 of 4 scales") as expected:
        by_torch(rows)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("codec", [ROW, Float8("block", block=8)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codecs_take_the_compiled_way(codec: Float8, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(6, 40).to(dtype)
    expected = by_torch(rows, codec)
    monkeypatch.setattr("slipcast.engine.codecs.scaled.row_amax", None)  # what torch's way begins with
    for name, part in codec.encode(rows).items():
        assert np.array_equal(bytes_of(part), bytes_of(expected[name]))


def test_what_it_is_not_compiled_for_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(4, 8)
    codes, scale = torch.empty(4, 8, dtype=torch.float8_e4m3fn), torch.empty(4)
    misaligned = torch.frombuffer(bytearray(4 * 8 * 4 + 2), dtype=torch.float32, offset=2, count=32).view(4, 8)
    for left in (rows.double(), rows.t().contiguous().t(), rows.to("meta"), misaligned, torch.nn.Parameter(rows)):
        assert not native.encode_rows(left, codes, scale)
    assert not native.prepare(torch.float64)
    assert native.encode_rows(rows, codes, scale)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert not native.encode_rows(rows, codes, scale)


@pytest.mark.usefixtures("nothing_compiled")
def test_without_numba_torch_encodes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level("DEBUG", logger="slipcast"):
        assert not native.prepare(torch.bfloat16)
    assert "fp8 codes are made by torch" in caplog.text
    rows = torch.randn(4, 8).bfloat16()
    assert ROW.encode(rows)[SCALE].shape == (4,)
    assert not native.encode_rows(rows, torch.empty(4, 8, dtype=torch.float8_e4m3fn), torch.empty(4))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_numba_that_fails_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such processor")

    monkeypatch.setattr("numba.njit", fail)
    assert not native.prepare(torch.bfloat16)


@pytest.mark.usefixtures("nothing_compiled")
def test_it_compiles_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no folder may be written, numba refuses to keep what it compiles."""

    def no_folder(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", no_folder)
    assert native.prepare(torch.bfloat16)
    assert_same_bits(torch.randn(4, 40).bfloat16())


@pytest.mark.usefixtures("nothing_compiled")
def test_a_load_compiles_where_that_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in tiny_tensors().items()}, path)
    settings = {"device": "cpu", "dtype": "bfloat16", "fp8": "storage", "threads": 2}
    small = slipcast.load(path, **settings)
    assert native._compiled == {}
    monkeypatch.setattr(native, "WORTHWHILE", 1)
    large = slipcast.load(path, **settings)
    assert list(native._compiled) == [torch.bfloat16]
    held = large.model.state_dict()
    for name, tensor in small.model.state_dict().items():
        assert np.array_equal(bytes_of(held[name]), bytes_of(tensor)), name
