"""Small fp8 checkpoints in every spelling, and what they hold: quantised and decoded here, without the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.number_formats import bytes_of, e4m3, e5m2
from support.tiny_z_image import Tensors, natively

SPELLINGS = {"new": "weight_scale", "old": "scale_weight"}
BLOCKS = ("layers.0", "layers.1", "layers.2", "noise_refiner.0", "context_refiner.0")
QUANTISED = tuple(
    f"{block}.{name}"
    for block in BLOCKS
    for name in ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
)
"""Layers, by native name, that producers of fp8 checkpoints quantise."""

KEPT = ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")
"""Layers, by either name, that the family keeps in the compute dtype."""


@dataclass(frozen=True)
class Scaled:
    """How a layer is quantised.

    Attributes:
        scale: shape of its scale, with N for its rows and B for the two blocks of a row: "", "1", "N", "N1", "NB1".
        spelling: "new" or "old".
        codes: dtype of its codes.
        dtype: dtype of its scale.
    """

    scale: str = ""
    spelling: str = "new"
    codes: torch.dtype = torch.float8_e4m3fn
    dtype: torch.dtype = torch.float32


@dataclass
class Fp8File:
    """A native file and what it holds.

    Attributes:
        native: tensors of the file.
        values: native name -> the weight that codes and scale are, float32.
    """

    native: Tensors
    values: Tensors = field(default_factory=dict)

    def scale_layer(self, layer: str, how: Scaled) -> None:
        """Quantise a layer's weight."""
        name = f"{layer}.weight"
        codes, scale = _encoded(self.native[name].float(), how)
        self.native[name] = codes
        self.native[f"{layer}.{SPELLINGS[how.spelling]}"] = scale
        self.values[name] = decoded(codes, scale)

    def cast(self, name: str, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        """Turn a tensor into codes without a scale."""
        self.native[name] = self.native[name].to(dtype)
        self.values[name] = decoded(self.native[name])

    def write(self, path: Path, *, prefix: str = "", metadata: Mapping[str, str] | None = None) -> Path:
        """Write the file."""
        save_file({prefix + name: tensor for name, tensor in self.native.items()}, path, dict(metadata or {}))
        return path

    def expected(self) -> Tensors:
        """The model's tensors by its own names, float32, whatever they are stored in."""
        sides = {f"{layer}.{leaf}" for layer in self._layers() for leaf in (*SPELLINGS.values(), "input_scale")}
        plain = {
            name: self.values.get(name, tensor.float())
            for name, tensor in self.native.items()
            if name not in sides and not name.endswith((".comfy_quant", "scaled_fp8"))
        }
        return in_model_names(plain)

    def expected_codes(self) -> Tensors:
        """Codes by the model's names."""
        return in_model_names({name: tensor for name, tensor in self.native.items() if tensor.element_size() == 1})

    def _layers(self) -> set[str]:
        return {name.removesuffix(".weight") for name in self.values}


def fp8_file(tensors: Mapping[str, torch.Tensor], layers: Iterable[str] = (), how: Scaled | None = None) -> Fp8File:
    """A file of tensors that bear the model's names, with some of its layers quantised."""
    file = Fp8File(natively(tensors))
    for layer in layers:
        file.scale_layer(layer, how or Scaled())
    return file


def in_model_names(native: Mapping[str, torch.Tensor]) -> Tensors:
    """Native tensors by the model's names: qkv is cut in three."""
    renamed = {
        "x_embedder.": "all_x_embedder.2-1.",
        "final_layer.": "all_final_layer.2-1.",
        ".attention.out.": ".attention.to_out.0.",
        ".attention.q_norm.": ".attention.norm_q.",
        ".attention.k_norm.": ".attention.norm_k.",
    }
    model: Tensors = {}
    for name, tensor in native.items():
        if ".attention.qkv." in name:
            for part, rows in zip(("to_q", "to_k", "to_v"), tensor.chunk(3), strict=True):
                model[name.replace("qkv", part)] = rows
            continue
        for of_file, of_model in renamed.items():
            if of_file[0] == "." or name.startswith(of_file):
                name = name.replace(of_file, of_model)
        model[name] = tensor
    return model


def decoded(codes: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Codes times their scale, in float64, rounded to float32."""
    read = e4m3 if codes.dtype == torch.float8_e4m3fn else e5m2
    values = torch.from_numpy(read(bytes_of(codes)))
    if scale is None:
        return values.float()
    factor = scale.double()
    if factor.numel() == 1:
        return (values * factor.reshape(())).float()
    blocks = factor.numel() // codes.shape[0]
    return (values.view(codes.shape[0], blocks, -1) * factor.view(codes.shape[0], blocks, 1)).view(codes.shape).float()


def _encoded(weight: torch.Tensor, how: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    rows = weight.shape[0]
    blocks = 2 if "B" in how.scale else 1
    by_block = weight.view(rows, blocks, -1)
    amax = by_block.abs().amax(2, keepdim=True) if "N" in how.scale else weight.abs().amax().view(1, 1, 1)
    scale = (amax / torch.finfo(how.codes).max * 1.01).to(how.dtype)
    codes = (by_block / scale.float()).to(how.codes).view(weight.shape)
    shape = [{"N": rows, "B": blocks, "1": 1}[letter] for letter in how.scale]
    return codes, scale.reshape(shape).clone()
