"""Reads the header of a GGUF file with the standard library: metadata, and each tensor's type, shape and place.

Source: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from slipcast.registry.errors import HeaderError, UnsupportedFormatError
from slipcast.registry.foreign_files import SNIFFED_BYTES, foreign_content
from slipcast.registry.ggml import BLOCK_TYPES, BlockType
from slipcast.registry.header import Header, Shape, TensorInfo
from slipcast.registry.untrusted_files import open_regular

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Beginning of the metadata key that holds the shape which a tensor had before it was folded into rows."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 62
_LONGEST_KEPT = 4096
_MOST_KEPT_ITEMS = 8
_MIB = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)


def is_gguf_name(name: str) -> bool:
    """Whether a file's name says that it is GGUF."""
    return name.lower().endswith(".gguf")


def read_gguf(path: Path, *, limit_mib: int = 100) -> Header:
    """The header of one GGUF file.

    Shapes are logical and in torch's order (the file's own is reversed), dtypes are ggml's names. Of the metadata the
    scalars, the short strings and the short lists are kept, as text; vocabularies are passed over.

    Args:
        path: the file.
        limit_mib: the longest header that is read.

    Raises:
        HeaderError: the file is unreadable, truncated, damaged or something else than GGUF.
        UnsupportedFormatError: a tensor type that is not known.
    """
    with open_regular(path) as (file, size):
        first = file.read(SNIFFED_BYTES)
        if not first.startswith(_MAGIC):
            raise foreign_content(path, first, size, "GGUF") or _damaged(path, "the file does not begin with GGUF")
        file.seek(len(_MAGIC))
        cursor = _Cursor(file, path, min(size, limit_mib * _MIB), len(_MAGIC))
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise _damaged(path, f"GGUF of version {version}", "version 2 or 3, little endian")
        tensor_count, entry_count = cursor.number("<Q"), cursor.number("<Q")
        if tensor_count > _MOST_TENSORS or entry_count > _MOST_TENSORS:
            raise _damaged(path, f"a header of {tensor_count} tensors and {entry_count} entries")
        metadata = _read_metadata(cursor, entry_count)
        entries = [_read_entry(cursor) for _ in range(tensor_count)]
        tensors = _place(entries, cursor.position, metadata, size, path)
    kept = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    return Header(path, "gguf", (path,), MappingProxyType(tensors), MappingProxyType(kept))


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    kind: BlockType
    shape: Shape
    offset: int


@dataclass(slots=True)
class _Cursor:
    """Reads forward through the header, never past its limit."""

    file: BinaryIO
    path: Path
    limit: int
    position: int

    def take(self, count: int) -> bytes:
        if count > self.limit - self.position:
            raise _damaged(self.path, f"{count} bytes to read at byte {self.position}, past the end of the header")
        content = self.file.read(count)
        if len(content) < count:
            raise _damaged(self.path, f"the file ends at byte {self.position + len(content)}, inside its header")
        self.position += count
        return content

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a name that is no UTF-8, before byte {self.position}") from error


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        value = _read_value(cursor, cursor.number("<I"), levels=2)
        if key in metadata:
            raise _damaged(cursor.path, f"the metadata {key!r} twice")
        if value is not None and (not isinstance(value, str) or len(value) <= _LONGEST_KEPT):
            metadata[key] = value
    return metadata


def _read_value(cursor: _Cursor, kind: int, levels: int) -> Any:
    """One value; None of a list that is too long to keep, which is read all the same to get past it."""
    if kind == _STRING:
        return cursor.string()
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind != _ARRAY or levels == 0:
        raise _damaged(cursor.path, f"metadata of the unknown type {kind}")
    item, count = cursor.number("<I"), cursor.number("<Q")
    if item in _SCALARS:
        width = struct.calcsize(_SCALARS[item])
        content = cursor.take(count * width)
        return None if count > _MOST_KEPT_ITEMS else [value for (value,) in struct.iter_unpack(_SCALARS[item], content)]
    if count > cursor.limit - cursor.position:
        raise _damaged(cursor.path, f"a list of {count} items")
    values = [_read_value(cursor, item, levels - 1) for _ in range(count)]
    return None if count > _MOST_KEPT_ITEMS else values


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    dimensions = cursor.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise _damaged(cursor.path, f"the tensor {name!r} of {dimensions} dimensions")
    shape = tuple(reversed([cursor.number("<Q") for _ in range(dimensions)]))
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in BLOCK_TYPES:
        raise UnsupportedFormatError(
            f"the tensor {name!r} of the ggml type {number}",
            expected="a type of the GGUF specification: " + ", ".join(kind.name for kind in BLOCK_TYPES.values()),
            hint="the file is damaged, or made by a newer program: use another quantisation of the model",
            path=cursor.path,
        )
    return _Entry(name, BLOCK_TYPES[number], shape, offset)


def _place(
    entries: list[_Entry], header_end: int, metadata: Mapping[str, Any], size: int, path: Path
) -> dict[str, TensorInfo]:
    """Tensors by name in the order of their bytes, each inside the file and none over another."""
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= 1 << 20:
        raise _damaged(path, f"an alignment of {alignment!r}")
    start = -(-header_end // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        nbytes = entry.kind.size(entry.shape) if _elements_fit(entry.shape) else None
        if nbytes is None:
            raise _damaged(path, f"{entry.name!r} {list(entry.shape)}, which blocks of {entry.kind.name} don't fill")
        first = start + entry.offset
        if entry.name in tensors:
            raise _damaged(path, f"the tensor {entry.name!r} twice")
        if first < end:
            raise _damaged(path, f"the tensor {entry.name!r} over the one before it")
        end = first + nbytes
        if end > size:
            raise _damaged(path, f"{end - size} bytes of the tensor {entry.name!r} are missing: the file is truncated")
        tensors[entry.name] = TensorInfo(entry.name, entry.kind.name, entry.shape, 0, first, end)
    return tensors


def _elements_fit(shape: Shape) -> bool:
    total = 1
    for length in shape:
        total *= length
    return total < _MOST_ELEMENTS


def original_shape(metadata: Mapping[str, str], name: str) -> Shape | None:
    """The shape that a tensor had before it was folded into rows, where the file says so.

    Only convolutions of some converters are folded; sizes that are no positive integers are not believed.
    """
    text = metadata.get(ORIGINAL_SHAPE + name)
    if text is None:
        return None
    try:
        sizes = json.loads(text)
    except ValueError:
        return None
    if not isinstance(sizes, list) or not all(type(length) is int and length > 0 for length in sizes):
        return None
    return tuple(sizes)


def _damaged(path: Path, found: str, expected: str = "a GGUF file as its specification describes it") -> HeaderError:
    return HeaderError(found, expected=expected, hint="download or convert the file again", path=path)
