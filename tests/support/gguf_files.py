"""Small GGUF files of random blocks, written by the gguf package, and what it says that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES
from support.fp8_checkpoints import in_model_names
from support.gguf_blocks import random_blocks
from support.quantised_checkpoints import UNEVEN, small_tensors
from support.tiny_z_image import natively

CONFIG = {**UNEVEN, "dim": 256, "n_heads": 4, "n_kv_heads": 4, "n_layers": 1, "axes_dims": [16, 24, 24]}
TYPES = {
    "layers.0.attention.qkv": "Q4_K",
    "layers.0.attention.out": "Q6_K",
    "layers.0.feed_forward.w1": "Q5_K",
    "layers.0.feed_forward.w3": "Q8_0",
    "layers.0.adaLN_modulation.0": "Q3_K",
    "noise_refiner.0.attention.qkv": "Q2_K",
    "noise_refiner.0.attention.out": "IQ4_XS",
    "noise_refiner.0.feed_forward.w1": "IQ4_NL",
    "noise_refiner.0.feed_forward.w3": "Q4_0",
    "context_refiner.0.attention.qkv": "Q5_1",
    "context_refiner.0.attention.out": "Q4_1",
    "context_refiner.0.feed_forward.w1": "Q5_0",
    "cap_embedder.1": "Q8_0",
}
"""Types of layers, by native name; the family keeps the last in the compute dtype."""
NARROW = {**CONFIG, "dim": 128, "n_heads": 2, "n_kv_heads": 2}
CROSSING = "layers.0.attention.qkv"
PLAIN = {"t_embedder.mlp.0.weight": "BF16", "layers.0.feed_forward.w2.weight": "F16"}
"""Types of other weights; those that are not named are F32."""


@dataclass(frozen=True)
class GGUFFile:
    """A file, and what the gguf package says that its weights are, float32 by the model's names."""

    path: Path
    expected: Mapping[str, torch.Tensor]


def write_gguf(
    gguf: ModuleType,
    path: Path,
    *,
    prefix: str = "",
    architecture: str = "lumina2",
    folded: tuple[str, ...] = (),
    config: Mapping[str, Any] = CONFIG,
    types: Mapping[str, str] = TYPES,
) -> GGUFFile:
    """Write a file. The weights of ``folded`` layers lie in rows of 512 instead of their own."""
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(natively(small_tensors(config)).items()):
        layer, shape = name.removesuffix(".weight"), tuple(tensor.shape)
        kind = types.get(layer) if name.endswith(".weight") else None
        if kind is not None:
            theirs = gguf.GGMLQuantizationType[kind]
            elements, nbytes = gguf.GGML_QUANT_SIZES[theirs]
            stored = (tensor.numel() // 512, 512) if layer in folded else shape
            known = kind in BLOCK_TYPES
            blocks = tensor.numel() // elements
            raw = random_blocks(kind, blocks, seed=index) if known else np.zeros((blocks, nbytes), np.uint8)
            raw = raw.reshape(stored[0], -1)
            assert raw.shape[1] == stored[1] // elements * nbytes
            values[name] = torch.from_numpy(np.array(gguf.dequantize(raw, theirs))).view(shape)
            writer.add_tensor(prefix + name, raw, raw_dtype=theirs)
        else:
            theirs = gguf.GGMLQuantizationType[PLAIN.get(name, "F32")]
            raw = gguf.quantize(tensor.float().numpy(), theirs)
            values[name] = torch.from_numpy(np.array(gguf.dequantize(raw, theirs))).view(shape)
            writer.add_tensor(prefix + name, raw, raw_dtype=theirs)
        if layer in folded:
            writer.add_array(f"comfy.gguf.orig_shape.{prefix}{name}", list(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path, in_model_names(values))
