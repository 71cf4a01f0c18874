"""Headers and configurations of published checkpoints, recorded in tests/data, and files written after them.

The files are written without the library under test.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

from support.compact_names import Description, Tensors, collapse, digest, expand

DATA = Path(__file__).parents[1] / "data"

BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

_MARKERS = [
    {"format": "float8_e4m3fn"},
    {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    {"format": "float8_e4m3fn", "full_precision_matrix_mult": False},
    {"format": "int8_tensorwise"},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256, "per_row": True},
]
_MARKER_OF_LENGTH = {len(json.dumps(marker)): json.dumps(marker).encode() for marker in _MARKERS}
"""A record says of a marker only how long it is, which tells these apart."""

_BLOCK_INDEX = re.compile(r"(?:^|\.)(\d+)\.(?=.*\.)")


@dataclass(frozen=True)
class Record:
    """The header of a published checkpoint.

    Attributes:
        name: the record's file name without its suffix.
        source: where it was recorded.
        verified: what it was compared with, or None.
        metadata: the file's metadata.
        tensors: each tensor's dtype (None where unknown) and shape, in natural order.
    """

    name: str
    source: str
    verified: Mapping[str, Any] | None
    metadata: Mapping[str, str]
    tensors: Tensors = field(repr=False)


def recorded_names() -> list[str]:
    """The names of all recorded headers."""
    return sorted(path.stem for path in (DATA / "headers").glob("*.json"))


@cache
def recorded(name: str) -> Record:
    """The recorded header of this name; don't change what it holds."""
    document = json.loads((DATA / "headers" / f"{name}.json").read_text(encoding="utf-8"))
    tensors = expand({pattern: _description(*value) for pattern, value in document["tensors"].items()})
    if digest(tensors) != document["sha256"]:
        raise ValueError(f"the record {name} does not expand to what was recorded")
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in document["metadata"].items()
    }
    return Record(name, document["source"], document["verified"], metadata, tensors)


def recorded_config_names() -> list[str]:
    """The names of all recorded configurations."""
    return sorted(path.stem for path in (DATA / "model_configs").glob("*.json"))


def recorded_config(name: str) -> dict[str, Any]:
    """The recorded ``config.json`` of this name ("publisher--model.component")."""
    config: dict[str, Any] = json.loads((DATA / "model_configs" / f"{name}.json").read_text(encoding="utf-8"))["config"]
    return config


def record_text(record: Record) -> str:
    """The text of a record's file: one line for each compact name, and for each line of JSON in the metadata."""
    metadata = {key: _readable(value) for key, value in record.metadata.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in collapse(record.tensors).items()]
    head = {"source": record.source, "verified": record.verified}
    return (
        "{\n"
        + "".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n" for key, value in head.items())
        + f' "metadata": {_json_lines(metadata)},\n'
        + f' "sha256": "{digest(record.tensors)}",\n'
        + ' "tensors": {\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )


def write_checkpoint(
    record: Record | Mapping[str, Description],
    path: Path,
    *,
    fill: Literal["zero", "normal"] = "zero",
    prefix: str = "",
    blocks: int | None = None,
    sigma: float = 0.02,
    seed: int = 0,
    dtype: str = "BF16",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a safetensors file with these names, dtypes and shapes; returns ``path``.

    Args:
        record: a record, or each tensor's dtype (or None) and shape by name.
        path: the file.
        fill: "zero" gives a sparse file whose bytes are zero apart from format markers. "normal" gives weights from
            a normal distribution, norms of one, positive scales of about 1e-3 and codes without NaN; what a tensor
            holds depends on ``seed`` and its name alone.
        prefix: put before every name.
        blocks: keep only tensors whose block indices are all below this number.
        sigma: standard deviation of the weights.
        seed: of the values.
        dtype: of tensors whose dtype was not recorded.
        metadata: instead of the record's.
    """
    tensors = record.tensors if isinstance(record, Record) else record
    if metadata is None:
        metadata = record.metadata if isinstance(record, Record) else {}
    kept = {
        name: (known or dtype, _known_shape(name, shape))
        for name, (known, shape) in tensors.items()
        if blocks is None or all(int(index) < blocks for index in _BLOCK_INDEX.findall(name))
    }
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stop = 0
    for name, (kind, shape) in kept.items():
        start, stop = stop, stop + prod(shape) * BYTES[kind]
        header[prefix + name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, stop]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, (kind, shape) in kept.items():
            if name.endswith(".comfy_quant"):
                file.write(_MARKER_OF_LENGTH[prod(shape)])
            elif fill == "zero":
                file.seek(prod(shape) * BYTES[kind], 1)
            else:
                _write_values(file, name, kind, shape, sigma, seed)
        file.truncate(8 + len(raw) + stop)
    return path


def _write_values(file: BinaryIO, name: str, dtype: str, shape: tuple[int, ...], sigma: float, seed: int) -> None:
    import numpy as np

    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    count = prod(shape)
    leaf = name.rsplit(".", 1)[-1]
    is_scale = "scale" in leaf and leaf != "scale"
    values: Any
    if dtype == "BOOL":
        values = random.integers(0, 2, count, dtype=np.uint8)
    elif is_scale and dtype in ("U8", "F8_E8M0"):  # exponents with a bias of 127
        values = random.integers(115, 120, count, dtype=np.uint8)
    elif dtype in ("U8", "I8"):
        values = random.integers(0, 256, count, dtype=np.uint8)
    elif dtype.startswith("F8"):
        values = random.integers(0, 256, count, dtype=np.uint8)
        values[(values & 0x7F) >= (0x7F if dtype == "F8_E4M3" else 0x7C)] = 0x38  # NaN, and infinity in E5M2
        values = values & 0x7F if is_scale else values
    elif dtype[0] in "IU":
        values = random.integers(0, 100, count).astype(f"<{dtype[0].lower()}{BYTES[dtype]}")
    else:
        values = _reals(random, count, sigma, is_scale, len(shape) < 2 and ("norm" in name or leaf == "scale"))
        values = _as_float(values, dtype)
    file.write(values.tobytes())


def _reals(random: Any, count: int, sigma: float, is_scale: bool, is_norm: bool) -> Any:
    import numpy as np

    if is_scale:
        return random.uniform(0.5e-3, 2e-3, count).astype(np.float32)
    if is_norm:
        return np.ones(count, np.float32)
    return random.standard_normal(count, np.float32) * np.float32(sigma)


def _as_float(values: Any, dtype: str) -> Any:
    if dtype == "BF16":
        return ((values.astype("<f4").view("<u4") + 0x8000) >> 16).astype("<u2")
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8"}[dtype])


def _known_shape(name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is None:
        raise ValueError(f"{name} has no recorded shape, so no file can be written")
    return shape


def _description(dtype: str | None, shape: list[int] | None) -> Description:
    return dtype, None if shape is None else tuple(shape)


def _readable(value: str) -> Any:
    """JSON in a metadata string as JSON, where writing it again gives the same string."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) and json.dumps(parsed) == value else value


def _json_lines(value: Any, depth: int = 2) -> str:
    """JSON with every object but the innermost ones spread over lines."""
    if not isinstance(value, dict) or (depth > 2 and not any(isinstance(item, dict) for item in value.values())):
        return json.dumps(value, ensure_ascii=False)
    if not value:
        return "{}"
    pad = " " * depth
    lines = [f"{pad}{json.dumps(key)}: {_json_lines(item, depth + 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{pad[:-1]}}}"
