"""A small Z-Image with random weights, and its native file, put together by hand from the published names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "dim": 64,
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 3,
    "n_refiner_layers": 1,
    "cap_feat_dim": 24,
    "in_channels": 4,
    "axes_dims": [8, 12, 12],
    "axes_lens": [1536, 512, 512],
}
_MODULES = {
    "all_x_embedder.2-1.": "x_embedder.",
    "all_final_layer.2-1.": "final_layer.",
    ".attention.to_out.0.": ".attention.out.",
    ".attention.norm_q.": ".attention.q_norm.",
    ".attention.norm_k.": ".attention.k_norm.",
}
Tensors = dict[str, torch.Tensor]


def tiny_tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensors:
    """A state dict in the model's names: random values in every tensor."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = ZImageTransformer2DModel(**CONFIG)
    return {
        name: torch.randn(tensor.shape, generator=random).div_(8).to(dtype)
        for name, tensor in model.state_dict().items()
    }


def natively(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same tensors under the native names: q, k and v are one."""
    native: Tensors = {}
    for name, tensor in tensors.items():
        if ".attention.to_q." in name:
            parts = [tensors[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            native[name.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attention.to_k." not in name and ".attention.to_v." not in name:
            for of_model, of_file in _MODULES.items():
                name = name.replace(of_model, of_file)
            native[name] = tensor
    return native


def write_native(
    path: Path, tensors: Mapping[str, torch.Tensor], *, prefix: str = "", metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a native file of tensors that bear the model's names."""
    save_file({prefix + name: tensor for name, tensor in natively(tensors).items()}, path, dict(metadata or {}))
    return path


def write_folder(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a model folder as diffusers does."""
    model = ZImageTransformer2DModel(**CONFIG)
    model.load_state_dict(dict(tensors))
    model.to(next(iter(tensors.values())).dtype).save_pretrained(path)
    return path
