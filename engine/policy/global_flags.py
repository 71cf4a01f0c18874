"""Torch's global flags that a pipeline changes: recorded when the first one does, restored when the last one goes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_LOCK = threading.Lock()
_HOLDERS = 0
_RESTORE: Callable[[], None] | None = None


class Tf32:
    """Products and convolutions of float32 in TF32, until it is released or what it is for is gone."""

    def __init__(self) -> None:
        self._held = True
        _acquire()

    def release(self) -> None:
        """Let go, once: the last one restores what was set before the first."""
        with _LOCK:
            held, self._held = self._held, False
        if held:
            _release()

    def until_gone(self, owner: Any) -> None:
        """Release when an object is gone."""
        weakref.finalize(owner, self.release)


def _acquire() -> None:
    global _HOLDERS, _RESTORE
    with _LOCK:
        _HOLDERS += 1
        if _HOLDERS == 1:
            _RESTORE = _set_tf32()


def _release() -> None:
    global _HOLDERS, _RESTORE
    with _LOCK:
        _HOLDERS -= 1
        if _HOLDERS == 0 and _RESTORE is not None:
            _RESTORE()
            _RESTORE = None


def _set_tf32() -> Callable[[], None]:
    """Set the flags; returns what restores them.

    By the older names, which set the newer too: torch refuses to read the older where only the newer were set.
    """
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    newer = (products, convolutions.conv, convolutions.rnn)
    before = tuple(each.fp32_precision for each in newer)
    products.allow_tf32 = convolutions.allow_tf32 = True

    def restore() -> None:
        products.allow_tf32 = before[0] == "tf32"
        convolutions.allow_tf32 = before[1] == "tf32"
        for each, value in zip(newer, before, strict=True):
            each.fp32_precision = value

    return restore
