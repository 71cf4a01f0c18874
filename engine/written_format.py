"""What a written checkpoint is in: the codec of a wanted format, a codec's format, and what a marker says of it."""

from __future__ import annotations

import torch

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.hadamard import rotation_group
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.wanted import SCALES, Wanted


def codec_for(wanted: Wanted, columns: int) -> Codec:
    """The codec for a weight of so many columns in a wanted format of codes."""
    scale = wanted.scale or SCALES[wanted.format or ""] or "row"
    if wanted.format == "fp8_scaled":
        return Float8(scale)
    if wanted.format in ("int8", "int8_convrot"):
        return Int8(scale, rotation=rotation_group(columns) if wanted.format == "int8_convrot" else 0)
    return MXFP8() if wanted.format == "mxfp8" else NVFP4("comfy")


def format_of(codec: Codec) -> str:
    """The format that a codec's codes are in, as ``inspect`` calls it."""
    if isinstance(codec, Float8):
        return "fp8_raw" if codec.granularity == "none" else "fp8_scaled"
    if isinstance(codec, Int8):
        return "int8_convrot" if codec.rotation else "int8"
    if isinstance(codec, MXFP8):
        return "mxfp8"
    return "gguf" if isinstance(codec, GGUF) else "nvfp4"


def marker_of(codec: Codec, *, full_precision: bool) -> dict[str, object]:
    """What a ``comfy_quant`` marker says of a layer. Source: ComfyUI's per-layer quantisation metadata, version 1."""
    if isinstance(codec, Float8):
        marker: dict[str, object] = {"format": str(codec.dtype).removeprefix("torch.")}
    elif isinstance(codec, Int8):
        marker = {"format": "int8_tensorwise"}
        if codec.rotation:
            marker |= {"convrot": True, "convrot_groupsize": codec.rotation}
    else:
        marker = {"format": format_of(codec)}
    return marker | {"full_precision_matrix_mult": True} if full_precision else marker


def is_e5m2(codec: Codec | None) -> bool:
    """Whether the codes are float8_e5m2."""
    return isinstance(codec, Float8) and codec.dtype is torch.float8_e5m2
