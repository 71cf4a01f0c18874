"""Brings windows to a device through slabs: page-locked buffers, allocated once and reused, that threads fill."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from slipcast.engine.page_locked import PageLocked
from slipcast.engine.reader import OpenFiles
from slipcast.engine.windows import Window, aligned
from slipcast.registry.header import Header
from slipcast.registry.quantisation import Bundle


class SlabFetcher:
    """See ``fetching.Fetcher``.

    Threads read the file and begin the copy to the device, on a stream of its own. They do nothing else, so that the
    caller's thread, which casts, seldom waits for Python's lock.
    """

    def __init__(
        self,
        header: Header,
        bundles: Mapping[str, Bundle],
        device: torch.device,
        *,
        size: int,
        count: int,
        threads: int,
    ) -> None:
        """Allocate nothing yet: slabs come with the first windows.

        Args:
            header: whose files are read.
            bundles: the file's weights.
            device: where windows go; on a CPU, in tests, nothing is page-locked.
            size: bytes of the largest window.
            count: how many windows are under way at a time.
            threads: how many are read at a time.
        """
        self._files = OpenFiles(header)
        self._bundles = bundles
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._all = tuple(_Slab(size, device) for _ in range(count))
        self._free, self._placed = list(self._all), False
        begin = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._pool = ThreadPoolExecutor(threads, "slipcast-slab", *begin)

    def start(self, window: Window) -> FetchedSlab:
        """See ``Fetcher``."""
        if not self._placed:  # before any thread page-locks its own memory, for which the driver makes others wait
            self._placed = True
            for each in self._all:
                each.take_place()
        slab = self._free.pop(0)
        return FetchedSlab(window, slab, self._pool.submit(self._fill, window, slab), self._free)

    def close(self) -> None:
        """See ``Fetcher``."""
        self._pool.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        for slab in self._all:
            slab.release_host()
        self._free.clear()
        self._files.close()

    def _fill(self, window: Window, slab: _Slab) -> None:
        host = slab.ready_host()
        view = memoryview(host.numpy())  # type: ignore[arg-type]
        for span, (first, last) in zip(window.spans, _layout(window).values(), strict=True):
            self._files.read_into(view[first:last], self._bundles[span.source].weight, span.first)
        slab.send(window.nbytes, self._stream)


class FetchedSlab:
    """See ``fetching.Fetched``."""

    def __init__(self, window: Window, slab: _Slab, filled: Future[None], free: list[_Slab]) -> None:
        self._slab, self._filled, self._free = slab, filled, free
        self._places = _layout(window)
        self._here = False

    def bytes_of(self, source: str) -> torch.Tensor:
        """See ``Fetched``."""
        if not self._here:
            self._filled.result()
            self._slab.await_copy()
            self._here = True
        first, last = self._places[source]
        return self._slab.there[first:last]

    def release(self) -> None:
        """See ``Fetched``."""
        self._filled.result()
        self._slab.taken_now()
        self._free.append(self._slab)


class _Slab:
    """Memory for one window on both sides, and how far copies and casts have come."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._locked: PageLocked | None = None
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._taken: torch.cuda.Event | None = None
        self.there = torch.empty(0, dtype=torch.uint8, device=device)

    def take_place(self) -> None:
        """Allocate the device's side, in the thread and the stream that will read it."""
        self.there = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self.taken_now()

    def ready_host(self) -> torch.Tensor:
        """The host's side, once the last copy out of it is done. Page-locking takes long: each thread does its own."""
        if self._host is None and self._device.type == "cuda":
            self._locked = PageLocked(self._size)
            self._host = self._locked.tensor
        elif self._host is None:
            self._host = torch.empty(self._size, dtype=torch.uint8)
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def release_host(self) -> None:
        """Let go of the host's side; no copy may be under way."""
        self._host = None
        if self._locked is not None:
            self._locked.release()

    def send(self, nbytes: int, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy the first bytes to the device, after all that still reads what lies there."""
        assert self._host is not None
        if stream is None:
            self.there[:nbytes].copy_(self._host[:nbytes])
            return
        with torch.cuda.stream(stream):
            if self._taken is not None:
                stream.wait_event(self._taken)
            self.there[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(stream)

    def await_copy(self) -> None:
        """Let what the caller does next come after the copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def taken_now(self) -> None:
        """Let the next copy come after all that the caller has begun."""
        if self._device.type == "cuda":
            self._taken = self._taken or torch.cuda.Event()
            self._taken.record(torch.cuda.current_stream(self._device))


def _layout(window: Window) -> dict[str, tuple[int, int]]:
    """Where each span of a window lies in a slab."""
    places: dict[str, tuple[int, int]] = {}
    first = 0
    for span in window.spans:
        places[span.source] = (first, first + span.nbytes)
        first += aligned(span.nbytes)
    return places
