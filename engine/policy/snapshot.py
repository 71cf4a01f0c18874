"""What a device has at one moment: the only look at the machine that the policies take."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from slipcast.engine.devices import Device

_MIB = 2**20
_SHARE = 20
"""A twentieth of a device's memory is left alone: torch's allocator loses some to fragments."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A device and its memory at one moment.

    Attributes:
        device: what it can do.
        total: its memory in bytes.
        free: what of it nobody uses, in bytes; memory that torch holds without using it counts as free.
        reserve: bytes that are left alone.
        unified: whether it shares its memory with the host, so that moving a model to the host frees nothing.
    """

    device: Device
    total: int
    free: int
    reserve: int
    unified: bool = False

    @property
    def budget(self) -> int:
        """Bytes that a pipeline may take."""
        return max(0, self.free - self.reserve)


def take_snapshot(device: Device, reserve_mib: int, *, collect: bool = True) -> Snapshot:
    """Look at a device.

    Args:
        device: the device; of one that is only described all memory is free.
        reserve_mib: what to leave alone at least, in MiB: the setting ``device_reserve_mib``.
        collect: whether tensors that nobody can reach are let go of first, which takes long; else they count as used.
    """
    if collect:
        gc.collect()
    free, total, unified = _memory(device)
    return Snapshot(device, total, free, reserve_of(total, reserve_mib), unified)


def reserve_of(total: int, reserve_mib: int) -> int:
    """Bytes of a device's memory that are left alone; the plan of a single model and that of a pipeline both ask here.

    Args:
        total: the device's memory in bytes.
        reserve_mib: the setting ``device_reserve_mib``; a twentieth of the memory is left alone in any case.
    """
    return max(reserve_mib * _MIB, total // _SHARE)


def _memory(device: Device) -> tuple[int, int, bool]:
    """Free and all bytes of a device, and whether they are the host's as well."""
    if not device.present:
        return device.memory or 0, device.memory or 0, False
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch_device)
        held = torch.cuda.memory_reserved(device.torch_device) - torch.cuda.memory_allocated(device.torch_device)
        integrated = torch.cuda.get_device_properties(device.torch_device).is_integrated
        return free + held, total, bool(integrated)
    if device.kind == "xpu":
        free, total = torch.xpu.mem_get_info(device.torch_device)
        return free, total, False
    if device.kind == "mps":
        total = int(torch.mps.recommended_max_memory())
        return total - int(torch.mps.driver_allocated_memory()), total, True
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host_free() or total, total, True


def host_free() -> int | None:
    """Memory that the host could give without swapping, in bytes (Linux: MemAvailable); None where it does not say."""
    try:
        text = _MEMINFO.read_text()
    except OSError:
        return None
    found = [line for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else None
