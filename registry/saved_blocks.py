"""Blocks of GGUF in a folder that slipcast saved: bytes, of which the config.json beside them says the type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipcast.registry.ggml import BLOCK_TYPES_BY_NAME
from slipcast.registry.header import TensorInfo

_METHOD = "slipcast"
_PREFIX = "gguf/"


def saved_block_types(config: Mapping[str, Any] | None) -> dict[str, str]:
    """The type of each layer that a config.json says is in blocks, by the layer's name in the model."""
    described = (config or {}).get("quantization_config")
    modules = described.get("modules") if isinstance(described, Mapping) else None
    if (
        not isinstance(modules, Mapping)
        or not isinstance(described, Mapping)
        or described.get("quant_method") != _METHOD
    ):
        return {}
    names = {str(layer): str(codec) for layer, codec in modules.items()}
    return {layer: codec.removeprefix(_PREFIX) for layer, codec in names.items() if codec.startswith(_PREFIX)}


def as_blocks(weight: TensorInfo, kind: str | None) -> TensorInfo:
    """A matrix of bytes as one of blocks, with the logical shape that its rows show; anything else as it is.

    Blocks that run across rows are saved as one row, whose elements the model's shape arranges.
    """
    block = BLOCK_TYPES_BY_NAME.get(kind or "")
    if block is None or block.plain or weight.dtype != "U8" or len(weight.shape) != 2:
        return weight
    rows, nbytes = weight.shape
    if nbytes % block.nbytes:
        return weight
    return replace(weight, dtype=block.name, shape=(rows, nbytes // block.nbytes * block.elements))
