"""Reads values out of a checkpoint's files: as views of the mapped file, or through a buffer that is reused."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from slipcast.registry.errors import HeaderError, UnsupportedFormatError
from slipcast.registry.header import Header, TensorInfo

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "U16": torch.uint16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "I64": torch.int64,
        "U64": torch.uint64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""The safetensors names of dtypes that torch has."""

SAFETENSORS_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})
"""The other way round."""


class Reader(Protocol):
    """Gives the elements of a tensor of the file.

    Attributes:
        lasting: whether results stay valid after the next call.
    """

    lasting: bool

    def elements(self, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a tensor, row-major, as one dimension; on the CPU, or where they lie.

        The result is valid until the thread's next call; only a mapped reader's views live longer.
        """

    def path_of(self, tensor: TensorInfo) -> Path:
        """The file that holds a tensor."""

    def close(self) -> None:
        """Let go of the files."""


def open_reader(header: Header, *, mmap: bool) -> Reader:
    """A reader for a header's files.

    Args:
        header: whose files are read.
        mmap: map the files; else read them into a buffer.

    Raises:
        HeaderError: a file is not as long as it was when its header was read.
    """
    return MappedReader(header) if mmap else BufferedReader(header)


def torch_dtype(tensor: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor of the file.

    Raises:
        UnsupportedFormatError: torch has no such dtype.
    """
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedFormatError(
            f"{tensor.name} of the dtype {tensor.dtype}",
            expected="a dtype that torch has: " + ", ".join(TORCH_DTYPES),
            hint="convert the checkpoint to one of these",
        )
    return dtype


def is_aligned(tensor: TensorInfo, rows: tuple[int, int] | None = None) -> bool:
    """Whether the tensor, or its rows from ``rows[0]``, may be viewed in place: torch wants whole items before it."""
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        return False
    skipped = 0 if rows is None else rows[0] * prod(tensor.shape[1:]) * dtype.itemsize
    return (tensor.start + skipped) % dtype.itemsize == 0


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as a tensor whose storage is no larger: copying or saving a tensor takes all of it along."""
    first = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[first : first + view.nbytes]
    return torch.empty(0, dtype=view.dtype).set_(storage, 0, view.shape, view.stride())


class MappedReader:
    """Views of privately mapped files: nothing is read before it is touched; writes leave the file alone."""

    lasting = True

    def __init__(self, header: Header) -> None:
        self._header = header
        self._files: dict[int, torch.Tensor] = {}

    def elements(self, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """See ``Reader``. A tensor that does not begin at a whole item is copied."""
        dtype = torch_dtype(tensor)
        first, last = (tensor.start + element * dtype.itemsize for element in (start, stop))
        raw = self._file(tensor.file)[first:last]
        return (raw if first % dtype.itemsize == 0 else raw.clone()).view(dtype)

    def path_of(self, tensor: TensorInfo) -> Path:
        """See ``Reader``."""
        return self._header.files[tensor.file]

    def close(self) -> None:
        """Let go of the mappings; views that are in use keep theirs."""
        self._files.clear()

    def _file(self, index: int) -> torch.Tensor:
        """All bytes of a file."""
        if index not in self._files:
            path = self._header.files[index]
            size = checked_size(self._header, index)
            storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
            self._files[index] = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
        return self._files[index]


class OpenFiles:
    """A header's files, opened by each thread for itself, so that several read at a time."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._local = threading.local()
        self._files: list[FileIO] = []

    def path_of(self, tensor: TensorInfo) -> Path:
        """The file that holds a tensor."""
        return self._header.files[tensor.file]

    def read_into(self, view: memoryview, tensor: TensorInfo, first: int) -> None:
        """Fill a view with bytes of a tensor.

        Args:
            view: bytes that are written.
            tensor: the tensor.
            first: the first byte, counted from the tensor's own.

        Raises:
            HeaderError: the file is shorter than its header says.
        """
        file = self._file(tensor.file)
        file.seek(tensor.start + first)
        read = 0
        while read < len(view):
            step = file.readinto(view[read:])
            if not step:
                raise changed(self.path_of(tensor), f"it ends inside {tensor.name}")
            read += step

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._local = threading.local()

    def _file(self, index: int) -> FileIO:
        opened: dict[int, FileIO] | None = getattr(self._local, "files", None)
        if opened is None:
            opened = self._local.files = {}
        if index not in opened:
            checked_size(self._header, index)
            opened[index] = self._header.files[index].open("rb", buffering=0)
            self._files.append(opened[index])
        return opened[index]


class BufferedReader:
    """Reads into a buffer that grows to the largest request and is reused; each thread has its own."""

    lasting = False

    def __init__(self, header: Header, *, pinned: bool = False) -> None:
        self._files = OpenFiles(header)
        self._pinned = pinned
        self._local = threading.local()

    def elements(self, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """See ``Reader``."""
        dtype = torch_dtype(tensor)
        buffer = self._buffer((stop - start) * dtype.itemsize)
        self._files.read_into(memoryview(buffer.numpy()), tensor, start * dtype.itemsize)  # type: ignore[arg-type]
        return buffer.view(dtype)

    def path_of(self, tensor: TensorInfo) -> Path:
        """See ``Reader``."""
        return self._files.path_of(tensor)

    def close(self) -> None:
        """Close the files and let go of the buffers."""
        self._files.close()
        self._local = threading.local()

    def _buffer(self, count: int) -> torch.Tensor:
        """The first bytes of this thread's buffer."""
        found: torch.Tensor | None = getattr(self._local, "buffer", None)
        if found is None or found.numel() < count:
            found = self._local.buffer = None  # the old one goes before the new one comes
            found = self._local.buffer = torch.empty(count, dtype=torch.uint8, pin_memory=self._pinned)
        return found[:count]


def checked_size(header: Header, index: int) -> int:
    """The size of a file in bytes, if it still holds all that the header says.

    Raises:
        HeaderError: it does not.
    """
    path = header.files[index]
    needed = max((tensor.stop for tensor in header.tensors.values() if tensor.file == index), default=0)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise changed(path, f"it can't be opened ({error.strerror})") from error
    if size < needed:
        raise changed(path, f"it has {size:,} bytes where its header needs {needed:,}")
    return size


def changed(path: Path, what: str) -> HeaderError:
    """The error of a file that is no longer what its header said."""
    return HeaderError(
        f"the file has changed since its header was read: {what}",
        expected="a file that stays as it is while it is loaded",
        hint="wait until the download or copy is complete, then load again",
        path=path,
    )
