"""The Triton kernel that dequantises codes of one byte under scales of rows, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipcast.engine.kernels.float8_bits import decode
from slipcast.engine.kernels.targets import reads_float8


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program dequantises.

    Attributes:
        rows: a power of two.
        columns: a power of two.
        warps: that share the work.
    """

    rows: int
    columns: int
    warps: int


_ELEMENTS = 4096
"""Of a tile: 16 for each thread, which it reads at once."""
_WIDEST = 1024


@triton.jit
def dequantise(
    codes,
    scales,
    values,
    rows,
    columns,
    one_scale: tl.constexpr,
    float8: tl.constexpr,
    native: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """One program dequantises one tile: each code once read, each value once written.

    Args:
        codes: uint8 or int8 ``[rows, columns]``, contiguous.
        scales: float32, one for each row or one for all.
        values: float16, bfloat16 or float32 ``[rows, columns]``, written.
        rows: of the matrix.
        columns: of the matrix.
        one_scale: whether there is one scale for all.
        float8: whether the codes are the bits of float8_e4m3fn; else integers.
        native: see ``float8_bits``.
        block_rows: of a tile.
        block_columns: of a tile.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    # The codes are not needed again; the values are, by the product that follows.
    code = tl.load(codes + place, mask=inside, other=0, eviction_policy="evict_first")
    scale = tl.load(scales) if one_scale else tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
    value = decode(code, native) if float8 else code.to(tl.float32)
    tl.store(values + place, (value * scale).to(values.dtype.element_ty), mask=inside)


def tile_for(columns: int) -> Tile:
    """The tile for a matrix of so many columns: as wide as a power of two that divides them."""
    width = columns & -columns
    if width < 32:
        width = triton.next_power_of_2(columns)
    width = min(width, _WIDEST)
    return Tile(max(1, _ELEMENTS // width), width, 8)


def launch_dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """Dequantise on the codes' device; see ``operators.dequantise_rows``.

    Args:
        codes: float8_e4m3fn or int8 ``[R, C]``, contiguous.
        scale: float32 of R elements or one.
        dtype: float16, bfloat16 or float32.
        tile: None for the one that suits the columns.
    """
    rows, columns = codes.shape
    values = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    if values.numel() == 0:
        return values
    float8 = codes.dtype is torch.float8_e4m3fn
    tile = tile or tile_for(columns)
    dequantise[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))](
        codes.view(torch.uint8) if float8 else codes,
        scale.contiguous(),
        values,
        rows,
        columns,
        one_scale=scale.numel() == 1,
        float8=float8,
        native=reads_float8(codes.device),
        block_rows=tile.rows,
        block_columns=tile.columns,
        num_warps=tile.warps,
    )
    return values
