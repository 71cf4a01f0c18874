"""Brings windows of the file to a GPU ahead of the steps that take them: what all ways of doing so have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from slipcast.engine.reader import BufferedReader, torch_dtype
from slipcast.engine.windows import Window
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.quantisation import Bundle


class Fetched(Protocol):
    """A window on its way to the device."""

    def bytes_of(self, source: str) -> torch.Tensor:
        """The bytes of a weight's span on the device, uint8 ``[n]``; waits for them.

        Raises:
            HeaderError: the file is no longer what its header said.
            DeviceError: the device or its memory failed.
        """

    def release(self) -> None:
        """Let go of the window, once everything that takes its bytes has been begun."""


class Fetcher(Protocol):
    """A way of bringing windows to a device."""

    def start(self, window: Window) -> Fetched:
        """Begin with a window; returns at once. No more are under way at a time than the fetcher was made for."""

    def close(self) -> None:
        """Stop what is under way and let go of everything; nothing that was fetched may be in use."""


class WindowReader:
    """A reader (see ``reader.Reader``) whose elements lie on the device already, as far as the window has them.

    What no window has, scales beside codes and what a single step needs beyond a window's size, is read when asked for.
    """

    lasting = False

    def __init__(
        self,
        header: Header,
        bundles: Mapping[str, Bundle],
        fetcher: Fetcher,
        cut: Sequence[Window],
        *,
        under_way: int,
        pinned: bool,
    ) -> None:
        self._fetcher = fetcher
        self._others = BufferedReader(header, pinned=pinned)
        self._sources = {bundles[span.source].weight.name: span.source for window in cut for span in window.spans}
        self._waiting = deque(cut)
        self._under_way: deque[tuple[Window, Fetched]] = deque()
        self._most = under_way
        self._window: tuple[dict[str, tuple[int, int]], Fetched] | None = None

    def start(self) -> None:
        """Begin with as many windows as may be under way."""
        while self._waiting and len(self._under_way) + (self._window is not None) < self._most:
            window = self._waiting.popleft()
            self._under_way.append((window, self._fetcher.start(window)))

    def in_turn(self) -> Iterator[Window]:
        """The windows in order; one is there until the next is asked for."""
        self.start()
        while self._under_way:
            window, fetched = self._under_way.popleft()
            self._window = {span.source: (span.first, span.last) for span in window.spans}, fetched
            yield window
            self._window = None
            fetched.release()
            self.start()

    def elements(self, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """See ``Reader``."""
        dtype = torch_dtype(tensor)
        first, last = start * dtype.itemsize, stop * dtype.itemsize
        spans, fetched = self._window or ({}, None)
        source = self._sources.get(tensor.name, "")
        begin, end = spans.get(source, (0, 0))
        if fetched is None or not begin <= first <= last <= end or first == last:
            return self._others.elements(tensor, start, stop)
        raw = fetched.bytes_of(source)[first - begin : last - begin]
        return (raw if (first - begin) % dtype.itemsize == 0 else raw.clone()).view(dtype)

    def path_of(self, tensor: TensorInfo) -> Path:
        """See ``Reader``."""
        return self._others.path_of(tensor)

    def close(self) -> None:
        """See ``Reader``."""
        self._window = None
        self._under_way.clear()
        self._waiting.clear()
        self._fetcher.close()
        self._others.close()
