"""Work on a weight in chunks of rows: on a processor of a million elements, so that buffers stay in its caches."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor

from slipcast.registry.errors import QuantisationError

_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 24
_MAGNITUDE_16_BITS = 0x7FFF
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def row_chunks(weight: Tensor) -> Iterator[slice]:
    """Slices of whole rows that cover a weight."""
    step = max(1, _elements(weight) // weight[0].numel())
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def scratch_for(weight: Tensor) -> Tensor:
    """A float32 buffer for the largest of a weight's ``row_chunks``."""
    elements = min(weight.numel(), max(_elements(weight), weight[0].numel()))
    return torch.empty(elements, dtype=torch.float32, device=weight.device)


def _elements(weight: Tensor) -> int:
    """Elements of a chunk: on a GPU there is no cache to stay in, and each kernel has to pay for its launch."""
    return _GPU_CHUNK if weight.is_cuda else _CHUNK


def prefix(scratch: Tensor, like: Tensor) -> Tensor:
    """The beginning of a buffer, in the shape of another tensor."""
    return scratch[: like.numel()].view(like.shape)


def row_amax(rows: Tensor, scratch: Tensor) -> Tensor:
    """Largest magnitude of each row of a matrix, float32 ``[n]``.

    Magnitudes of 16-bit floats are compared as integers, which order alike (NaN above infinity): torch has fast integer
    kernels on processors, but widens bfloat16 for a comparison of floats.

    Raises:
        QuantisationError: values that are infinite or not numbers.
    """
    if rows.dtype.itemsize == 2:
        integers = scratch.view(torch.int16)[: rows.numel()].view(rows.shape)
        torch.bitwise_and(rows.view(torch.int16), _MAGNITUDE_16_BITS, out=integers)
        amax = integers.amax(1).view(rows.dtype).to(torch.float32)
    else:
        amax = prefix(scratch, rows).copy_(rows).abs_().amax(1)
    refuse_not_finite(amax)
    return amax


def refuse_not_finite(amax: Tensor) -> None:
    """Look at the largest magnitudes, or the scales, of some rows: float32, of any shape.

    Raises:
        QuantisationError: some are infinite or not numbers.
    """
    if not isfinite(float(amax.amax())):  # the largest of numbers of which one is none is none
        finite = torch.isfinite(amax)
        raise QuantisationError(
            f"a weight with values that are not finite, under {int((~finite).sum())} of {amax.numel()} scales",
            expected="finite weights, since the largest magnitude gives the scale",
            hint="the checkpoint is damaged, or was saved in a dtype too small for it; get another copy, or keep this "
            "weight in its float dtype",
        )


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """``amax / largest``; 1 for rows of zeros, and never so small that dividing by it overflows.

    Divided by a tensor: by a number a GPU would multiply with the reciprocal, and other bits than a CPU's come out.
    """
    scale = (amax / torch.full_like(amax, largest)).clamp_(min=_SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, scale)
