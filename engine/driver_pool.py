"""CUDA's own pool of memory, from which others than torch allocate: how much they had of it, and giving the rest back.

safetensors' prefetch allocates there, which torch's statistics do not show and torch's allocator can't use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_RESERVED_NOW, _USED_NOW, _MOST_USED = 5, 7, 8
"""Of the enumeration CUmemPool_attribute."""


class DriverPool:
    """The default pool of one device, by the driver's functions; without a driver it does nothing."""

    def __init__(self, index: int) -> None:
        """Find the pool.

        Args:
            index: the device's number.
        """
        self._driver, self._pool = _driver(), ctypes.c_void_p()
        device = ctypes.c_int()
        found = (
            self._driver is not None
            and not self._driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
            and not self._driver.cuDeviceGetDefaultMemPool(ctypes.byref(self._pool), device)
        )
        if not found:
            self._driver = None

    @property
    def used(self) -> int:
        """Bytes that are allocated from it."""
        return self._get(_USED_NOW)

    @property
    def most_used(self) -> int:
        """The most bytes that were allocated from it since ``watch``."""
        return self._get(_MOST_USED)

    @property
    def reserved(self) -> int:
        """Bytes that it keeps from the device, allocated or not."""
        return self._get(_RESERVED_NOW)

    def watch(self) -> None:
        """Begin to look for the most anew."""
        if self._driver is not None:
            zero = ctypes.c_uint64(0)
            self._driver.cuMemPoolSetAttribute(self._pool, ctypes.c_int(_MOST_USED), ctypes.byref(zero))

    def trim(self) -> None:
        """Give back to the device what is not allocated."""
        if self._driver is not None:
            self._driver.cuMemPoolTrimTo(self._pool, ctypes.c_size_t(0))

    def _get(self, attribute: int) -> int:
        value = ctypes.c_uint64(0)
        if self._driver is not None:
            self._driver.cuMemPoolGetAttribute(self._pool, ctypes.c_int(attribute), ctypes.byref(value))
        return value.value


@cache
def _driver() -> Any:
    """The driver's library, or None."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuMemPoolTrimTo") else None
