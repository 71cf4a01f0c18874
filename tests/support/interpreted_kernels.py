"""Compares the fused kernels with plain torch on a CPU, in Triton's interpreter: run it with TRITON_INTERPRET=1.

Of bfloat16 the interpreter reads subnormal numbers as zero, and where it writes it cuts instead of rounding. So rows
have no subnormal numbers in bfloat16, and values are dequantised to float32 and float16 alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.kernels import float8_bits, plain, plain_nvfp4, quantise_kernel
from slipcast.engine.kernels.dequantise_kernel import Tile, launch_dequantise
from slipcast.engine.kernels.nvfp4_kernel import launch_dequantise_nvfp4
from slipcast.engine.kernels.quantise_kernel import launch_quantise

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("needs Triton")

warnings.simplefilter("ignore")  # numpy's, about quotients that are not numbers
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FACTOR = 1 / plain.LARGEST


def assert_same(actual: Tensor, expected: Tensor, what: object) -> None:
    """The same values, NaN in the same places, zeros of the same sign."""
    actual, expected = actual.float(), expected.float()
    both = torch.stack([actual, expected]).nan_to_num(nan=1e30, posinf=2e30, neginf=-2e30)
    assert torch.equal(*both), what
    assert torch.equal(torch.signbit(actual)[both[0] == 0], torch.signbit(expected)[both[1] == 0]), what


def compare_rows(rows: Tensor, static: Tensor | None) -> None:
    if rows.dtype is torch.bfloat16:
        rows = rows.masked_fill(rows.abs() < torch.finfo(torch.bfloat16).tiny, 0)
    codes, scale = launch_quantise(rows, static, FACTOR, plain.SMALLEST_SCALE)
    if static is None:
        expected, of_rows = plain.quantise_rows(rows)
        assert_same(scale, of_rows, rows)
    else:
        expected = plain.quantise_under(rows, static)
    assert_same(codes.view(plain.FLOAT8), expected, rows)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ODD = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 2.0**-149, -(2.0**-127), 448.0, 464.0])


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(st.one_of(FINITE, ODD, st.floats(-4, 4, width=32)), min_size=1, max_size=9),
    st.sampled_from(DTYPES),
    st.one_of(st.none(), st.floats(2.0**-20, 2.0**20, width=32)),
)
def compare_odd_rows(values: list[float], dtype: torch.dtype, static: float | None) -> None:
    rows = torch.tensor([values, values[::-1]]).to(dtype)
    compare_rows(rows, None if static is None else torch.tensor(static))


def compare_shapes() -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for count, columns in ((0, 16), (3, 1), (5, 64), (2, 3840), (2, quantise_kernel.WHOLE_ROW + 100)):
            rows = (torch.randn(count, columns, generator=random) * torch.logspace(-9, 3, columns)).to(dtype)
            rows[1:2] = 0
            for static in (None, torch.tensor(0.013)):
                compare_rows(rows, static)
                compare_rows(rows.flip(1), static)
        wide = torch.randn(6, 80, generator=random).to(dtype)
        for strided in (wide[::2, :48], wide.t()[:40]):
            compare_rows(strided, None)


@triton.jit
def encode_all(values, codes, count, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    code = float8_bits.encode(tl.load(values + place, mask=place < count, other=0.0), False)
    tl.store(codes + place, code, mask=place < count)


def compare_encoding() -> None:
    """All values half-way between neighbouring codes, the floats beside them, and all that float16 has."""
    magnitudes = torch.arange(127, dtype=torch.uint8).view(plain.FLOAT8).float()
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, 1000.0)]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    values = torch.cat([magnitudes, middles, *beside, halves])
    values = torch.cat([values, -values, torch.tensor([float("nan"), float("inf"), -float("inf")])])
    codes = torch.empty(values.shape, dtype=torch.uint8)
    encode_all[(triton.cdiv(len(values), 1024),)](values, codes, len(values), block=1024)
    assert_same(codes.view(plain.FLOAT8), values.clamp(-448, 448).to(plain.FLOAT8), "encoding")


def compare_dequantised() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    integers = codes.view(torch.int8)
    for scale in (torch.tensor([1.0, 0.37, 1e-7]), torch.tensor([2.0**115, 2.0**-126, 0.0]), torch.tensor([0.011])):
        for dtype in (torch.float32, torch.float16):
            for tile in (None, Tile(2, 64, 1), Tile(1, 512, 1)):
                for cut in (256, 100, 7):
                    for each in (codes.view(plain.FLOAT8), integers):
                        part = each[:, :cut].contiguous()
                        expected = plain.dequantise(part, scale.view(-1, 1), dtype)
                        with nothing_written_beyond():
                            values = launch_dequantise(part, scale, dtype, tile)
                        assert_same(values, expected, (scale, dtype, tile, cut))
    assert launch_dequantise(codes[:0], torch.ones(0), torch.float32).shape == (0, 256)


@contextmanager
def nothing_written_beyond() -> Iterator[None]:
    """Give tensors that are made here more memory than they need, and look at the rest afterwards."""
    make, rests = torch.empty, []

    def with_rest(shape: tuple[int, ...], **options: Any) -> Tensor:
        elements = prod(shape)
        memory = torch.full((elements + 64,), 7, **options)
        rests.append(memory[elements:])
        return memory[:elements].view(shape)

    torch.empty = with_rest  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = make
    assert all(bool((rest == 7).all()) for rest in rests)


def compare_nvfp4() -> None:
    random = torch.Generator().manual_seed(0)
    for layout in ("comfy", "linear"):
        for rows, columns in ((5, 32), (130, 80), (33, 112), (3, 41)):
            if layout == "linear" and columns % 16:
                continue
            parts = NVFP4(layout).encode(torch.randn(rows, columns, generator=random))
            codes = torch.randint(0, 256, parts["codes"].shape, generator=random).to(torch.uint8)
            scale = torch.randint(0, 256, parts["scale"].shape, generator=random).to(torch.uint8).view(plain.FLOAT8)
            for dtype in (torch.float32, torch.float16):
                given = (codes, scale, parts["scale_2"], rows, columns, layout == "comfy", dtype)
                expected = plain_nvfp4.dequantise(*given)
                with nothing_written_beyond():
                    assert_same(launch_dequantise_nvfp4(*given), expected, given[3:])


if __name__ == "__main__":
    compare_odd_rows()
    compare_shapes()
    compare_encoding()
    compare_dequantised()
    compare_nvfp4()
    print("compared")
