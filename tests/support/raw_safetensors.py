"""Safetensors files put together byte by byte, so that they can be wrong in one place."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """One tensor's description; by default two float32 numbers at the start of the data."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header and these bytes after it; ``length`` overrides the header's true length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


RawTensor = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and bytes."""


def read_raw(path: Path) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """A file's tensors and metadata, without the library."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, each in header.items():
        first, last = each["data_offsets"]
        tensors[name] = (each["dtype"], tuple(each["shape"]), raw[start + first : start + last])
    return tensors, metadata


def write_tensors(path: Path, tensors: dict[str, RawTensor], metadata: dict[str, str]) -> Path:
    """A well-formed file of tensors whose descriptions may be wrong."""
    header: dict[str, Any] = {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = entry(dtype, list(shape), [len(body), len(body) + len(raw)])
        body += raw
    return write_raw(path, header, body)
