"""float8 with float32 scales: for each output, for the whole weight, for blocks of columns, or none.

``weight = codes * scale`` with ``scale = amax / 448``. e4m3fn has 4 significant bits, so values down to 2**-15 of their
row's largest keep a relative error of at most 2**-4: 0.026 in relative L2 on normally distributed weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self, cast

import torch
from torch import Tensor

from slipcast.engine.codecs.base import (
    CODES,
    SCALE,
    Codec,
    Part,
    Parts,
    Shape,
    bits,
    multiplied,
    refuse_non_finite,
)
from slipcast.registry.errors import QuantisationError

Granularity = Literal["row", "tensor", "block", "none"]

_NAME = re.compile(
    r"(?P<dtype>float8_e4m3fn|float8_e5m2)/(?:(?P<granularity>row|tensor|none)|block(?P<block>[1-9][0-9]{0,5}))(?P<axis>@1)?"
)
_CHUNK = 1 << 20
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_MAGNITUDE_16_BITS = 0x7FFF


@dataclass(frozen=True, slots=True)
class Float8(Codec):
    """float8 codes with float32 scales.

    | granularity | scale | |
    |---|---|---|
    | row | ``[N]`` | one for each of the N outputs |
    | tensor | ``[]`` | one |
    | block | ``[N, K / block, 1]`` | one for each ``block`` columns of a row of a matrix |
    | none | | the codes are the values |

    Attributes:
        granularity: how far one scale reaches.
        block: columns under one scale, for blocks only.
        axis: the axis of the outputs, for rows only.
        dtype: of the codes; e5m2 is only read.
    """

    granularity: Granularity = "row"
    block: int = 0
    axis: int = 0
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if (self.granularity == "block") != (self.block > 0) or (self.axis and self.granularity != "row"):
            raise QuantisationError(
                f"a float8 codec with granularity {self.granularity}, block {self.block}, axis {self.axis}",
                expected="a block size for blocks and for nothing else, an axis for rows and for nothing else",
                hint="correct the codec",
            )

    @property
    def name(self) -> str:
        """As in ``float8_e4m3fn/row``, ``float8_e4m3fn/row@1``, ``float8_e4m3fn/block64``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}/{self.granularity}{self.block or ''}{'@1' if self.axis else ''}"

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """The float8 codec that has the name, or None."""
        match = _NAME.fullmatch(name)
        if match is None or (match["axis"] and match["granularity"] != "row"):
            return None
        granularity = cast(Granularity, match["granularity"] or "block")
        return cls(granularity, int(match["block"] or 0), 1 if match["axis"] else 0, getattr(torch, match["dtype"]))

    @property
    def encodes(self) -> bool:
        """Only e4m3fn is written."""
        return self.dtype is torch.float8_e4m3fn

    @property
    def streams(self) -> bool:
        """True where a scale depends on one row alone and rows lie one after another."""
        return self.encodes and self.granularity != "tensor" and self.axis == 0

    @property
    def selects_rows(self) -> bool:
        """True: each row is decoded by its own scale, or by the one of all."""
        return self.axis == 0

    def for_axis(self, axis: int) -> Codec:
        """The codec with its scales along the given axis."""
        return replace(self, axis=axis) if self.granularity == "row" else self

    def obstacle(self, shape: Shape) -> str | None:
        """Codes need a matrix or a stack of them; blocks need a matrix whose columns they divide."""
        if len(shape) < 2 or prod(shape) == 0:
            return "it is not a matrix with elements"
        if self.granularity == "block" and (len(shape) != 2 or shape[1] % self.block):
            return f"blocks of {self.block} columns don't divide it"
        return None

    def _parts(self, shape: Shape) -> dict[str, Part]:
        codes = Part(self.dtype, shape)
        scales: dict[Granularity, Shape] = {
            "row": (shape[self.axis],),
            "tensor": (),
            "block": (shape[0], shape[1] // (self.block or 1), 1),
        }
        if self.granularity == "none":
            return {CODES: codes}
        return {CODES: codes, SCALE: Part(torch.float32, scales[self.granularity])}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``codes * scale`` in float32, cast once; without a scale the codes' own values."""
        codes = parts[CODES]
        if self.granularity == "none":
            return codes.to(dtype)
        scale = parts[SCALE]
        if self.granularity == "block":
            return multiplied(codes.view(shape[0], -1, self.block), scale, dtype).flatten(1)
        if self.granularity == "row":
            scale = scale.reshape([-1 if axis == self.axis else 1 for axis in range(len(shape))])
        return multiplied(codes, scale, dtype)

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """Rows of the codes, and of the scales where rows have their own."""
        chosen = {CODES: bits(parts[CODES]).index_select(0, rows).view(self.dtype)}
        if self.granularity != "none":
            scale = parts[SCALE]
            chosen[SCALE] = scale if self.granularity == "tensor" else scale.index_select(0, rows)
        return chosen

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        if self.axis:
            parts = replace(self, axis=0).encode(weight.transpose(0, 1).contiguous())
            return {**parts, CODES: parts[CODES].transpose(0, 1).contiguous()}
        weight = weight.contiguous()
        out = {name: part.empty(weight.device) for name, part in self.parts(tuple(weight.shape)).items()}
        scratch = torch.empty(_scratch_elements(weight), dtype=torch.float32, device=weight.device)
        if self.granularity == "tensor":
            self._encode_under_one_scale(weight.flatten(1), out, scratch)
        else:
            for rows in _row_chunks(weight):
                self.encode_rows_into(weight[rows], {name: part[rows] for name, part in out.items()}, scratch)
        return out

    def _encode_under_one_scale(self, weight: Tensor, out: Parts, scratch: Tensor) -> None:
        amax = torch.stack([_row_amax(weight[rows], scratch).amax() for rows in _row_chunks(weight)]).amax()
        refuse_non_finite(amax)
        out[SCALE].copy_(self._scale(amax))
        codes = out[CODES].flatten(1)
        for rows in _row_chunks(weight):
            _write_codes(weight[rows], out[SCALE], codes[rows], scratch)

    def encode_rows_into(self, rows: Tensor, out: Parts, scratch: Tensor) -> None:
        """Encode rows whose scales depend on nothing but themselves."""
        rows = rows.flatten(1)
        codes = out[CODES].flatten(1)
        if self.granularity == "block":
            rows, codes = rows.reshape(-1, self.block), codes.view(-1, self.block)
        amax = _row_amax(rows, scratch)
        refuse_non_finite(amax)
        if self.granularity == "none":
            largest = torch.finfo(self.dtype).max
            codes.copy_(_prefix(scratch, rows).copy_(rows).clamp_(-largest, largest))
            return
        scale = self._scale(amax)
        out[SCALE].copy_(scale.view(out[SCALE].shape))
        _write_codes(rows, scale[:, None], codes, scratch)

    def _scale(self, amax: Tensor) -> Tensor:
        """``amax / 448``; 1 for rows of zeros, and never so small that dividing by it overflows.

        Divided by a tensor: by a number a GPU would multiply with the reciprocal, and other bits than a CPU's come out.
        """
        largest = torch.full_like(amax, torch.finfo(self.dtype).max)
        scale = (amax / largest).clamp_(min=_SMALLEST_SCALE)
        return torch.where(amax == 0, 1.0, scale)


def _write_codes(rows: Tensor, scale: Tensor, codes: Tensor, scratch: Tensor) -> None:
    """The codes nearest to ``rows / scale``.

    The quotients need no clamp: the scale is at least ``amax / 448`` rounded to float32, so none exceeds 448 by more
    than a rounding error, and all up to 464 round to 448.
    """
    quotient = _prefix(scratch, rows)
    codes.copy_(quotient.copy_(rows).div_(scale))


def _row_amax(rows: Tensor, scratch: Tensor) -> Tensor:
    """Largest magnitude of each row, float32 ``[n]``; infinite or NaN where the row holds such a value.

    Of 16-bit floats the magnitudes are compared as integers, which order alike (NaN above infinity): torch has fast
    integer kernels on processors, but widens bfloat16 for a comparison of floats.
    """
    if rows.dtype.itemsize == 2:
        integers = scratch.view(torch.int16)[: rows.numel()].view(rows.shape)
        torch.bitwise_and(rows.view(torch.int16), _MAGNITUDE_16_BITS, out=integers)
        return integers.amax(1).view(rows.dtype).to(torch.float32)
    return _prefix(scratch, rows).copy_(rows).abs_().amax(1)


def _prefix(scratch: Tensor, like: Tensor) -> Tensor:
    return scratch[: like.numel()].view(like.shape)


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    """Slices of whole rows, each of about a million elements."""
    step = max(1, _CHUNK // weight[0].numel())
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def _scratch_elements(weight: Tensor) -> int:
    return min(weight.numel(), max(_CHUNK, weight[0].numel()))
