"""Rows of floats to float8_e4m3fn codes in one compiled pass, where numba is installed: the bits of the torch path.

torch goes through a chunk five times on the way from weights to codes, and its cast to float8 is not vectorised on
processors. numba compiles the loops below to vector instructions; ``benchmarks/encode.py`` compares the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("slipcast")

WORTHWHILE = 1 << 31
"""Elements for each thread from which a load has rows encoded so: numba takes 0.90 s to import and to find what it has
compiled before, as long as torch takes longer for 1.8 * 10**9 elements (``benchmarks/encode.py``, on an AMD EPYC)."""
_MOST_THREADS = 6
"""torch shares each operation among its threads, where this is the caller's work alone: with more it is faster."""

_u8, _u32, _f32 = np.uint8, np.uint32, np.float32
_LARGEST = _f32(448)
_SMALLEST_SCALE = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class _Float:
    """How a float's bits become a float32's: ``float32(magnitude << shift) * factor``.

    Attributes:
        bits: the unsigned integer that holds it.
        infinity: the magnitude of infinity; greater ones are not numbers.
        shift: bits that a float32 has more below.
        factor: 2 to the difference of the exponents' biases.
    """

    bits: Any
    infinity: int
    shift: int = 0
    factor: float = 1.0


_FLOATS: Mapping[torch.dtype, _Float] = {
    torch.bfloat16: _Float(np.uint16, 0x7F80, shift=16),
    torch.float16: _Float(np.uint16, 0x7C00, shift=13, factor=2.0**112),
    torch.float32: _Float(np.uint32, 0x7F800000),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_Encode = Callable[[Any, Any, Any], bool]
_compiled: dict[torch.dtype, _Encode | None] = {}
_compiling = Lock()


def prepare(dtype: torch.dtype) -> bool:
    """Compile for rows of a dtype, once in a process; ``encode_rows`` takes them from then on.

    The machine code is kept where numba keeps such, if it can write there: beside this file, or in the user's cache.

    Args:
        dtype: float32, float16 or bfloat16; no others are compiled for.

    Returns:
        Whether that was possible: numba is installed and works here.
    """
    if dtype not in _FLOATS:
        return False
    with _compiling:
        if dtype not in _compiled:
            _compiled[dtype] = _compile(_FLOATS[dtype])
    return _compiled[dtype] is not None


def encode_rows(rows: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Write float8_e4m3fn codes and scales of rows, if this was prepared for; False leaves that to torch.

    The scale is that of ``scale_for``, ``amax / 448``; a code is nearest to ``value / scale`` in float32, ties to even.

    Args:
        rows: float ``[n, k]``.
        codes: float8_e4m3fn ``[n, k]``; written.
        scale: float32 ``[n]``; written.

    Returns:
        Whether it was done. Not where a value is not finite: torch's path finds that too, and says so.
    """
    encode = _compiled.get(rows.dtype)
    if encode is None or not _takes(rows, codes, scale):
        return False
    return encode(_array(rows, _FLOATS[rows.dtype].bits), _array(codes, np.uint8), _array(scale, np.float32))


def _takes(*tensors: Tensor) -> bool:
    """Whether tensors lie in this process's memory as the compiled loops expect it."""
    plain = all(
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % tensor.element_size() == 0
        for tensor in tensors
    )
    return plain and tensors[0].shape[1] > 0 and torch.get_num_threads() <= _MOST_THREADS


def _array(tensor: Tensor, dtype: Any) -> Any:
    """The bits of a tensor, which numpy may not have the dtype of."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy().view(dtype)


def _compile(kind: _Float) -> _Encode | None:
    """The loops, compiled for rows of a kind of float; None where that fails, for whatever reason."""
    try:
        import numba
        from numba import types

        rows, codes = types.Array(numba.from_dtype(np.dtype(kind.bits)), 2, "C"), types.Array(types.uint8, 2, "C")
        signature = types.boolean(rows, codes, types.Array(types.float32, 1, "C"))
        for cache in (True, False):
            try:
                return numba.njit(signature, nogil=True, cache=cache, error_model="numpy")(_encoder(kind))
            except (OSError, RuntimeError):  # numba finds no folder for its cache, or can't write there
                if not cache:
                    raise
    except Exception as error:
        logger.debug("fp8 codes are made by torch, for numba does not compile here: %s", error)
    return None


def _encoder(kind: _Float) -> _Encode:
    """The loops for rows of a kind of float, to be compiled.

    Each operation's result is cut to its own width again: numba widens integers to 64 bits.
    """
    uint, shift, factor = kind.bits, _u32(kind.shift), _f32(kind.factor)
    infinity, width = uint(kind.infinity), 8 * uint().itemsize
    mask, sign_shift = uint(2 ** (width - 1) - 1), uint(width - 8)

    def encode(rows: Any, codes: Any, scales: Any) -> bool:
        for index in range(rows.shape[0]):
            row, out = rows[index], codes[index]
            most = uint(0)
            for column in range(row.shape[0]):
                most = max(most, uint(row[column] & mask))  # magnitudes of floats order like integers
            if most >= infinity:
                return False
            amax = _f32(_u32(_u32(most) << shift).view(_f32) * factor)
            scale = _f32(1) if most == 0 else max(_f32(amax / _LARGEST), _SMALLEST_SCALE)
            scales[index] = scale
            for column in range(row.shape[0]):
                bits = row[column]
                sign = _u32(uint(bits >> sign_shift) & _u32(0x80))
                value = _f32(_u32(_u32(bits & mask) << shift).view(_f32) * factor)
                quotient = _f32(value / scale)
                wide = quotient.view(_u32)
                # Below 2**-6 codes count 2**-9: so does the last bit of 2**14, and adding that rounds to it.
                small = _u32(_f32(quotient + _f32(0x4000)).view(_u32) - _u32(0x46800000))
                # Else 3 of 23 bits of the fraction stay, to even; the bias of the exponent is 7 instead of 127.
                odd = _u32(_u32(wide >> _u32(20)) & _u32(1))
                large = _u32(_u32(wide + _u32(odd + _u32(0xC407FFFF))) >> _u32(20))
                out[column] = _u8(_u32((small if wide < _u32(0x3C800000) else large) | sign))
        return True

    return encode
