"""What the fused kernels compute, in plain torch: their definition, their oracle, and what runs where they don't."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
"""448."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros: no quotient is NaN, and none overflows."""


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """See ``operators.quantise_rows`` without a static scale."""
    amax = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True, dtype=torch.float32)
    scale = amax.mul_(1 / LARGEST).clamp_(min=SMALLEST_SCALE)
    # Within +-448 but for two roundings, which the cast takes back, so there is nothing to clamp.
    return _rounded_products(rows, scale.reciprocal()), scale


def quantise_under(rows: Tensor, scale: Tensor) -> Tensor:
    """The codes of ``operators.quantise_rows`` under a static scale."""
    return (rows * scale.reciprocal().view(1, 1)).clamp_(-LARGEST, LARGEST).to(FLOAT8)


def _rounded_products(rows: Tensor, factor: Tensor) -> Tensor:
    """``rows * factor`` in float32, cast once. Outside a compiler, which does this by itself, it takes one kernel."""
    if torch.compiler.is_compiling():
        return (rows * factor).to(FLOAT8)
    return torch.mul(rows, factor, out=torch.empty(rows.shape, dtype=FLOAT8, device=rows.device))


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``operators.dequantise``.

    Codes of 8 bits are exact in float16 and bfloat16. So on a GPU one kernel can read them in the small dtype, multiply
    in float32 and write the small dtype, with the same result and without a copy in float32.
    """
    if codes.is_cuda and codes.dtype.itemsize == 1 and dtype.itemsize == 2:
        small = codes.to(dtype)
        return torch.mul(small, scale, out=small)
    return codes.to(torch.float32).mul_(scale).to(dtype)
