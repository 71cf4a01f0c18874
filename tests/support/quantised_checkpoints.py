"""Small quantised checkpoints of every format, made of random codes, and the weights that they are.

No encoder takes part: codes and scales are drawn, and decoded with numpy as the formats' descriptions say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import save_file

from support import number_formats, quantised_formats
from support.fp8_checkpoints import in_model_names
from support.tiny_z_image import Tensors, natively

UNEVEN: dict[str, Any] = {
    "dim": 48,
    "n_heads": 3,
    "n_kv_heads": 3,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "cap_feat_dim": 32,
    "in_channels": 8,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1536, 512, 512],
}
"""Rows and columns are no whole tiles and mostly no whole blocks; of qkv, 144 rows, q, k and v are 48."""

EVEN: dict[str, Any] = {**UNEVEN, "dim": 128, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [16, 24, 24]}
"""q, k and v are whole tiles of 128 rows, and their columns whole tiles of 4 blocks of 16 or 32."""

QUANTISED = (
    *(f"{block}.attention.{leaf}" for block in ("layers.0", "noise_refiner.0") for leaf in ("qkv", "out")),
    *(f"{block}.feed_forward.w{index}" for block in ("layers.0", "context_refiner.0") for index in (1, 2, 3)),
    "layers.0.adaLN_modulation.0",
    "final_layer.linear",
    "t_embedder.mlp.0",
    "cap_embedder.1",
)
"""Layers, by native name, of which a file holds codes."""

FOLDED = ("t_embedder.mlp.0", "cap_embedder.1")
"""Those among them that the family keeps in the compute dtype."""

TYPICAL = 0.02
"""About the size of a decoded weight."""


@dataclass
class Layer:
    """One quantised layer of a file.

    Attributes:
        tensors: by the last part of their name: ``weight``, its scales, perhaps a marker.
        weight: what they mean, float64.
        marker: what the file says of the layer, where it does.
    """

    tensors: Tensors
    weight: np.ndarray
    marker: dict[str, Any] = field(default_factory=dict)


Draw = Callable[[np.random.Generator, int, int], Layer]
"""Makes a layer of so many rows and columns."""


@dataclass
class QuantisedFile:
    """A native checkpoint with some layers in codes.

    Attributes:
        native: its tensors.
        values: native name -> weight, float32, of the layers in codes.
        markers: native name of a layer -> what the file says of it.
    """

    native: Tensors
    values: Tensors
    markers: dict[str, dict[str, Any]]

    def write(self, path: Path, *, marked: str = "", prefix: str = "", extra: Mapping[str, Any] | None = None) -> Path:
        """Write the file.

        Args:
            path: where to.
            marked: "tensors" for a marker beside each layer, "metadata" for one text for all, "" for none.
            prefix: before each name.
            extra: more tensors, by name without the prefix.
        """
        tensors = {**self.native, **(extra or {})}
        metadata = {}
        if marked == "tensors":
            for layer, marker in self.markers.items():
                tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
        if marked == "metadata":
            layers = {prefix + layer: marker for layer, marker in self.markers.items()}
            metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
        save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        return path

    def expected(self) -> Tensors:
        """The model's tensors by its own names, float32."""
        sides = {f"{layer}.{leaf}" for layer in self.markers for leaf in SIDES}
        plain = {name: tensor.float() for name, tensor in self.native.items() if name not in sides}
        return in_model_names({**plain, **self.values})


SIDES = ("weight_scale", "scale_weight", "weight_scale_2", "input_scale", "scale_input")


def small_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """A state dict of a small model in the model's names, bfloat16."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = ZImageTransformer2DModel(**config)
    return {
        name: torch.randn(tensor.shape, generator=random).mul_(TYPICAL).to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }


def quantised_file(
    draw: Draw, config: Mapping[str, Any] = UNEVEN, layers: Iterable[str] = QUANTISED, *, block: int = 1, seed: int = 0
) -> QuantisedFile:
    """A small checkpoint of which some layers are drawn as codes: those whose columns are whole blocks."""
    native = natively(small_tensors(config, seed))
    file = QuantisedFile(native, {}, {})
    random = np.random.default_rng(seed)
    for layer in layers:
        rows, columns = native[f"{layer}.weight"].shape
        if columns % block:
            continue
        drawn = draw(random, rows, columns)
        native.update({f"{layer}.{leaf}": tensor for leaf, tensor in drawn.tensors.items()})
        file.values[f"{layer}.weight"] = torch.from_numpy(drawn.weight).float()
        file.markers[layer] = drawn.marker
    return file


def fp8(
    scale: str = "",
    *,
    dtype: torch.dtype = torch.float32,
    codes: torch.dtype = torch.float8_e4m3fn,
    spelling: str = "weight_scale",
    input_scale: str = "",
    container: torch.dtype | None = None,
) -> Draw:
    """float8 codes under scales.

    Args:
        scale: its shape, with N for the rows and B for blocks of 16 columns: "", "1", "N", "N1", "NB", "NB1"; "none".
        dtype: of the scale.
        codes: dtype of the codes.
        spelling: the scale's name.
        input_scale: name of a scale of activations, if there is one.
        container: dtype that the codes are stored in, where it is another.
    """
    e5m2 = codes == torch.float8_e5m2
    largest = 57344 if e5m2 else 448

    def draw(random: np.random.Generator, rows: int, columns: int) -> Layer:
        raw = float8_bytes(random, (rows, columns), e5m2=e5m2)
        values = (number_formats.e5m2 if e5m2 else number_formats.e4m3)(raw)
        weight = torch.from_numpy(raw).view(container or codes)
        marker = {"format": "float8_e5m2" if e5m2 else "float8_e4m3fn"}
        if scale == "none":
            return Layer({"weight": weight}, values, marker)
        blocks = columns // 16 if "B" in scale else 1
        count = rows * blocks if "N" in scale else 1
        factors = torch.from_numpy(random.uniform(0.5, 2, count) * TYPICAL * 8 / largest).to(dtype)
        spread = factors.double().numpy().reshape((rows if "N" in scale else 1), blocks, 1)
        decoded = (values.reshape(rows, blocks, -1) * spread).reshape(rows, columns)
        shape = [{"N": rows, "B": blocks, "1": 1}[letter] for letter in scale]
        tensors = {"weight": weight, spelling: factors.reshape(shape)}
        if input_scale:
            tensors[input_scale] = torch.tensor(0.25)
        return Layer(tensors, decoded, marker)

    return draw


def float8_bytes(random: np.random.Generator, shape: tuple[int, ...], *, e5m2: bool = False) -> np.ndarray:
    """Bytes of finite float8 values, of every exponent."""
    raw = random.integers(0, 256, shape, np.uint8)
    raw[(raw & 0x7F) >= (0x7C if e5m2 else 0x7F)] = 0x38
    return raw


def int8(scale: str = "N1", *, group: int = 0, dtype: torch.dtype = torch.float32) -> Draw:
    """int8 codes under a scale for each row ("N", "N1") or one (""), with columns rotated in groups or not."""

    def draw(random: np.random.Generator, rows: int, columns: int) -> Layer:
        own = next((size for size in (256, 64, 16) if size <= group and columns % size == 0), 0)
        codes = random.integers(-127, 128, (rows, columns)).astype(np.int8)
        shape = {"N1": (rows, 1), "N": (rows,), "": ()}[scale]
        factors = torch.from_numpy(np.array(random.uniform(0.5, 2, shape) * TYPICAL / 64)).to(dtype)
        weight = quantised_formats.int8(codes, factors.double().numpy(), own)
        marker: dict[str, Any] = {"format": "int8_tensorwise"}
        if own:
            marker |= {"convrot": True, "convrot_groupsize": own}
        return Layer({"weight": torch.from_numpy(codes), "weight_scale": factors}, weight, marker)

    return draw


def mxfp8(dtype: torch.dtype = torch.uint8, *, clean: bool = False) -> Draw:
    """mxfp8 as ComfyUI writes it; the scales in U8 or, as torch has them, in F8_E8M0.

    Only where ``clean`` is padding of zeros; else it is random too, for nobody should look at it.
    """

    def draw(random: np.random.Generator, rows: int, columns: int) -> Layer:
        padded = _up(rows, 32), _up(columns, 32)
        codes = float8_bytes(random, padded)
        scale = random.integers(112, 116, (_up(rows, 128), _up(padded[1] // 32, 4))).astype(np.uint8)
        scale[random.random(scale.shape) < 0.1] = 0
        if clean:
            codes[rows:] = 0
            codes[:, columns:] = 0
            _blank(scale, rows, padded[1] // 32)
        weight = quantised_formats.mxfp8(codes, scale, rows, columns)
        tensors = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            "weight_scale": torch.from_numpy(scale).view(dtype),
        }
        return Layer(tensors, weight, {"format": "mxfp8"})

    return draw


def nvfp4(*, comfy: bool = True, input_scale: bool = False, clean: bool = False) -> Draw:
    """nvfp4 in one of its layouts; the linear one needs whole blocks of columns. ``clean`` as of mxfp8."""

    def draw(random: np.random.Generator, rows: int, columns: int) -> Layer:
        padded = (_up(rows, 16), _up(columns, 16)) if comfy else (rows, columns)
        codes = random.integers(0, 256, (padded[0], padded[1] // 2), np.uint8)
        blocks = padded[1] // 16
        grid = (_up(rows, 128), _up(blocks, 4)) if comfy else (rows, blocks)
        scale = random.integers(0x28, 0x48, grid).astype(np.uint8)
        if clean and comfy:
            codes[rows:] = 0
            codes[:, columns // 2 :] = 0
            _blank(scale, rows, blocks)
        scale_2 = torch.tensor(TYPICAL / 3, dtype=torch.float32) * float(random.uniform(0.5, 2))
        weight = quantised_formats.nvfp4(codes, scale, float(scale_2), rows, columns, comfy)
        tensors = {
            "weight": torch.from_numpy(codes),
            "weight_scale": torch.from_numpy(scale).view(torch.float8_e4m3fn),
            "weight_scale_2": scale_2,
        }
        if input_scale:
            tensors["input_scale"] = torch.tensor(0.5)
        return Layer(tensors, weight, {"format": "nvfp4"})

    return draw


def _blank(scale: np.ndarray, rows: int, columns: int) -> None:
    """Make the scales of a swizzled grid zero where they belong to no row or block column."""
    order = quantised_formats.scale_grid(np.arange(scale.size).reshape(scale.shape), *scale.shape)
    padding = np.ones(scale.shape, bool)
    padding[:rows, :columns] = False
    scale.reshape(-1)[order[padding]] = 0


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
