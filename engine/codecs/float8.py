"""float8 with float32 scales: for each output, for the whole weight, for blocks of columns, or none.

e4m3fn has 4 significant bits, so values down to 2**-15 of their row's largest keep a relative error of at most 2**-4:
0.026 in relative L2 on normally distributed weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from slipcast.engine.codecs import native
from slipcast.engine.codecs.base import CODES, SCALE, Part, Parts, Shape
from slipcast.engine.codecs.chunks import prefix, refuse_not_finite, row_amax, scale_for
from slipcast.engine.codecs.scaled import Granularity, ScaledCodec
from slipcast.engine.kernels.operators import dequantise
from slipcast.registry.errors import QuantisationError

_NAME = re.compile(
    r"(?P<dtype>float8_e4m3fn|float8_e5m2)/(?:(?P<granularity>row|tensor|none)|block(?P<block>[1-9][0-9]{0,5}))(?P<axis>@1)?"
)


@dataclass(frozen=True)
class Float8(ScaledCodec):
    """float8 codes with float32 scales.

    Two granularities more than ``ScaledCodec`` lists:

    | granularity | scale | |
    |---|---|---|
    | block | ``[N, K / block, 1]`` | one for each ``block`` columns of a row of a matrix |
    | none | | the codes are the values |

    Attributes:
        block: columns under one scale, for blocks only.
        dtype: of the codes; e5m2 is only read.
    """

    block: int = 0
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
        return cls(granularity, 1 if match["axis"] else 0, int(match["block"] or 0), getattr(torch, match["dtype"]))

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return self.dtype

    @property
    def largest(self) -> float:
        """448 for e4m3fn."""
        return torch.finfo(self.dtype).max

    @property
    def encodes(self) -> bool:
        """Only e4m3fn is written."""
        return self.dtype is torch.float8_e4m3fn

    def obstacle(self, shape: Shape) -> str | None:
        """Codes need a matrix or a stack of them; blocks need a matrix whose columns they divide."""
        if self.granularity == "block" and (len(shape) != 2 or shape[1] % self.block):
            return f"blocks of {self.block} columns don't divide it"
        return super().obstacle(shape)

    def _parts(self, shape: Shape) -> dict[str, Part]:
        if self.granularity == "none":
            return {CODES: Part(self.dtype, shape)}
        if self.granularity == "block":
            scale = Part(torch.float32, (shape[0], shape[1] // self.block, 1))
            return {CODES: Part(self.dtype, shape), SCALE: scale}
        return super()._parts(shape)

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``codes * scale`` in float32, cast once; without a scale the codes' own values."""
        if self.granularity == "none":
            return parts[CODES].to(dtype)
        if self.granularity == "block":
            return dequantise(self._under_scales(parts[CODES]), parts[SCALE].view(-1, 1), dtype).view(shape)
        return super().decode(parts, shape, dtype)

    def _under_scales(self, rows: Tensor) -> Tensor:
        return rows.reshape(-1, self.block) if self.granularity == "block" else rows

    def defers(self, device: torch.device) -> bool:
        """On GPUs, where scales of rows or blocks show in the end what is not finite."""
        return self.streams and self.granularity != "none" and device.type == "cuda"

    def refuse_not_finite(self, parts: Parts) -> None:
        """Of values that are not finite the scales are not either."""
        refuse_not_finite(parts[SCALE])

    def encode_rows_into(self, rows: Tensor, out: Parts, scratch: Tensor) -> None:
        """Encode rows whose scales depend on nothing but themselves; without scales, values beyond 448 become 448."""
        if self.granularity != "none":
            by_row = self._under_scales(rows.flatten(1)), self._under_scales(out[CODES].flatten(1)), out[SCALE].view(-1)
            if self.defers(rows.device):
                self._encode_unseen(*by_row)
            elif not native.encode_rows(*by_row):
                super().encode_rows_into(rows, out, scratch)
            return
        rows = rows.flatten(1)
        row_amax(rows, scratch)
        values = prefix(scratch, rows).copy_(rows).clamp_(-self.largest, self.largest)
        out[CODES].flatten(1).copy_(values)

    def _encode_unseen(self, rows: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Encode rows (``[n, K]``) with the bits of the other ways, in one pass that casts as it writes.

        A scale is not finite where a value of its row is not.
        """
        rows = rows if rows.dtype.itemsize <= torch.float32.itemsize else rows.to(torch.float32)
        amax = torch.linalg.vector_norm(rows, float("inf"), dim=1, dtype=torch.float32)
        scale.copy_(scale_for(amax, self.largest))
        torch.div(rows, scale[:, None], out=codes)

    def _round_into(self, codes: Tensor, quotients: Tensor) -> None:
        """Round by casting.

        The quotients need no clamp: a scale is at least ``amax / 448`` rounded to float32, so none exceeds 448 by more
        than a rounding error, and all up to 464 round to 448.
        """
        codes.copy_(quotients)
