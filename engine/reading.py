"""Decides how the file is read: by whom, how much at a time and how far ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slipcast.engine.devices import Device
from slipcast.engine.plan import Decision
from slipcast.engine.prefetch import prefetch_obstacle
from slipcast.engine.reader import is_aligned
from slipcast.registry.header import Header
from slipcast.registry.settings import Settings

_MOST_THREADS = 8
"""More cores than this wait for memory."""
_CHUNK_MIB, _DEVICE_CHUNK_MIB, _WIDE_CHUNK_MIB, _LARGE_CHUNK_MIB = 6, 64, 32, 160
_SLAB_MIB = 32
"""Holds a chunk of 64 MiB in float32 of a file in half precision, and one of 32 MiB of a file in float32."""
_HALF = 2
"""Bytes of an item in half precision."""
_PREFETCH_MIB = 720
_PREFETCH_WINDOWS = 3
"""Windows under way at a time: while one is cast the others are read."""
_FEW = 20
"""Up to a twentieth of a file may be what prefetch refuses: the thread that casts reads it."""
_SLABS_PER_THREAD = 1.5
"""While each thread fills one, some are copied and cast."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a file is read, as a plan has decided it.

    Attributes:
        mapped: on the CPU, whether tensors that are not cast stay in the mapped file.
        prefetch: on a GPU, whether safetensors' prefetch reads; else slabs do.
        threads: how many threads read, on the CPU also cast.
        chunk_mib: size of the chunks that are cast, in MiB of float32 elements.
        ahead_mib: MiB of the file that are under way to a GPU at a time; 0 where the file is read for the CPU.
    """

    mapped: bool
    prefetch: bool
    threads: int
    chunk_mib: int
    ahead_mib: int

    @classmethod
    def of(cls, settings: Mapping[str, Decision]) -> Reading:
        """The reading that these decisions, those of ``decide_reading``, make up."""
        return cls(
            mapped=settings["mmap"].engaged == "true",
            prefetch="reader" in settings and settings["reader"].engaged == "prefetch",
            threads=int(settings["threads"].engaged),
            chunk_mib=int(settings["chunk_mib"].engaged),
            ahead_mib=int(settings["ahead_mib"].engaged) if "ahead_mib" in settings else 0,
        )

    @property
    def windows(self) -> int:
        """How many windows are under way at a time."""
        return _PREFETCH_WINDOWS if self.prefetch else _slabs(self.threads)

    @property
    def window_bytes(self) -> int:
        """The most bytes of a window that more than one step shares."""
        return self.ahead_mib * 2**20 // self.windows


def decide_reading(settings: Settings, device: Device, header: Header) -> dict[str, Decision]:
    """Decide what makes up a ``Reading``. What has no bearing on the CPU is there only if it was asked for."""
    reader = decide_reader(settings.reader, device, header)
    threads, chunk = decide_threads(settings.threads), decide_chunk(settings.chunk_mib, reader, header)
    ahead = decide_ahead(settings.ahead_mib, reader, int(threads.engaged), chunk)
    on_the_way = {"reader": reader, "ahead_mib": ahead}
    if device.kind == "cpu":
        on_the_way = {name: decision for name, decision in on_the_way.items() if decision.requested != "auto"}
    return {
        "mmap": decide_mmap(settings.mmap, device),
        "threads": threads,
        "chunk_mib": chunk,
        **on_the_way,
    }


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


def decide_reader(requested: str, device: Device, header: Header) -> Decision:
    """How the file comes to a GPU. Engaged is "prefetch" or "slabs", and on the CPU "file"."""
    if device.kind == "cpu":
        return Decision(requested=requested, engaged="file", reason="the CPU reads it as mmap says")
    if requested == "slabs":
        return Decision(requested=requested, engaged=requested, reason="as requested")
    obstacle = _obstacle_of(device) or prefetch_obstacle() or _obstacle_in(header)
    if obstacle is not None:
        return Decision(requested=requested, engaged="slabs", reason=obstacle)
    reason = "as requested" if requested == "prefetch" else "the installed safetensors has it"
    return Decision(requested=requested, engaged="prefetch", reason=reason)


def _obstacle_of(device: Device) -> str | None:
    return None if device.kind == "cuda" else f"safetensors prefetches to no {device.kind}"


def _obstacle_in(header: Header) -> str | None:
    """Why the files can't be prefetched, as a clause."""
    if header.container == "gguf":
        return "safetensors reads no GGUF"
    odd = [tensor for tensor in header.tensors.values() if not is_aligned(tensor)]
    if sum(tensor.nbytes for tensor in odd) * _FEW <= header.nbytes:
        return None
    return f"too much, such as {odd[0].name}, begins at no whole item, or is of a dtype that torch has not"


def decide_threads(requested: int | None) -> Decision:
    """How many threads read. Engaged is a number.

    Args:
        requested: the setting; None leaves it to torch's number of threads.
    """
    asked = "auto" if requested is None else str(requested)
    if requested is not None:
        return Decision(requested=asked, engaged=asked, reason="as requested")
    cores = torch.get_num_threads()
    reason = f"torch uses {cores} here" + (f", and more than {_MOST_THREADS} wait for memory" * (cores > _MOST_THREADS))
    return Decision(requested=asked, engaged=str(min(cores, _MOST_THREADS)), reason=reason)


def decide_chunk(requested: int | None, reader: Decision, header: Header) -> Decision:
    """How large chunks are, in MiB of float32 elements. Engaged is a number."""
    if requested is not None:
        return Decision(requested=str(requested), engaged=str(requested), reason="as requested")
    item = header.nbytes / max(sum(tensor.elements for tensor in header.tensors.values()), 1)
    size, reason = _chunk_of(reader.engaged, item)
    return Decision(requested="auto", engaged=str(size), reason=reason)


def _chunk_of(reader: str, item: float) -> tuple[int, str]:
    """MiB of a chunk, and why, of a file whose items take so many bytes on average."""
    if reader == "file":
        return _CHUNK_MIB, "a chunk stays in a core's share of the cache"
    if reader == "slabs" and item > _HALF:
        return _WIDE_CHUNK_MIB, "a slab has to hold a chunk"
    if reader == "prefetch" and item >= _HALF:
        return _LARGE_CHUNK_MIB, "most weights whole: without codes to decode that takes no memory"
    return _DEVICE_CHUNK_MIB, "a device takes longer for a chunk than what starts it"


def decide_ahead(requested: int | None, reader: Decision, threads: int, chunk: Decision) -> Decision:
    """How many MiB of the file are under way to a GPU at a time. Engaged is a number, 0 on the CPU.

    Of slabs each must hold a chunk: what does not fit is read by the thread that casts, alone.
    """
    asked = "auto" if requested is None else str(requested)
    if reader.engaged not in ("prefetch", "slabs"):
        return Decision(requested=asked, engaged="0", reason="nothing is read ahead for the CPU")
    if requested is not None:
        return Decision(requested=asked, engaged=asked, reason="as requested")
    if reader.engaged == "prefetch":
        return Decision(requested=asked, engaged=str(_PREFETCH_MIB), reason="enough to keep prefetch busy")
    slabs, size = _slabs(threads), _SLAB_MIB if chunk.requested == "auto" else int(chunk.engaged)
    return Decision(requested=asked, engaged=str(slabs * size), reason=f"{slabs} slabs that hold a chunk each")


def _slabs(threads: int) -> int:
    return int(threads * _SLABS_PER_THREAD) + 1
