"""Recorded headers of published checkpoints, as headers: what family files are held against."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipcast.registry.dtypes import DTYPE_BITS
from slipcast.registry.errors import HeaderError, SettingsError
from slipcast.registry.header import Header, Shape, TensorInfo
from slipcast.registry.names import Names
from slipcast.registry.quantisation import Bundles, assemble
from slipcast.registry.side_tensors import MARKER
from slipcast.registry.untrusted_files import read_json_object

PACKAGE = "slipcast.families"
_LIMIT_MIB = 16
_UNKNOWN_DTYPE = "BF16"
_HOLE = re.compile(r"\{([0-9,-]+)\}")
_MARKERS = tuple(
    json.dumps(marker).encode()
    for marker in (
        {"format": "float8_e4m3fn"},
        {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
        {"format": "float8_e4m3fn", "full_precision_matrix_mult": False},
        {"format": "int8_tensorwise"},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256, "per_row": True},
    )
)
"""What programs write into a layer's marker. A record says only how long it is, which tells these apart."""


@dataclass
class Records:
    """A folder of recorded headers, ``NAME.json`` each, read when they are asked for.

    Attributes:
        folder: the folder.
        scratch: an empty folder for what has to lie in a file.
    """

    folder: Path
    scratch: Path
    _headers: dict[str, Header] = field(default_factory=dict)
    _bundles: dict[str, Bundles] = field(default_factory=dict)
    _shapes: dict[str, Names] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all records."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def header(self, name: str) -> Header:
        """The header of this name, as one of a file ``NAME.safetensors`` of which nothing but its markers can be read.

        Raises:
            HeaderError: there is no such record, or it is damaged.
        """
        if name not in self._headers:
            self._headers[name] = self._read(name)
        return self._headers[name]

    def bundles(self, name: str) -> Bundles:
        """The tensors of this header, sorted."""
        if name not in self._bundles:
            self._bundles[name] = assemble(self.header(name))
        return self._bundles[name]

    def shapes(self, name: str) -> Names:
        """The names and logical shapes of this header, prefixes included."""
        if name not in self._shapes:
            self._shapes[name] = Names({key: bundle.shape for key, bundle in self.bundles(name).weights.items()})
        return self._shapes[name]

    def config(self, name: str) -> Mapping[str, Any]:
        """A published configuration, from the folder ``model_configs`` beside that of the headers.

        Raises:
            HeaderError: there is no such file, or it is damaged.
        """
        path = self.folder.parent / "model_configs" / f"{name}.json"
        config = read_json_object(path, limit_mib=_LIMIT_MIB).get("config")
        if not isinstance(config, dict):
            raise _damaged(path, "no object config")
        return config

    def _read(self, name: str) -> Header:
        path = self.folder / f"{name}.json"
        record = read_json_object(path, limit_mib=_LIMIT_MIB)
        compact = record.get("tensors")
        if not isinstance(compact, dict):
            raise _damaged(path, "no object tensors")
        tensors: dict[str, TensorInfo] = {}
        position = sum(map(len, _MARKERS))
        for pattern, value in compact.items():
            dtype, shape = _description(path, pattern, value)
            for tensor in expand_name(pattern):
                start = position if not tensor.endswith(f".{MARKER}") else _marker_place(path, tensor, shape)
                stop = start + prod(shape) * DTYPE_BITS[dtype] // 8
                position = max(position, stop)
                tensors[tensor] = TensorInfo(tensor, dtype, shape, 0, start, stop)
        metadata = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in (record.get("metadata") or {}).items()
        }
        ordered = dict(sorted(tensors.items(), key=lambda item: item[1].start))
        return Header(
            path=self.scratch / f"{name}.safetensors",
            container="safetensors",
            files=(self._marker_file(),),
            tensors=MappingProxyType(ordered),
            metadata=MappingProxyType(metadata),
        )

    def _marker_file(self) -> Path:
        path = self.scratch / "markers"
        if not path.exists():
            path.write_bytes(b"".join(_MARKERS))
        return path


def builtin_folder() -> Path:
    """The folder of the built-in family files."""
    return Path(str(resources.files(PACKAGE)))


def recorded_headers(named: Path | None = None) -> Path | None:
    """The folder of the recorded headers.

    Args:
        named: the folder that the user names; else that of the repository that slipcast runs from.

    Returns:
        The folder; None where none is named and slipcast runs from an installed package.

    Raises:
        SettingsError: the named folder is not there.
    """
    folder = named or builtin_folder().parent / "tests" / "data" / "headers"
    if folder.is_dir():
        return folder
    if named is None:
        return None
    raise SettingsError(
        f"the folder of headers {named}",
        expected="a folder of recorded headers, NAME.json each",
        hint="name tests/data/headers of a copy of the repository",
        field="headers",
    )


def source_of(folder: Path, name: str) -> str | None:
    """Where the file whose header is recorded under this name comes from; None where there is no such record.

    Raises:
        HeaderError: the record is damaged.
    """
    path = folder / f"{name}.json"
    source = read_json_object(path, limit_mib=_LIMIT_MIB).get("source") if path.is_file() else None
    return None if source is None else " ".join(str(source).split())


def expand_name(compact: str) -> Iterator[str]:
    """The names that a compact one stands for: ``layers.{0-29}.qkv`` for thirty."""
    texts = _HOLE.split(compact)
    choices = [[text] if place % 2 == 0 else list(_indices(text)) for place, text in enumerate(texts)]
    return map("".join, itertools.product(*choices))


def _indices(text: str) -> Iterator[str]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))


def _description(path: Path, name: str, value: Any) -> tuple[str, Shape]:
    """Dtype and shape of a record's entry; a dtype that nobody recorded is taken to be bfloat16."""
    try:
        dtype, shape = value
        if (dtype is None or dtype in DTYPE_BITS) and all(type(size) is int and size >= 0 for size in shape):
            return dtype or _UNKNOWN_DTYPE, tuple(shape)
    except (TypeError, ValueError):
        pass
    raise _damaged(path, f"{name} is described as {value!r}")


def _marker_place(path: Path, name: str, shape: Shape) -> int:
    start = 0
    for marker in _MARKERS:
        if len(marker) == prod(shape):
            return start
        start += len(marker)
    raise _damaged(path, f"the marker {name} of {prod(shape)} bytes, which no known program writes")


def _damaged(path: Path, found: str) -> HeaderError:
    return HeaderError(
        f"a record with {found}",
        expected="a recorded header: metadata, and for each tensor its dtype and shape",
        hint="restore the file from the repository",
        path=path,
    )
