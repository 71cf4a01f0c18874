"""Page-locked memory of the host, from which copies to a GPU need not be waited for."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import torch

_HUGE = 2 * 2**20
"""Bytes of a huge page, as most processors have them."""


class PageLocked:
    """Bytes of page-locked memory.

    Where the system has huge pages on request, it is made of these: locking page by page takes three times as long.

    Attributes:
        tensor: uint8, on the host.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate and lock.

        Args:
            nbytes: how many.
        """
        self._registered = 0
        if sys.platform == "linux" and torch.version.hip is None and hasattr(mmap, "MADV_HUGEPAGE"):
            self.tensor = _of_huge_pages(nbytes)
            if _succeeds(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)):
                self._registered = self.tensor.data_ptr()
                return
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def release(self) -> None:
        """Unlock; no copy may be under way."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
        self._registered = 0
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _of_huge_pages(nbytes: int) -> torch.Tensor:
    """Bytes that begin where a huge page does, each page touched, so that the lock need not fetch it."""
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that is built without them, as some containers have
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    first = -tensor.data_ptr() % _HUGE
    return tensor[first : first + nbytes].zero_()


def _succeeds(result: Any) -> bool:
    return int(result) == 0
