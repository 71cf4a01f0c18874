"""Reads the header of one safetensors file: every size is checked before it is used, and no weight is read.

The format: 8 bytes with the header's length (little endian), the header as JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from slipcast.registry.dtypes import DTYPE_BITS
from slipcast.registry.errors import HeaderError
from slipcast.registry.foreign_files import SNIFFED_BYTES, foreign_content
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.untrusted_files import open_regular, parse_json_object

_MIB = 1 << 20
_LENGTH_BYTES = 8
_MOST_BITS = 1 << 63
_MOST_DIMENSIONS = 64
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_WRITTEN_BADLY = "The program that wrote the file is faulty, or the file is damaged: download or convert it again."


def read_safetensors(path: Path, *, limit_mib: int = 100) -> Header:
    """The header of one safetensors file, with every byte range counted from the beginning of the file.

    Accepts nothing that the safetensors library refuses, but for headers of more than its 100 MB; names that stand
    twice, which that library lets pass, are refused as the format's description says.

    Args:
        path: the file.
        limit_mib: the longest header that is read.

    Raises:
        HeaderError: the file is unreadable, truncated, damaged or something else than safetensors.
        UnsupportedFileError: its content is a pickle, a zip archive or GGUF, or the path is no regular file.
    """
    with open_regular(path) as (file, size):
        raw = _read_header(file, size, path, limit_mib)
    entries = parse_json_object(raw, path, what="the header")
    metadata = _metadata(entries.pop("__metadata__", {}), path)
    ranges = _ranges(entries, path)
    data_start = _LENGTH_BYTES + len(raw)
    _check_tiling(ranges, size - data_start, path)
    tensors = {
        name: TensorInfo(
            name, entries[name]["dtype"], tuple(entries[name]["shape"]), 0, start + data_start, stop + data_start
        )
        for start, stop, name in ranges
    }
    return Header(path, "safetensors", (path,), MappingProxyType(tensors), MappingProxyType(metadata))


def _read_header(file: BinaryIO, size: int, path: Path, limit_mib: int) -> bytes:
    first = file.read(SNIFFED_BYTES)
    if len(first) <= _LENGTH_BYTES:
        found = f"the file is only {size} bytes long"
        raise foreign_content(path, first, size) or _not_safetensors(path, found)
    (length,) = struct.unpack_from("<Q", first)
    plausible = first[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and length >= 2
    if not plausible or length > size - _LENGTH_BYTES or length > limit_mib * _MIB:
        foreign = None if plausible and length <= limit_mib * _MIB else foreign_content(path, first, size)
        raise foreign or _bad_length(path, length, size, limit_mib, plausible)
    file.seek(_LENGTH_BYTES)
    raw = file.read(length)
    if len(raw) < length:
        raise _not_safetensors(path, f"the file ended after {len(raw)} of its header's {length} bytes")
    return raw


def _bad_length(path: Path, length: int, size: int, limit_mib: int, plausible: bool) -> HeaderError:
    if length > size - _LENGTH_BYTES:
        found = f"the first 8 bytes say that the header takes {length} bytes, but only {size - _LENGTH_BYTES} follow"
        if plausible and length <= limit_mib * _MIB:
            missing = length - (size - _LENGTH_BYTES)
            return HeaderError(
                f"{found}: the file is cut off inside its header, at least {missing} bytes are missing",
                expected="a complete file",
                hint="Download the file again.",
                path=path,
            )
        return _not_safetensors(path, found)
    if plausible:
        return HeaderError(
            f"the header takes {length} bytes",
            expected=f"at most {limit_mib} MiB",
            hint="Real headers are far smaller; where this one is wanted, raise the limit (limit_mib).",
            path=path,
        )
    return _not_safetensors(path, "the header doesn't begin with '{'")


def _not_safetensors(path: Path, found: str) -> HeaderError:
    return HeaderError(
        f"not a safetensors file, or a damaged one: {found}",
        expected="8 bytes with the header's length, then a header that begins with '{'",
        hint="Download the file again, or name another file.",
        path=path,
    )


def _metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict):
        raise HeaderError(
            f"__metadata__ is a {type(value).__name__}", expected="an object of strings", hint=_WRITTEN_BADLY, path=path
        )
    wrong = [name for name, entry in value.items() if not isinstance(entry, str)]
    if wrong:
        raise HeaderError(
            f"__metadata__ holds {len(wrong)} values that are no strings",
            expected="an object of strings",
            hint=_WRITTEN_BADLY,
            path=path,
            items=wrong,
        )
    return value


def _ranges(entries: Mapping[str, Any], path: Path) -> list[tuple[int, int, str]]:
    """The byte ranges in the order of the bytes, counted from the data section's start, as ``(start, stop, name)``."""
    ranges = []
    faults = {}
    for name, entry in entries.items():
        fault = _fault(entry)
        if fault:
            faults[name] = fault
        else:
            ranges.append((*entry["data_offsets"], name))
    if faults:
        first, fault = next(iter(faults.items()))
        raise HeaderError(
            f"{len(faults)} of the {len(entries)} tensors are described wrongly; of {first!r}, {fault}",
            expected="for each tensor a known dtype, a shape, and the range of bytes that these two take",
            hint=_WRITTEN_BADLY,
            path=path,
            items=faults,
        )
    return sorted(ranges)


def _fault(entry: Any) -> str | None:
    """What is wrong with one tensor's description, as a clause, or None."""
    if not isinstance(entry, dict):
        return f"the description is a {type(entry).__name__}"
    if entry.keys() != _FIELDS:
        return f"the description has the fields {', '.join(sorted(entry)) or '(none)'}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"the dtype is {dtype!r}, which the format doesn't have"
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
        return f"the shape is {_shown(shape)}"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"the byte range is {_shown(offsets)}"
    bits = prod(shape) * DTYPE_BITS[dtype]
    if prod(map(_at_least_one, shape)) * DTYPE_BITS[dtype] >= _MOST_BITS:
        return f"the shape {_shown(shape)} is too large"
    if bits % 8:
        return f"the shape {_shown(shape)} in {dtype} is no whole number of bytes"
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"{dtype} {_shown(shape)} takes {bits // 8} bytes, but the range has {offsets[1] - offsets[0]}"
    return None


def _at_least_one(size: int) -> int:
    return size or 1


def _counts(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and item >= 0 for item in value)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_tiling(ranges: list[tuple[int, int, str]], data_bytes: int, path: Path) -> None:
    """Refuse ranges that overlap, leave gaps, or don't end where the file does."""
    position = 0
    previous: tuple[str, ...] = ()
    for start, stop, name in ranges:
        if start != position:
            kind = "a gap" if start > position else "an overlap"
            raise HeaderError(
                f"there is {kind} of {abs(start - position)} bytes before {name!r}",
                expected="tensors that follow one another without gaps",
                hint=_WRITTEN_BADLY,
                path=path,
                items=(*previous, name),
            )
        position = stop
        previous = (name,)
    if position > data_bytes:
        cut = [name for _, stop, name in ranges if stop > data_bytes]
        raise HeaderError(
            f"the file is cut off: {position - data_bytes} of {position} bytes of tensors are missing",
            expected="a file that holds all the tensors of its header",
            hint="Download the file again; the first one ended early.",
            path=path,
            items=cut,
        )
    if position < data_bytes:
        raise HeaderError(
            f"{data_bytes - position} bytes follow the last tensor",
            expected="a file that ends with its last tensor",
            hint=_WRITTEN_BADLY,
            path=path,
        )
