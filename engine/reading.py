"""Decides how the file is read: mapped or copied, and how many chunks at a time."""

from __future__ import annotations

import torch

from slipcast.engine.devices import Device
from slipcast.engine.plan import Decision

_MOST_THREADS = 8
"""More cores than this wait for memory."""
_CHUNK_MIB, _DEVICE_CHUNK_MIB = 6, 32


def decide_mmap(mmap: bool, device: Device) -> Decision:
    """Whether tensors that need no cast stay in the mapped file. Engaged is "true" or "false"."""
    requested = str(mmap).lower()
    if device.kind != "cpu":
        reason = "a device is fed through pinned memory, never from a mapped file"
        return Decision(requested=requested, engaged="false", reason=reason)
    mapped, copied = (
        "tensors that are not cast are views of the file",
        "as requested: tensors are copied out of the file",
    )
    return Decision(requested=requested, engaged=requested, reason=mapped if mmap else copied)


def decide_threads(requested: int | None) -> Decision:
    """How many chunks are read and cast at a time. Engaged is a number.

    Args:
        requested: the setting; None leaves it to torch's number of threads.
    """
    asked = "auto" if requested is None else str(requested)
    if requested is not None:
        return Decision(requested=asked, engaged=asked, reason="as requested")
    cores = torch.get_num_threads()
    reason = f"torch uses {cores} here" + (f", and more than {_MOST_THREADS} wait for memory" * (cores > _MOST_THREADS))
    return Decision(requested=asked, engaged=str(min(cores, _MOST_THREADS)), reason=reason)


def decide_chunk(requested: int | None, device: Device) -> Decision:
    """How large chunks are, in MiB of float32 elements. Engaged is a number."""
    if requested is not None:
        return Decision(requested=str(requested), engaged=str(requested), reason="as requested")
    if device.kind == "cpu":
        reason = "a chunk stays in a core's share of the cache"
        return Decision(requested="auto", engaged=str(_CHUNK_MIB), reason=reason)
    reason = "a copy to the device takes longer than what starts it"
    return Decision(requested="auto", engaged=str(_DEVICE_CHUNK_MIB), reason=reason)
