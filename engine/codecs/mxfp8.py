"""mxfp8: float8_e4m3fn codes, and for each 32 columns of a row a power of two as scale.

The scale is a byte ``e`` that means ``2**(e - 127)``, the exponent of a float32; 0 stands for a block of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipcast.engine.codecs.base import CODES, SCALE, Codec, Part, Parts, Shape, bits
from slipcast.engine.codecs.chunks import row_amax, row_chunks, scratch_for
from slipcast.engine.codecs.swizzle import TILE_ROWS, round_up, swizzle, swizzled_shape, unswizzle
from slipcast.engine.kernels.operators import dequantise

_BLOCK = 32
_BIAS = 127
_LARGEST = 448.0
_LARGEST_EXPONENT = _BIAS + 115
"""Of a scale below ``LARGEST_SCALE``. The largest byte, 255, means NaN."""


@dataclass(frozen=True)
class MXFP8(Codec):
    """mxfp8 as ComfyUI and cuBLAS have it.

    Codes are float8_e4m3fn, padded with zeros to multiples of 32 rows and columns; scales are uint8, swizzled.
    """

    @property
    def name(self) -> str:
        """``mxfp8``."""
        return "mxfp8"

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """The codec, if the name is ``mxfp8``."""
        return cls() if name == "mxfp8" else None

    def obstacle(self, shape: Shape) -> str | None:
        """Blocks lie in the rows of a matrix."""
        return "it is not a matrix with elements" if len(shape) != 2 or prod(shape) == 0 else None

    def _parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = _padded(shape)
        return {
            CODES: Part(torch.float8_e4m3fn, (rows, columns)),
            SCALE: Part(torch.uint8, swizzled_shape(rows, columns // _BLOCK)),
        }

    def tile_rows(self, shape: Shape) -> int:  # noqa: ARG002
        """Scales lie in tiles of 128 rows."""
        return TILE_ROWS

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``codes * 2**(e - 127)``, without the padding."""
        codes = parts[CODES][: shape[0]].reshape(-1, _BLOCK)
        exponents = unswizzle(parts[SCALE], shape[0], _padded(shape)[1] // _BLOCK)
        scale = (exponents.to(torch.int32) << 23).view(torch.float32)
        return dequantise(codes, scale.view(-1, 1), dtype).view(shape[0], -1)[:, : shape[1]]

    def odd_scales(self, name: str, part: Tensor, shape: Shape) -> int:  # noqa: ARG002
        """Bytes that mean NaN or too large a power."""
        if int(part.amax()) <= _LARGEST_EXPONENT:
            return 0
        return int((unswizzle(part, shape[0], _padded(shape)[1] // _BLOCK) > _LARGEST_EXPONENT).sum())

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """Rows of the codes and of the scales' grid, padded and swizzled anew."""
        codes = parts[CODES]
        return self._padded_parts(bits(codes).index_select(0, rows), self._grid(parts, codes.shape[0])[rows])

    def join_rows(self, several: Sequence[tuple[Parts, int]]) -> dict[str, Tensor]:
        """Codes and scales of the rows, padded and swizzled anew."""
        codes = torch.cat([bits(parts[CODES])[:rows] for parts, rows in several])
        return self._padded_parts(codes, torch.cat([self._grid(parts, rows) for parts, rows in several]))

    def _grid(self, parts: Parts, rows: int) -> Tensor:
        """The scales of the first rows, in their own order."""
        return unswizzle(parts[SCALE], rows, parts[CODES].shape[1] // _BLOCK)

    def _padded_parts(self, codes: Tensor, grid: Tensor) -> dict[str, Tensor]:
        """The parts of codes, as bytes, and scales that lie row by row."""
        codes = pad(codes, (0, 0, 0, -codes.shape[0] % _BLOCK))
        return {CODES: codes.view(torch.float8_e4m3fn), SCALE: swizzle(grid)}

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = _padded(tuple(weight.shape))
        padded = pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
        blocks = padded.reshape(rows, -1, _BLOCK)
        grid = torch.empty(blocks.shape[:2], dtype=torch.uint8, device=weight.device)
        codes = torch.empty(blocks.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scratch = scratch_for(blocks)
        for chunk in row_chunks(blocks):
            exponents = _exponents(row_amax(blocks[chunk].reshape(-1, _BLOCK), scratch)).view(-1, blocks.shape[1])
            grid[chunk] = exponents.to(torch.uint8)
            factor = ((2 * _BIAS - exponents.clamp(min=1)) << 23).view(torch.float32)
            codes[chunk] = (blocks[chunk].to(torch.float32) * factor[..., None]).to(torch.float8_e4m3fn)
        return {CODES: codes.view(rows, columns), SCALE: swizzle(grid)}


def _exponents(amax: Tensor) -> Tensor:
    """The smallest biased exponents, int32, under which no magnitude exceeds 448; 0 for blocks of zeros."""
    mantissa, exponent = torch.frexp(amax / torch.full_like(amax, _LARGEST))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).to(torch.int32)
    return torch.where(amax == 0, 0, (exponent + _BIAS).clamp(min=1))


def _padded(shape: Shape) -> tuple[int, int]:
    return round_up(shape[0], _BLOCK), round_up(shape[1], _BLOCK)
