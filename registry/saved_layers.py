"""What the config.json of a folder that slipcast saved says of layers, and their tensors do not show.

The type of GGUF's blocks, which are bytes there, and which layers a producer marks for products in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipcast.registry.ggml import BLOCK_TYPES_BY_NAME
from slipcast.registry.header import TensorInfo

_METHOD = "slipcast"
_PREFIX = "gguf/"

FULL_PRECISION = "full_precision_matrix_mult"
"""The word of ComfyUI's per-layer metadata; here the list of the layers that it is true of."""


def saved_codecs(config: Mapping[str, Any] | None) -> dict[str, str]:
    """What a config.json says of each layer that it is in, by the layer's name in the model."""
    modules = _described(config).get("modules")
    return {str(layer): str(codec) for layer, codec in modules.items()} if isinstance(modules, Mapping) else {}


def saved_full_precision(config: Mapping[str, Any] | None) -> frozenset[str]:
    """The layers, by their names in the model, that a config.json marks for products in full precision."""
    layers = _described(config).get(FULL_PRECISION)
    return frozenset(layer for layer in layers if isinstance(layer, str)) if isinstance(layers, list) else frozenset()


def _described(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What slipcast wrote of the layers, unchecked; empty where another library wrote it."""
    described = (config or {}).get("quantization_config")
    return described if isinstance(described, Mapping) and described.get("quant_method") == _METHOD else {}


def as_blocks(weight: TensorInfo, codec: str) -> TensorInfo:
    """A matrix of bytes as one of blocks, with the logical shape that its rows show; anything else as it is.

    Blocks that run across rows are saved as one row, whose elements the model's shape arranges.

    Args:
        weight: a tensor of the file.
        codec: what a config.json says that it is in, or "".
    """
    block = BLOCK_TYPES_BY_NAME.get(codec.removeprefix(_PREFIX)) if codec.startswith(_PREFIX) else None
    if block is None or block.plain or weight.dtype != "U8" or len(weight.shape) != 2:
        return weight
    rows, nbytes = weight.shape
    if nbytes % block.nbytes:
        return weight
    return replace(weight, dtype=block.name, shape=(rows, nbytes // block.nbytes * block.elements))
