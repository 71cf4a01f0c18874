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
