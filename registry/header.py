"""The values that a checkpoint's header is read into: names, dtypes, shapes and byte ranges, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Container = Literal["safetensors", "sharded safetensors", "diffusers folder", "gguf"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as it lies in a file.

    Attributes:
        name: the tensor's name in the file.
        dtype: the container's spelling: ``BF16``, ``F8_E4M3``, ... (safetensors), ``Q4_K``, ... (GGUF).
        shape: the stored shape; of a packed weight not its logical one.
        file: index into ``Header.files``.
        start: first byte, counted from the beginning of that file.
        stop: one past the last byte.
    """

    name: str
    dtype: str
    shape: Shape
    file: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in its file."""
        return self.stop - self.start

    @property
    def elements(self) -> int:
        """Number of stored elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything that can be known of one model's file or files without reading weights.

    Attributes:
        path: a file, an index, or the folder of a component.
        container: how the tensors are packed.
        files: the files that hold the tensors.
        tensors: every tensor by name, in the order of the bytes.
        metadata: the strings that the files carry beside their tensors.
        config: the folder's ``config.json``, or None.
    """

    path: Path
    container: Container
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    config: Mapping[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a path holds: one model, or a pipeline folder with one header for each component that has weights.

    Attributes:
        path: what the user named, or the file or index that a folder stands for.
        headers: folder name of the component ("transformer", "vae", ...) to its header; ``{"": header}`` for one model.
        classes: for a pipeline folder, the classes that ``model_index.json`` names, as ``(library, class)``.
    """

    path: Path
    headers: Mapping[str, Header]
    classes: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
