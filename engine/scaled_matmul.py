"""Matrix products of float8 codes with scales: one definition, on tensor cores through torch and emulated elsewhere.

    y = (codes_x @ codes_w.T) * scale_x * scale_w + bias

The product accumulates in float32 (see ``_multiply`` for Hopper), the scales are applied to the sum, and the result is
rounded once to the dtype asked for; the bias is added after that. Codes are float8_e4m3fn.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from slipcast.engine.kernels.plain import LARGEST, SMALLEST_SCALE

ALIGNMENT = 16
"""The kernels need rows of whole 16 bytes, of codes and of results."""
_PLACEHOLDER = 1.0


def input_scale_obstacle(value: float) -> str | None:
    """Why a checkpoint's static scale of activations can't be used, as a clause; None where it can.

    Exactly 1.0 is what producers write who have not calibrated: at that scale most activations of a usual size lose
    most of their bits.
    """
    if not isfinite(value):
        return f"it is {value}, not finite"
    if value <= 0:
        return f"it is {value:g}, not positive"
    if value == _PLACEHOLDER:
        return "it is exactly 1.0, the placeholder of checkpoints without calibration"
    return None


def tensor_scale(rows: Tensor) -> Tensor:
    """One scale for all rows, float32 ``[]``: the largest magnitude over 448."""
    amax = torch.linalg.vector_norm(rows, float("inf"), dtype=torch.float32)
    return amax.mul_(1 / LARGEST).clamp_(min=SMALLEST_SCALE)


def scaled_matmul(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``(codes @ weight.T) * scale * weight_scale``, accumulated in float32 and rounded once.

    Args:
        codes: float8 ``[M, K]``, as ``quantise_rows`` gives them.
        scale: their scale, float32 ``[M, 1]`` or ``[]``.
        weight: float8 ``[N, K]``; on a GPU K and N must be multiples of ``ALIGNMENT``.
        weight_scale: float32 ``[N]`` or ``[]``; None stands for 1.
        dtype: of the result.

    Returns:
        ``[M, N]``.
    """
    if codes.is_cuda:
        return _on_tensor_cores(codes, scale, weight, weight_scale, dtype)
    with torch.autocast(codes.device.type, enabled=False):
        product = codes.to(torch.float32) @ weight.to(torch.float32).t()
    return _under_scales(product, scale, weight_scale).to(dtype)


def _under_scales(product: Tensor, scale: Tensor, weight_scale: Tensor | None) -> Tensor:
    product = product.mul_(scale)
    return product if weight_scale is None else product.mul_(weight_scale)


def _on_tensor_cores(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Let the kernel apply the scales where it can: two single ones always, rows and columns in bfloat16."""
    outputs = weight.shape[0]
    if scale.ndim == 0 and (weight_scale is None or weight_scale.ndim == 0):
        one = torch.ones_like(scale)
        return _multiply(codes, scale, weight, one if weight_scale is None else weight_scale, dtype)
    if dtype == torch.bfloat16:
        of_rows = scale.expand(codes.shape[0], 1).contiguous()
        of_columns = scale.new_ones(outputs) if weight_scale is None else weight_scale.expand(outputs).contiguous()
        return _multiply(codes, of_rows, weight, of_columns.view(1, outputs), dtype)
    one = scale.new_ones(())
    return _under_scales(_multiply(codes, one, weight, one, torch.float32), scale, weight_scale).to(dtype)


def _multiply(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel's product. On Hopper it accumulates fast: sums are kept in fewer bits than float32 has.

    ``benchmarks/gpu.py kernels`` prints what that is worth and what it costs: on an H200 a tenth of the time, and of
    the error of 0.037 that codes have anyway less than 0.001.
    """
    return torch._scaled_mm(
        codes.contiguous(), weight.t(), scale_a=scale, scale_b=weight_scale, out_dtype=dtype, use_fast_accum=True
    )
