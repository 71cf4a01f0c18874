"""Small number formats decoded from their descriptions with numpy, independently of the engine."""

from __future__ import annotations

import numpy as np
import torch


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|``, in float64."""
    difference = actual.detach().cpu().double() - expected.detach().cpu().double()
    return float(difference.norm() / expected.detach().cpu().double().norm())


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, uint8, with the last axis widened by the item size; of a scalar ``[item size]``."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor if tensor.ndim else tensor.view(1)).view(torch.uint8).numpy()


def small_float(codes: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Values of sign-exponent-mantissa codes without infinities, float64: NaN codes are the caller's."""
    codes = codes.astype(np.int64)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where((codes >> (exponent_bits + mantissa_bits)) & 1, -1.0, 1.0)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1 + fraction) * np.exp2(exponent.astype(np.float64) - bias)
    subnormal = fraction * np.exp2(1.0 - bias)
    return sign * np.where(exponent == 0, subnormal, normal)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float8_e4m3fn: 1-4-3, bias 7, no infinities, all ones is NaN, largest 448."""
    return np.where(codes & 0x7F == 0x7F, np.nan, small_float(codes, 4, 3, 7))


def e5m2(codes: np.ndarray) -> np.ndarray:
    """float8_e5m2: 1-5-2, bias 15, IEEE-like, largest 57344."""
    values = small_float(codes, 5, 2, 15)
    special = (codes >> 2) & 0x1F == 0x1F
    infinite = np.copysign(np.inf, values)
    return np.where(special, np.where(codes & 3, np.nan, infinite), values)
