"""Brings windows to a GPU by safetensors' own ``prefetch``, where the installed version has it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import safetensors
import torch

from slipcast.engine.driver_pool import DriverPool
from slipcast.engine.reader import changed, checked_size, torch_dtype
from slipcast.engine.windows import Window
from slipcast.registry.errors import DeviceError, SlipcastError
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.quantisation import Bundle

HOST_BYTES = 512 * 2**20
"""What safetensors keeps page-locked for all that is under way, as Linux showed for 0.9.0rc1 (``RssShmem``, as it does
for all that CUDA allocates on the host): it takes it at once, and keeps it for the process."""


def prefetch_obstacle() -> str | None:
    """Why the installed versions can't prefetch, as a clause; None where they can."""
    prefetch = getattr(safetensors.safe_open, "prefetch", None)
    if prefetch is None:
        return f"safetensors {safetensors.__version__} has no prefetch"
    if not (_takes(prefetch, "plan", "device", "threads") and _takes(safetensors.safe_open, "backend")):
        return f"safetensors {safetensors.__version__} has another prefetch than the one known here"
    return "safetensors prefetches to CUDA devices alone" if torch.version.hip else None


def _takes(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        return set(arguments) <= inspect.signature(function).parameters.keys()
    except ValueError:  # nobody says what it takes
        return False


class PrefetchFetcher:
    """See ``fetching.Fetcher``. Its own threads, which are none of Python's, read and copy."""

    def __init__(self, header: Header, bundles: Mapping[str, Bundle], device: torch.device, *, threads: int) -> None:
        """Open nothing yet.

        Args:
            header: whose files are read.
            bundles: the file's weights.
            device: a CUDA device.
            threads: how many read one window.
        """
        self._header, self._bundles = header, bundles
        self._device, self._threads = device, threads
        self._files: dict[int, Any] = {}
        self._under_way: set[FetchedByPrefetch] = set()
        self._beginner = ThreadPoolExecutor(1, "slipcast-prefetch")

    def start(self, window: Window) -> FetchedByPrefetch:
        """See ``Fetcher``. A thread begins: the first time safetensors page-locks its memory."""
        plans: dict[int, dict[str, slice | None]] = defaultdict(dict)
        slices: dict[str, tuple[TensorInfo, int, int]] = {}
        for span in window.spans:
            tensor = self._bundles[span.source].weight
            rows = _rows(tensor, span.first, span.last)
            plans[tensor.file][tensor.name] = None if rows is None else slice(*rows)
            skipped = 0 if rows is None else rows[0] * _row_bytes(tensor)
            slices[span.source] = (tensor, span.first - skipped, span.last - skipped)
        fetched = FetchedByPrefetch(self, self._beginner.submit(self._begin, plans), slices, self._under_way)
        self._under_way.add(fetched)
        return fetched

    def _begin(self, plans: Mapping[int, dict[str, slice | None]]) -> dict[int, Any]:
        """The loader of each file."""
        for file in plans:
            self._open(file)
        loaders: dict[int, Any] = {}
        try:
            for file, plan in plans.items():
                loaders[file] = self._files[file].prefetch(plan, device=str(self._device), threads=self._threads)
        except Exception as error:
            _close(loaders)
            raise self.failed(error) from error
        return loaders

    def close(self) -> None:
        """See ``Fetcher``."""
        self._beginner.shutdown(cancel_futures=True)
        for fetched in list(self._under_way):
            fetched.release()
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            DriverPool(self._device.index or 0).trim()

    def path_of(self, tensor: TensorInfo) -> Any:
        """The file that holds a tensor."""
        return self._header.files[tensor.file]

    def failed(self, error: Exception) -> SlipcastError:
        """The error to raise for one of safetensors'.

        Raises:
            HeaderError: a file is shorter than its header says.
        """
        for index in list(self._files):  # a thread may be opening the next one
            checked_size(self._header, index)
        return DeviceError(
            f"safetensors' prefetch failed: {error}",
            expected="a file that can be read and a device with enough free memory",
            hint="load with reader=slabs, or with a smaller ahead_mib",
            path=self._header.path,
        )

    def _open(self, index: int) -> None:
        if index in self._files:
            return
        checked_size(self._header, index)
        path = str(self._header.files[index])
        try:  # not mapped: a mapped file that is truncated ends the process
            self._files[index] = safetensors.safe_open(path, framework="pt", backend="pread")
        except Exception as error:
            raise self.failed(error) from error


class FetchedByPrefetch:
    """See ``fetching.Fetched``."""

    def __init__(
        self,
        fetcher: PrefetchFetcher,
        begun: Future[dict[int, Any]],
        slices: Mapping[str, tuple[TensorInfo, int, int]],
        under_way: set[FetchedByPrefetch],
    ) -> None:
        self._fetcher, self._begun, self._slices, self._under_way = fetcher, begun, slices, under_way
        self._landed: dict[str, torch.Tensor] = {}

    def bytes_of(self, source: str) -> torch.Tensor:
        """See ``Fetched``."""
        if source not in self._landed:
            tensor, first, last = self._slices[source]
            loaders = self._begun.result()
            try:
                came = loaders[tensor.file].take(tensor.name)
            except Exception as error:
                raise self._fetcher.failed(error) from error
            raw = came.reshape(-1).view(torch.uint8)
            if came.dtype != torch_dtype(tensor) or raw.numel() < last:
                path = self._fetcher.path_of(tensor)
                raise changed(path, f"{tensor.name} came as {came.dtype} {list(came.shape)}")
            self._landed[source] = raw[first:last]
        return self._landed[source]

    def release(self) -> None:
        """See ``Fetched``."""
        self._landed.clear()
        self._under_way.discard(self)
        if not self._begun.cancel() and self._begun.exception() is None:
            _close(self._begun.result())


def _close(loaders: Mapping[int, Any]) -> None:
    for loader in loaders.values():
        loader.close()


def _row_bytes(tensor: TensorInfo) -> int:
    return tensor.nbytes // tensor.shape[0]


def _rows(tensor: TensorInfo, first: int, last: int) -> tuple[int, int] | None:
    """The rows along the stored tensor's first axis that hold some of its bytes; None for all of it."""
    if (first, last) == (0, tensor.nbytes) or not tensor.shape or not tensor.nbytes:
        return None
    row = _row_bytes(tensor)
    return first // row, -(-last // row)
