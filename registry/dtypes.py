"""The element types of the safetensors format, by the names that stand in a file's header."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
        "U64": 64,
        "F64": 64,
        "C64": 64,
    }
)
"""Every dtype of the format with the bits of one element; the list is that of safetensors 0.8."""

_FLOAT = frozenset(name for name in DTYPE_BITS if name.startswith(("F", "BF")))


def item_bits(dtype: str) -> int:
    """Bits that one element of ``dtype`` takes in a file.

    Raises:
        KeyError: the safetensors format has no such dtype.
    """
    return DTYPE_BITS[dtype]


def is_float(dtype: str) -> bool:
    """Whether elements of ``dtype`` are real floating-point numbers, of any width down to four bits."""
    return dtype in _FLOAT
