"""The Triton kernels that quantise activations and weights row by row, and how they are launched."""

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
def _scale_of(magnitude, factor, smallest, divide: tl.constexpr):
    """``magnitude * factor``, at least ``smallest``; NaN stays NaN. With ``divide`` see ``codecs.chunks.scale_for``."""
    if divide:
        scale = tl.div_rn(magnitude, 448.0)
        scale = tl.where(scale < smallest, smallest, scale)
        scale = tl.where(magnitude == 0.0, 1.0, scale)
    else:
        scale = magnitude * factor
        scale = tl.where(scale < smallest, smallest, scale)
    return scale


@triton.jit
def _magnitude_bits(values):
    """Bits of the magnitudes of float32 values: integers that order as the magnitudes do, with NaN above all."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes(values, scale, static: tl.constexpr, divide: tl.constexpr, native: tl.constexpr):
    """Codes of the values, multiplied with the scale's reciprocal: one division for a row instead of one for each."""
    products = tl.div_rn(values, scale) if divide else values * tl.div_rn(1.0, scale)
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
    divide: tl.constexpr,
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
        divide: whether scales and codes are quotients, as a weight's, whose bits a processor gives too.
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
        scale = _scale_of(tl.max(_magnitude_bits(values), 0).to(tl.float32, bitcast=True), factor, smallest, divide)
        tl.store(scales + row, scale)
    tl.store(codes + row * columns + column, _codes(values, scale, static, divide, native), mask=inside)


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
    divide: tl.constexpr,
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
        scale = _scale_of(tl.max(largest, 0).to(tl.float32, bitcast=True), factor, smallest, divide)
        tl.store(scales + row, scale)
    for part in range(parts):
        column = part * block + tl.arange(0, block)
        inside = column < columns
        values = tl.load(rows + row * row_step + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + row * columns + column, _codes(values, scale, static, divide, native), mask=inside)


def launch_quantise(
    rows: Tensor, input_scale: Tensor | None, factor: float, smallest: float, warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise activations on their device; see ``operators.quantise_rows``.

    Args:
        rows: float16, bfloat16 or float32 ``[M, K]``.
        input_scale: float32 ``[]``, or None for a scale of each row.
        factor: what a row's largest magnitude is multiplied with to give its scale.
        smallest: the least scale of a row.
        warps: of a program; None for as many as suit the row.

    Returns:
        uint8 ``[M, K]``, and the scale, float32 ``[]`` or ``[M, 1]``.
    """
    count, columns = rows.shape
    codes = torch.empty((count, columns), dtype=torch.uint8, device=rows.device)
    static = input_scale is not None
    scale = torch.empty((count, 1), dtype=torch.float32, device=rows.device) if input_scale is None else input_scale
    if count == 0 or columns == 0:
        return codes, scale if static else scale.fill_(smallest)
    _launch(rows, codes, scale, factor, smallest, static=static, divide=False, warps=warps)
    return codes, scale


def launch_encode(rows: Tensor, codes: Tensor, scale: Tensor, smallest: float) -> None:
    """Quantise rows of a weight on their device; see ``operators.encode_rows``.

    Args:
        rows: float16, bfloat16 or float32 ``[M, K]``, neither of them 0.
        codes: uint8 ``[M, K]``, contiguous; written.
        scale: float32 ``[M]``, contiguous; written.
        smallest: the least scale of a row.
    """
    _launch(rows, codes, scale, 0.0, smallest, static=False, divide=True)


def _launch(
    rows: Tensor,
    codes: Tensor,
    scale: Tensor,
    factor: float,
    smallest: float,
    *,
    static: bool,
    divide: bool,
    warps: int | None = None,
) -> None:
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, columns = rows.shape
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
        divide=divide,
        native=writes_float8(rows.device),
        block=block,
        num_warps=warps or min(16, max(1, block // (32 * _PER_THREAD))),
        **({} if whole else {"parts": triton.cdiv(columns, block)}),
    )
