"""What the fused kernel for nvfp4 computes, in plain torch; see ``codecs.nvfp4`` for the format."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from slipcast.engine.codecs.constants import kept
from slipcast.engine.codecs.swizzle import unswizzle

BLOCK = 16
"""Columns under one scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(
    codes: Tensor, scale: Tensor, scale_2: Tensor, rows: int, columns: int, comfy: bool, dtype: torch.dtype
) -> Tensor:
    """See ``operators.dequantise_nvfp4``."""
    grid = unswizzle(scale, rows, -(-columns // BLOCK)) if comfy else scale[:rows]
    of_blocks = grid.to(torch.float32) * scale_2
    values = embedding(codes[:rows].to(torch.int32), _pairs(comfy, codes.device))
    blocks = values.view(-1, BLOCK).mul_(of_blocks.view(-1, 1)).to(dtype)
    return blocks.view(rows, codes.shape[1] * 2)[:, :columns].contiguous()


@kept
def _pairs(comfy: bool, device: torch.device) -> Tensor:
    """For each byte the values of its two columns, float32 ``[256, 2]``."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=device)
    high, low = values.repeat_interleave(16), values.repeat(16)
    return torch.stack((high, low) if comfy else (low, high), dim=1)
