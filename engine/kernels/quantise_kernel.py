"""The Triton kernels that quantise activations row by row, and how they are launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipcast.engine.kernels.float8_bits import encode
from slipcast.engine.kernels.targets import writes_float8

WHOLE_ROW = 8192
"""Up to so many columns a row stays in registers between its maximum and its codes."""
_PART = 2048
"""Columns that are read at a time of longer rows, twice: the second time from a cache."""
_PER_THREAD = 16
"""Elements of a row that one thread holds."""


@triton.jit
def _scale_of(magnitude, factor, smallest):
    """``magnitude * factor``, at least ``smallest``; NaN stays NaN."""
    scale = magnitude * factor
    return tl.where(scale < smallest, smallest, scale)


@triton.jit
def _magnitude_bits(values):
    """Bits of the magnitudes of float32 values: integers that order as the magnitudes do, with NaN above all."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes(values, scale, static: tl.constexpr, native: tl.constexpr):
    """Codes of the values, multiplied with the scale's reciprocal: one division for a row instead of one for each."""
    products = values * tl.div_rn(1.0, scale)
    if static:
        products = tl.where(products > 448.0, 448.0, tl.where(products < -448.0, -448.0, products))
    return encode(products, native)


@triton.jit
def quantise_whole_rows(
    rows,
    codes,
    scales,
    columns,
    row_step,
    factor,
    smallest,
    static: tl.constexpr,
    native: tl.constexpr,
    block: tl.constexpr,
):
    """One program quantises one row ``[columns]``, which it reads once.

    Args:
        rows: float16, bfloat16 or float32, rows ``row_step`` elements apart.
        codes: uint8 ``[M, columns]``, written.
        scales: float32 ``[M]``, written; one element that is read where the scale is static.
        columns: of a row, at most ``block``.
        row_step: see ``rows``.
        factor: 1 / 448.
        smallest: the least scale.
        static: whether the scale is given.
        native: see ``float8_bits``.
        block: a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    values = tl.load(rows + row * row_step + column, mask=inside, other=0.0).to(tl.float32)
    if static:
        scale = tl.load(scales)
    else:
        scale = _scale_of(tl.max(_magnitude_bits(values), 0).to(tl.float32, bitcast=True), factor, smallest)
        tl.store(scales + row, scale)
    tl.store(codes + row * columns + column, _codes(values, scale, static, native), mask=inside)


@triton.jit
def quantise_long_rows(
    rows,
    codes,
    scales,
    columns,
    row_step,
    factor,
    smallest,
    static: tl.constexpr,
    native: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
):
    """The same for rows of more than ``block`` columns, which are read twice where the scale is not given.

    ``parts`` says of how many blocks. It is a constant because the interpreter can't loop up to an argument.
    """
    row = tl.program_id(0).to(tl.int64)
    if static:
        scale = tl.load(scales)
    else:
        largest = tl.zeros([block], tl.int32)
        for part in range(parts):
            column = part * block + tl.arange(0, block)
            values = tl.load(rows + row * row_step + column, mask=column < columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _magnitude_bits(values))
        scale = _scale_of(tl.max(largest, 0).to(tl.float32, bitcast=True), factor, smallest)
        tl.store(scales + row, scale)
    for part in range(parts):
        column = part * block + tl.arange(0, block)
        inside = column < columns
        values = tl.load(rows + row * row_step + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + row * columns + column, _codes(values, scale, static, native), mask=inside)


def launch_quantise(
    rows: Tensor, input_scale: Tensor | None, factor: float, smallest: float, warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise rows on their device; see ``operators.quantise_rows``.

    Args:
        rows: float16, bfloat16 or float32 ``[M, K]``.
        input_scale: float32 ``[]``, or None for a scale of each row.
        factor: what a row's largest magnitude is multiplied with to give its scale.
        smallest: the least scale of a row.
        warps: of a program; None for as many as suit the row.

    Returns:
        uint8 ``[M, K]``, and the scale, float32 ``[]`` or ``[M, 1]``.
    """
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, columns = rows.shape
    codes = torch.empty((count, columns), dtype=torch.uint8, device=rows.device)
    static = input_scale is not None
    scale = torch.empty((count, 1), dtype=torch.float32, device=rows.device) if input_scale is None else input_scale
    if count == 0 or columns == 0:
        return codes, scale if static else scale.fill_(smallest)
    whole = columns <= WHOLE_ROW
    block = triton.next_power_of_2(columns) if whole else _PART
    kernel = quantise_whole_rows if whole else quantise_long_rows
    kernel[(count,)](
        rows,
        codes,
        scale,
        columns,
        rows.stride(0),
        factor,
        smallest,
        static=static,
        native=writes_float8(rows.device),
        block=block,
        num_warps=warps or min(16, max(1, block // (32 * _PER_THREAD))),
        **({} if whole else {"parts": triton.cdiv(columns, block)}),
    )
    return codes, scale
