"""Made-up checkpoints in every format that can be loaded: headers with zeros behind them, which is enough for plans.

They are the demonstration's checkpoint, cut down to one block of each kind, with the layers of these blocks in codes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4, SCALE_2
from slipcast.engine.converted import ConvertedTensor
from slipcast.engine.plan import Plan, Target
from slipcast.engine.reader import TORCH_DTYPES
from slipcast.engine.safetensors_writer import header_bytes
from slipcast.registry.ggml import BLOCK_TYPES, BLOCK_TYPES_BY_NAME
from slipcast.registry.header import Shape
from slipcast.registry.identify import Match
from slipcast.registry.side_tensors import LAYER_METADATA, SECOND_SCALE, WEIGHT_SCALE

Tensors = dict[str, tuple[str, Shape]]
"""Dtype, as the file spells it, and shape of each tensor."""

_LEAVES = {CODES: "weight", SCALE: WEIGHT_SCALE, SCALE_2: SECOND_SCALE}
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_GGUF_ALIGNMENT = 32
_GROUP = 64
"""Columns that one int8_convrot group rotates together; it must divide those of every layer."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format that a file can be in.

    Attributes:
        title: what to call it.
        name: the format's name in the contract of ``slipcast inspect``.
        codec: what its quantised layers are in; None of a plain file.
        marker: what the file's metadata says of each of them; empty where a file of this format needs none.
    """

    title: str
    name: str
    codec: Codec | None
    marker: Mapping[str, object] = field(default_factory=dict)


FORMATS = (
    FileFormat("plain, bf16", "plain", None),
    FileFormat("fp8_scaled, e4m3, one scale for each weight", "fp8_scaled", Float8("tensor")),
    FileFormat("fp8_scaled, e4m3, a scale for each row", "fp8_scaled", Float8("row")),
    FileFormat("fp8_scaled, e4m3, scales of blocks in a row", "fp8_scaled", Float8("block", block=64)),
    FileFormat(
        "fp8_scaled, e4m3, marked for full precision",
        "fp8_scaled",
        Float8("tensor"),
        {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    ),
    FileFormat("fp8_scaled, e5m2", "fp8_scaled", Float8("tensor", dtype=torch.float8_e5m2)),
    FileFormat("fp8_raw, e4m3", "fp8_raw", Float8("none")),
    FileFormat("nvfp4", "nvfp4", NVFP4("comfy"), {"format": "nvfp4"}),
    FileFormat("mxfp8", "mxfp8", MXFP8(), {"format": "mxfp8"}),
    FileFormat("int8", "int8", Int8("row")),
    FileFormat(
        "int8_convrot",
        "int8_convrot",
        Int8("row", rotation=_GROUP),
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": _GROUP},
    ),
    FileFormat("gguf, Q8_0", "gguf", GGUF("Q8_0")),
)


@dataclass(frozen=True, slots=True)
class Outline:
    """A small checkpoint, before it is in a format.

    Attributes:
        tensors: its tensors, unquantised.
        layers: the weights that a file in codes has in codes: those in blocks that fp8 storage would quantise.
        modules: the modules of the first block that these weights make, by dotted path.
    """

    tensors: Tensors
    layers: frozenset[str]
    modules: tuple[str, ...]


def outline(match: Match, plan: Plan) -> Outline:
    """The outline of a model, cut down to the first block of each of its lists of blocks.

    Args:
        match: the model, whose family says which module lists hold blocks.
        plan: of its load in fp8 storage.
    """
    offload = match.family.runtime.offload
    further: set[str] = set()
    layers: set[str] = set()
    modules: list[str] = []
    for target in plan.targets:
        block = None if offload is None else offload.block_of(target.name)
        if block is not None and block.rpartition(".")[2] != "0":
            further |= _sources(target)
        elif offload is not None and block is not None and target.how == "encode":
            layers |= _sources(target)
            if block == f"{offload.blocks[0]}.0":
                modules.append(target.name.removesuffix(".weight"))
    tensors = {
        name: (tensor.dtype, tensor.shape) for name, tensor in match.header.tensors.items() if name not in further
    }
    return Outline(tensors, frozenset(layers), tuple(modules))


def _sources(target: Target) -> set[str]:
    return {piece.source for piece in target.pieces}


def write_checkpoint(of: Outline, format_: FileFormat, folder: Path) -> Path:
    """Write a sparse file of zeros in a format, and return its path."""
    if isinstance(format_.codec, GGUF):
        return _write(folder / "model.gguf", *_gguf(_in_blocks(of, format_.codec.type)))
    tensors = of.tensors if format_.codec is None else dict(_in_codes(of, format_.codec))
    file = [ConvertedTensor(name, dtype, shape, ()) for name, (dtype, shape) in tensors.items()]
    header = header_bytes(file, _metadata(format_.marker, of.layers))
    return _write(folder / "model.safetensors", header, sum(tensor.nbytes for tensor in file))


def _in_codes(of: Outline, codec: Codec) -> Iterator[tuple[str, tuple[str, Shape]]]:
    for name, (dtype, shape) in of.tensors.items():
        if name not in of.layers:
            yield name, (dtype, shape)
            continue
        for part, stored in codec.parts(shape).items():
            yield f"{name.removesuffix('.weight')}.{_LEAVES[part]}", (_DTYPES[stored.dtype], stored.shape)


def _in_blocks(of: Outline, kind: str) -> Tensors:
    return {name: (kind if name in of.layers else dtype, shape) for name, (dtype, shape) in of.tensors.items()}


def _metadata(marker: Mapping[str, object], layers: Collection[str]) -> dict[str, str]:
    if not marker:
        return {}
    described = {name.removesuffix(".weight"): dict(marker) for name in sorted(layers)}
    return {LAYER_METADATA: json.dumps({"format_version": "1.0", "layers": described})}


def _gguf(tensors: Tensors) -> tuple[bytes, int]:
    """The header of a GGUF file of version 3 without metadata, padded, and the bytes after it."""
    numbers = {kind.name: number for number, kind in BLOCK_TYPES.items()}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    stop = 0
    for name, (dtype, shape) in tensors.items():
        size = BLOCK_TYPES_BY_NAME[dtype].size(shape)
        assert size is not None, name  # blocks divide every layer's rows
        raw = name.encode()
        header += struct.pack("<Q", len(raw)) + raw + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", numbers[dtype], stop)
        stop = _aligned(stop + size)
    return header.ljust(_aligned(len(header)), b"\0"), stop


def _aligned(number: int) -> int:
    return -(-number // _GGUF_ALIGNMENT) * _GGUF_ALIGNMENT


def _write(path: Path, header: bytes, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)
    return path
