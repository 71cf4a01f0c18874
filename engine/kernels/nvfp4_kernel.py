"""The Triton kernel that dequantises nvfp4, and how it is launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipcast.engine.kernels.float8_bits import decode
from slipcast.engine.kernels.plain_nvfp4 import BLOCK
from slipcast.engine.kernels.targets import reads_float8

_LINES, _WARPS = 256, 4


@triton.jit
def _values(codes):
    """float32 values of 4-bit codes, which are those of a float16 with another bias of the exponent."""
    half = ((codes & 0x8) << 12) | ((codes & 0x7) << 9)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def dequantise_nvfp4(
    codes,
    scales,
    scale_2,
    values,
    lines,
    blocks,
    columns,
    comfy: tl.constexpr,
    native: tl.constexpr,
    block_lines: tl.constexpr,
):
    """One program dequantises some lines, a line being the 16 columns of a row that share a scale.

    Args:
        codes: uint8 ``[rows or more, blocks * 8]``.
        scales: the bits of float8_e4m3fn, swizzled or ``[rows, blocks]``.
        scale_2: float32 ``[]``.
        values: float16, bfloat16 or float32 ``[rows, columns]``, written.
        lines: rows times blocks.
        blocks: of a row.
        columns: of a row, of which the last block may have fewer than 16.
        comfy: whether the even column lies in the high nibble and scales are swizzled.
        native: see ``float8_bits``.
        block_lines: of a program.
    """
    line = tl.program_id(0).to(tl.int64) * block_lines + tl.arange(0, block_lines)
    inside = line < lines
    row, block = line // blocks, line % blocks
    if comfy:
        tile = (row // 128) * ((blocks + 3) // 4) + block // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    else:
        place = line
    scale = decode(tl.load(scales + place, mask=inside, other=0), native) * tl.load(scale_2)
    pair = tl.arange(0, 8)
    code = tl.load(codes + line[:, None] * 8 + pair[None, :], mask=inside[:, None], other=0).to(tl.int32)
    high, low = _values(code >> 4), _values(code & 0xF)
    value = tl.interleave(high, low) if comfy else tl.interleave(low, high)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    product = (value * scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row[:, None] * columns + column, product, mask=inside[:, None] & (column < columns))


def launch_dequantise_nvfp4(
    codes: Tensor, scale: Tensor, scale_2: Tensor, rows: int, columns: int, comfy: bool, dtype: torch.dtype
) -> Tensor:
    """Dequantise on the codes' device; see ``operators.dequantise_nvfp4``."""
    values = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    blocks = triton.cdiv(columns, BLOCK)
    lines = rows * blocks
    if lines == 0:
        return values
    dequantise_nvfp4[(triton.cdiv(lines, _LINES),)](
        codes.contiguous(),
        scale.contiguous().view(torch.uint8),
        scale_2,
        values,
        lines,
        blocks,
        columns,
        comfy=comfy,
        native=reads_float8(codes.device),
        block_lines=_LINES,
        num_warps=_WARPS,
    )
    return values
