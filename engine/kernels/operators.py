"""Quantising and dequantising rows: by a fused kernel where the device runs one, else in plain torch, to the same bits.

The kernels are registered with torch as operators, ``slipcast::quantise_rows``, ``slipcast::quantise_under``,
``slipcast::dequantise_rows`` and ``slipcast::dequantise_nvfp4``, so that ``torch.compile`` traces through them and fake
tensors pass. They are defined by schema: the wrapper that torch's decorator puts around an operator would cost four
times as much in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from slipcast.engine.kernels import plain, plain_nvfp4
from slipcast.engine.kernels.targets import reads_float8, runs_kernels

_plainly: ContextVar[bool] = ContextVar("plainly", default=False)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Leave everything to plain torch, but for what is compiled: Triton takes half a second to import and to begin.

    A forward makes up for that; a load, which decodes each weight once, does not.
    """
    before = _plainly.set(True)
    try:
        yield
    finally:
        _plainly.reset(before)


_VALUES = (torch.float16, torch.bfloat16, torch.float32)
_CODES = (plain.FLOAT8, torch.int8)


def quantise_rows(rows: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scale of activations.

    Args:
        rows: float ``[M, K]``.
        input_scale: a static scale for all rows, float32 ``[]``; values beyond 448 times it are clamped. None gives
            each row its own scale, the largest magnitude of its values over 448.

    Returns:
        float8 ``[M, K]``, and the scale in float32: ``[]`` if static, else ``[M, 1]``. Rows of zeros stay zeros. Rows
        with values that are not finite give rows without a finite value, but a static scale clamps infinities too.
    """
    fused = _fused(rows, joins=True) and rows.dtype in _VALUES
    if input_scale is not None:
        quantise_under = torch.ops.slipcast.quantise_under.default if fused else plain.quantise_under
        return quantise_under(rows, input_scale), input_scale
    codes, scale = torch.ops.slipcast.quantise_rows.default(rows) if fused else plain.quantise_rows(rows)
    return codes, scale


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * scale`` computed in float32 and rounded once to ``dtype``.

    Args:
        codes: float8, int8 or float32, of any shape.
        scale: float32, with as many dimensions as the codes: one without dimensions would be rounded to the codes'
            dtype first.
        dtype: float16, bfloat16, float32 or float64.
    """
    if _fused(codes) and dtype in _VALUES and codes.dtype in _CODES and codes.is_contiguous() and _of_rows(scale):
        matrix = codes if codes.ndim == 2 else codes.flatten(1)
        values: Tensor = torch.ops.slipcast.dequantise_rows.default(matrix, scale.flatten(), dtype)
        return values if codes.ndim == 2 else values.view(codes.shape)
    return plain.dequantise(codes, scale, dtype)


def dequantise_nvfp4(
    codes: Tensor, scale: Tensor, scale_2: Tensor, rows: int, columns: int, comfy: bool, dtype: torch.dtype
) -> Tensor:
    """``magnitude * (scale * scale_2)`` computed in float32 and rounded once to ``dtype``, without the padding.

    Args:
        codes: uint8, two columns a byte, with ``rows`` rows or more.
        scale: float8_e4m3fn, one for each 16 columns of a row.
        scale_2: float32 ``[]``.
        rows: of the weight.
        columns: of the weight.
        comfy: whether the even column lies in the high nibble and scales are swizzled; else neither.
        dtype: float16, bfloat16, float32 or float64.
    """
    fused = _fused(codes) and dtype in _VALUES
    operator = torch.ops.slipcast.dequantise_nvfp4.default if fused else plain_nvfp4.dequantise
    values: Tensor = operator(codes, scale, scale_2, rows, columns, comfy, dtype)
    return values


def _of_rows(scale: Tensor) -> bool:
    """Whether scales lie along the first axis alone."""
    return scale.ndim >= 2 and scale.numel() == scale.shape[0]


def _fused(tensor: Tensor, joins: bool = False) -> bool:
    """Whether a kernel takes it.

    Args:
        tensor: what it reads.
        joins: whether a compiler joins the plain version with what stands before it, which is then as fast; one that
            can't read float8 itself does not.
    """
    if not runs_kernels(tensor.device):
        return False
    if torch.compiler.is_compiling():
        return not (joins and reads_float8(tensor.device))
    return not _plainly.get()


def _quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    if not runs_kernels(rows.device):
        return plain.quantise_rows(rows)
    from slipcast.engine.kernels.quantise_kernel import launch_quantise

    codes, scale = launch_quantise(rows, None, 1 / plain.LARGEST, plain.SMALLEST_SCALE)
    return codes.view(plain.FLOAT8), scale


def _quantise_under(rows: Tensor, scale: Tensor) -> Tensor:
    if not runs_kernels(rows.device):
        return plain.quantise_under(rows, scale)
    from slipcast.engine.kernels.quantise_kernel import launch_quantise

    codes, _ = launch_quantise(rows, scale, 1 / plain.LARGEST, plain.SMALLEST_SCALE)
    return codes.view(plain.FLOAT8)


def _dequantise_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not runs_kernels(codes.device):
        return plain.dequantise(codes, scale.view(-1, 1), dtype)
    from slipcast.engine.kernels.dequantise_kernel import launch_dequantise

    return launch_dequantise(codes, scale, dtype)


def _dequantise_nvfp4(
    codes: Tensor, scale: Tensor, scale_2: Tensor, rows: int, columns: int, comfy: bool, dtype: torch.dtype
) -> Tensor:
    if not runs_kernels(codes.device):
        return plain_nvfp4.dequantise(codes, scale, scale_2, rows, columns, comfy, dtype)
    from slipcast.engine.kernels.nvfp4_kernel import launch_dequantise_nvfp4

    return launch_dequantise_nvfp4(codes, scale, scale_2, rows, columns, comfy, dtype)


def _fake_quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=plain.FLOAT8), rows.new_empty((rows.shape[0], 1), dtype=torch.float32)


def _fake_quantise_under(rows: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001 - the operator's arguments
    return rows.new_empty(rows.shape, dtype=plain.FLOAT8)


def _fake_dequantise_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return codes.new_empty(codes.shape, dtype=dtype)


def _fake_dequantise_nvfp4(
    codes: Tensor,
    scale: Tensor,  # noqa: ARG001
    scale_2: Tensor,  # noqa: ARG001
    rows: int,
    columns: int,
    comfy: bool,  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "slipcast::quantise_rows": ("(Tensor rows) -> (Tensor, Tensor)", _quantise_rows, _fake_quantise_rows),
    "slipcast::quantise_under": ("(Tensor rows, Tensor scale) -> Tensor", _quantise_under, _fake_quantise_under),
    "slipcast::dequantise_rows": (
        "(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
        _dequantise_rows,
        _fake_dequantise_rows,
    ),
    "slipcast::dequantise_nvfp4": (
        "(Tensor codes, Tensor scale, Tensor scale_2, SymInt rows, SymInt columns, bool comfy, ScalarType dtype)"
        " -> Tensor",
        _dequantise_nvfp4,
        _fake_dequantise_nvfp4,
    ),
}
for _name, (_schema, _implementation, _fake) in _OPERATORS.items():
    torch.library.define(_name, _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(_name, "default", _implementation)
    torch.library.register_fake(_name, _fake)
