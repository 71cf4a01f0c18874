"""Gives back what a failed or dropped pipeline held: frames, cycles, and the memory that torch keeps for later."""

from __future__ import annotations

import gc
import traceback
from types import FrameType

import torch


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the frames that an error went through, and of those of its causes.

    A traceback keeps every variable of every frame alive, among them half-loaded models and activations, for as long as
    somebody keeps the error. Names and lines stay readable.

    Args:
        error: the error; frames that still run are left alone.
    """
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        for frame, _ in traceback.walk_tb(each.__traceback__):
            _clear(frame)
        rest += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            rest += each.exceptions


def _clear(frame: FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        return
    frame.f_locals  # noqa: B018 - where locals() was called, brings the dict that it left in the frame up to date


def release_memory() -> None:
    """Collect cycles, and hand back the device memory that torch keeps without using it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short: of a device, or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
