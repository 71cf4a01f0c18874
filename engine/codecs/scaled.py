"""What the codecs of one byte an element share: codes of the weight's shape, times a float32 scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self

import torch
from torch import Tensor

from slipcast.engine.codecs.base import CODES, SCALE, Codec, Part, Parts, Shape, bits
from slipcast.engine.codecs.chunks import prefix, row_amax, row_chunks, scale_for, scratch_for
from slipcast.engine.kernels.operators import dequantise

Granularity = Literal["row", "tensor", "block", "none"]


@dataclass(frozen=True)
class ScaledCodec(Codec):
    """``weight = codes * scale`` with ``scale = amax / largest code``.

    | granularity | scale | |
    |---|---|---|
    | row | ``[N]`` | one for each of the N outputs |
    | tensor | ``[]`` | one |

    Attributes:
        granularity: how far one scale reaches.
        axis: the axis of the outputs, for rows only.
    """

    granularity: Granularity = "row"
    axis: int = 0

    @property
    @abstractmethod
    def code_dtype(self) -> torch.dtype:
        """Dtype of the codes."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest code's value."""

    @property
    def streams(self) -> bool:
        """True where a scale depends on its own row alone and rows lie one after another."""
        return self.encodes and self.granularity != "tensor" and self.axis == 0

    @property
    def embeds(self) -> bool:
        """True: each row is decoded by its own scale, or by the one of all."""
        return self.axis == 0

    def tile_rows(self, shape: Shape) -> int:
        """Every row has its scale, unless outputs lie on axis 1."""
        return shape[0] if self.axis else 1

    def takes_rows(self, shape: Shape) -> bool:  # noqa: ARG002
        """Unless outputs lie on axis 1."""
        return self.axis == 0

    def for_axis(self, axis: int) -> Self:
        """The codec with its scales along the given axis."""
        return replace(self, axis=axis) if self.granularity == "row" else self

    def obstacle(self, shape: Shape) -> str | None:
        """Codes need a matrix or a stack of them."""
        return "it is not a matrix with elements" if len(shape) < 2 or prod(shape) == 0 else None

    def _parts(self, shape: Shape) -> dict[str, Part]:
        scale = Part(torch.float32, (shape[self.axis],) if self.granularity == "row" else ())
        return {CODES: Part(self.code_dtype, shape), SCALE: scale}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """``codes * scale`` in float32, cast once."""
        own_axis = self.axis if self.granularity == "row" else None
        scale = parts[SCALE].reshape([-1 if axis == own_axis else 1 for axis in range(len(shape))])
        return dequantise(parts[CODES], scale, dtype)

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """Rows of the codes, and of the scales where rows have their own."""
        chosen = {name: part if part.ndim == 0 else part.index_select(0, rows) for name, part in _bits(parts).items()}
        return {name: part.view(parts[name].dtype) for name, part in chosen.items()}

    def join_rows(self, several: Sequence[tuple[Parts, int]]) -> dict[str, Tensor]:
        """The codes, and the scales where rows have their own."""
        first = several[0][0]
        joined = {
            name: part if part.ndim == 0 else torch.cat([bits(parts[name]) for parts, _ in several])
            for name, part in first.items()
        }
        return {name: part.view(first[name].dtype) for name, part in joined.items()}

    def encode_rows_into(self, rows: Tensor, out: Parts, scratch: Tensor) -> None:
        """Encode rows whose scales depend on nothing but themselves."""
        rows, codes = self._under_scales(rows.flatten(1)), self._under_scales(out[CODES].flatten(1))
        scale = scale_for(row_amax(rows, scratch), self.largest)
        out[SCALE].copy_(scale.view(out[SCALE].shape))
        self._write_codes(rows, scale[:, None], codes, scratch)

    def _under_scales(self, rows: Tensor) -> Tensor:
        """A matrix of which each row has its own scale."""
        return rows

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        if self.axis:
            parts = replace(self, axis=0).encode(weight.transpose(0, 1))
            return {**parts, CODES: bits(parts[CODES]).transpose(0, 1).contiguous().view(self.code_dtype)}
        weight = weight.contiguous()
        out = {name: part.empty(weight.device) for name, part in self.parts(tuple(weight.shape)).items()}
        scratch = scratch_for(weight)
        if self.granularity == "tensor":
            self._encode_under_one_scale(weight.flatten(1), out, scratch)
        else:
            for rows in row_chunks(weight):
                self.encode_rows_into(weight[rows], {name: part[rows] for name, part in out.items()}, scratch)
            if self.defers(weight.device):
                self.refuse_not_finite(out)
        return out

    def _encode_under_one_scale(self, weight: Tensor, out: Parts, scratch: Tensor) -> None:
        amax = _largest_of(row_amax(weight[rows], scratch) for rows in row_chunks(weight))
        out[SCALE].copy_(self._one_scale(weight, amax, scratch))
        codes = out[CODES].flatten(1)
        for rows in row_chunks(weight):
            self._write_codes(weight[rows], out[SCALE], codes[rows], scratch)

    def _one_scale(self, weight: Tensor, amax: Tensor, scratch: Tensor) -> Tensor:  # noqa: ARG002 - for subclasses
        """The scale of a whole weight (``[N, K]``) with the given largest magnitude."""
        return scale_for(amax, self.largest)

    def _write_codes(self, rows: Tensor, scale: Tensor, codes: Tensor, scratch: Tensor) -> None:
        """The codes nearest to ``rows / scale``."""
        self._round_into(codes, prefix(scratch, rows).copy_(rows).div_(scale))

    @abstractmethod
    def _round_into(self, codes: Tensor, quotients: Tensor) -> None:
        """Write the codes nearest to the quotients, which are overwritten."""


def _largest_of(amaxes: Iterable[Tensor]) -> Tensor:
    return torch.stack([amax.amax() for amax in amaxes]).amax()


def _bits(parts: Parts) -> dict[str, Tensor]:
    return {name: bits(part) for name, part in parts.items()}
