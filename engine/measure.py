"""Measures what a load took: bytes of a model, anonymous memory of the process, allocations of a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from slipcast.engine.devices import Device
from slipcast.engine.driver_pool import DriverPool

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.01


def count_bytes(model: nn.Module) -> int:
    """Elements x item size over all parameters and buffers, each tensor once however many names it has."""
    return sum(tensor.numel() * tensor.element_size() for tensor in unique_tensors(model))


def unique_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer once."""
    seen: set[int] = set()
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def anonymous_bytes() -> int | None:
    """Memory of this process that no file backs, in bytes (Linux: RssAnon); None where the system does not say."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


class Peaks:
    """A context that watches memory while a load runs.

    Attributes:
        seconds: how long it took.
        host_anonymous: the most anonymous host memory above that at the start, in bytes; None where unknown.
        device: the most device memory that was asked of torch, and the most that others allocated beside it, above that
            at the start, in bytes; None on a CPU. The two may fall into different moments.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = DriverPool(device.torch_device.index or 0) if device.kind == "cuda" else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seconds = 0.0
        self.host_anonymous: int | None = None
        self.device: int | None = None

    def __enter__(self) -> Peaks:
        self._base = anonymous_bytes()
        self._most = self._base or 0
        if self._pool is not None:
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)
            self._pool.watch()
            self._device_base = self._requested("current") + self._pool.used
        self._thread.start()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            torch.cuda.synchronize(self._device.torch_device)
            self.device = self._requested("peak") + self._pool.most_used - self._device_base
        self.seconds = time.perf_counter() - self._began
        self._stop.set()
        self._thread.join()
        self._look()
        if self._base is not None:
            self.host_anonymous = self._most - self._base

    def _requested(self, which: str) -> int:
        """Bytes of tensors on the device, without what torch's allocator adds to round them up."""
        return int(torch.cuda.memory_stats(self._device.torch_device)[f"requested_bytes.all.{which}"])

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, anonymous_bytes() or 0)
