"""nvfp4: 4-bit floats, for each 16 columns of a row a float8_e4m3fn scale, and one float32 scale for the weight.

A code is a sign and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Two byte layouts exist under the same tensor names;
read one as the other, and the error is 1.42 in relative L2 (order of codes) or 0.31 (order of scales).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipcast.engine.codecs.base import CODES, SCALE, Codec, Part, Parts, Shape, count_odd
from slipcast.engine.codecs.chunks import row_amax, row_chunks, scale_for, scratch_for
from slipcast.engine.codecs.swizzle import TILE_ROWS, round_up, swizzle, swizzled_shape, unswizzle
from slipcast.engine.kernels.operators import dequantise_nvfp4
from slipcast.engine.kernels.plain_nvfp4 import BLOCK

SCALE_2 = "scale_2"

_LARGEST = 6.0
_LARGEST_SCALE = 448.0
_NAN = 0x7F
"""The byte of a scale that is NaN. Larger bytes have the sign bit."""

# The largest float32 that is rounded down to each magnitude but the last: the middle to the next one where the code's
# last bit is 0, else the float32 before it, since a tie goes to the code whose last bit is 0.
_LIMITS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


@dataclass(frozen=True)
class NVFP4(Codec):
    """nvfp4 in one of its layouts.

    | layout | codes of two columns in a byte | scales | codes and scales |
    |---|---|---|---|
    | comfy | the even column in the high nibble | swizzled (see ``swizzle``) | padded to 16 rows and columns |
    | linear | the even column in the low nibble | ``[N, K / 16]`` | not padded |

    Codes are uint8 ``[N, K / 2]``, the scales of blocks float8_e4m3fn, the scale of all (``scale_2``) float32 ``[]``.

    Attributes:
        layout: comfy, as ComfyUI and its kernels have it, or linear, as ModelOpt has it.
    """

    layout: Literal["comfy", "linear"] = "comfy"

    @property
    def name(self) -> str:
        """``nvfp4/comfy`` or ``nvfp4/linear``."""
        return f"nvfp4/{self.layout}"

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """The nvfp4 codec that has the name, or None."""
        return next((codec for codec in (cls("comfy"), cls("linear")) if codec.name == name), None)

    def obstacle(self, shape: Shape) -> str | None:
        """Blocks lie in the rows of a matrix; the linear layout can't pad them."""
        if len(shape) != 2 or prod(shape) == 0:
            return "it is not a matrix with elements"
        if self.layout == "linear" and shape[1] % BLOCK:
            return f"blocks of {BLOCK} columns don't divide it, and the linear layout has no padding"
        return None

    def _parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = self._padded(shape)
        grid = (rows, columns // BLOCK)
        return {
            CODES: Part(torch.uint8, (rows, columns // 2)),
            SCALE: Part(torch.float8_e4m3fn, swizzled_shape(*grid) if self.layout == "comfy" else grid),
            SCALE_2: Part(torch.float32, ()),
        }

    def tile_rows(self, shape: Shape) -> int:  # noqa: ARG002
        """In the comfy layout scales lie in tiles of 128 rows."""
        return TILE_ROWS if self.layout == "comfy" else 1

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``magnitude * scale * scale_2`` in float32, without the padding, cast once."""
        comfy = self.layout == "comfy"
        return dequantise_nvfp4(parts[CODES], parts[SCALE], parts[SCALE_2], shape[0], shape[1], comfy, dtype)

    def odd_scales(self, name: str, part: Tensor, shape: Shape) -> int:
        """Of the blocks' scales only bytes that have the sign bit, or mean NaN, are worth a closer look."""
        if name != SCALE:
            return count_odd(part)
        return 0 if int(part.view(torch.uint8).amax()) < _NAN else count_odd(self._grid(part, shape).to(torch.float32))

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """Rows of the codes and of the scales' grid, padded and swizzled anew."""
        grid = self._stored_grid(parts, parts[CODES].shape[0]).index_select(0, rows)
        return self._padded_parts(parts[CODES].index_select(0, rows), grid, parts[SCALE_2])

    def join_rows(self, several: Sequence[tuple[Parts, int]]) -> dict[str, Tensor]:
        """Codes and scales of the rows, padded and swizzled anew, under the scale of the first weight."""
        codes = torch.cat([parts[CODES][:rows] for parts, rows in several])
        grid = torch.cat([self._stored_grid(parts, rows) for parts, rows in several])
        return self._padded_parts(codes, grid, several[0][0][SCALE_2])

    def in_comfy_layout(self, parts: Parts, rows: int) -> dict[str, Tensor]:
        """The parts of the same weight, of so many rows, in the comfy layout: no value changes."""
        if self.layout == "comfy":
            return dict(parts)
        codes = parts[CODES]
        swapped = (codes << 4) | (codes >> 4)
        return NVFP4("comfy")._padded_parts(swapped, self._stored_grid(parts, rows), parts[SCALE_2])

    def _stored_grid(self, parts: Parts, rows: int) -> Tensor:
        """The scales of the first rows, in their own order, as bytes."""
        return self._grid(parts[SCALE], (rows, parts[CODES].shape[1] * 2)).view(torch.uint8)

    def _padded_parts(self, codes: Tensor, grid: Tensor, scale_2: Tensor) -> dict[str, Tensor]:
        """The parts of codes and scales that lie row by row, both as bytes."""
        padding = self._padded((codes.shape[0], BLOCK))[0] - codes.shape[0]
        scale = self._stored(grid.view(torch.float8_e4m3fn))
        return {CODES: pad(codes, (0, 0, 0, padding)), SCALE: scale, SCALE_2: scale_2}

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = self._padded(tuple(weight.shape))
        padded = pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
        blocks = padded.reshape(rows, -1, BLOCK)
        grid = torch.empty(blocks.shape[:2], dtype=torch.float8_e4m3fn, device=weight.device)
        codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=weight.device)
        scratch = scratch_for(blocks)
        amax = torch.cat([row_amax(blocks[chunk].reshape(-1, BLOCK), scratch) for chunk in row_chunks(blocks)])
        scale_2 = scale_for(amax.amax(), _LARGEST * _LARGEST_SCALE)
        grid.copy_((amax / torch.full_like(amax, _LARGEST) / scale_2).view(grid.shape))
        scale = grid.to(torch.float32) * scale_2
        for chunk in row_chunks(blocks):
            codes[chunk] = self._packed(_nearest_codes(blocks[chunk].to(torch.float32), scale[chunk][..., None]))
        return {CODES: codes, SCALE: self._stored(grid), SCALE_2: scale_2}

    def _grid(self, stored: Tensor, shape: Shape) -> Tensor:
        """The scales of the rows of a shape, in their own order."""
        columns = round_up(shape[1], BLOCK) // BLOCK
        return unswizzle(stored, shape[0], columns) if self.layout == "comfy" else stored[: shape[0]]

    def _stored(self, grid: Tensor) -> Tensor:
        return swizzle(grid) if self.layout == "comfy" else grid

    def _padded(self, shape: Shape) -> tuple[int, int]:
        return (
            (round_up(shape[0], BLOCK), round_up(shape[1], BLOCK)) if self.layout == "comfy" else (shape[0], shape[1])
        )

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes ``[n, blocks, 16]`` as bytes ``[n, blocks * 8]``."""
        even, odd = codes.view(codes.shape[0], -1, 2).unbind(2)
        return (even << 4) | odd if self.layout == "comfy" else (odd << 4) | even


def _nearest_codes(values: Tensor, scale: Tensor) -> Tensor:
    """Codes, uint8, nearest to ``values / scale``; 0 under a scale of 0, which blocks far below the largest get.

    A magnitude's code is the number of limits that it exceeds: on processors counting is far faster than looking up.
    """
    quotients = values / torch.where(scale == 0, torch.inf, scale)
    above = quotients < 0
    codes = above.to(torch.uint8).mul_(8)
    quotients.abs_()
    for limit in _LIMITS:
        codes.add_(torch.gt(quotients, limit, out=above).view(torch.uint8))
    return codes
