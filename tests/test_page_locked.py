"""Memory that is to be page-locked, also where the system has no huge pages."""

from __future__ import annotations

import errno
import mmap
from typing import NoReturn

import pytest
import torch

from slipcast.engine.page_locked import _HUGE, _of_huge_pages

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages on request")


class WithoutHugePages(mmap.mmap):
    def madvise(self, *_: int) -> NoReturn:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("kind", [mmap.mmap, WithoutHugePages])
@pytest.mark.parametrize("nbytes", [0, 1, _HUGE + 1])
def test_memory_begins_where_a_huge_page_does(
    nbytes: int, kind: type[mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "mmap", kind)
    memory = _of_huge_pages(nbytes)
    assert (memory.dtype, tuple(memory.shape)) == (torch.uint8, (nbytes,))
    assert not nbytes or memory.data_ptr() % _HUGE == 0
    assert not memory.any()
