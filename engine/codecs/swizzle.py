"""The order in which cuBLAS wants the scales of blocks, and in which files of mxfp8 and nvfp4 hold them.

Scales are kept in tiles of 128 rows and 4 block columns; within a tile, scale ``(r, c)`` lies at
``(r % 32) * 16 + (r // 32) * 4 + c``. The grid is padded with zeros to whole tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, _COLUMNS = 128, 4


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the padded grid for scales of so many rows and block columns."""
    return round_up(rows, TILE_ROWS), round_up(columns, _COLUMNS)


def swizzle(grid: Tensor) -> Tensor:
    """Scales ``[rows, columns]`` of one byte each in cuBLAS's order, as a padded matrix."""
    shape = swizzled_shape(*grid.shape)
    padded = torch.zeros(shape, dtype=torch.uint8, device=grid.device)
    padded[: grid.shape[0], : grid.shape[1]] = grid.view(torch.uint8)
    tiles = padded.view(shape[0] // TILE_ROWS, 4, 32, shape[1] // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape).view(grid.dtype)


def unswizzle(stored: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse: the grid ``[rows, columns]`` out of the padded matrix."""
    shape = swizzled_shape(rows, columns)
    tiles = stored.view(torch.uint8).reshape(shape[0] // TILE_ROWS, shape[1] // _COLUMNS, 32, 4, _COLUMNS)
    grid = tiles.permute(0, 3, 2, 1, 4).reshape(shape)[:rows, :columns]
    return grid.contiguous().view(stored.dtype)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple
