"""What the weights of a written checkpoint shall be in: the format, how its side tensors are spelt, and its codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.hadamard import rotation_group
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.registry.errors import SettingsError

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "BF16", "fp16": "F16", "fp32": "F32"})
"""The formats without codes, and their dtype as the container spells it."""

SCALES: Mapping[str, Literal["tensor", "row"] | None] = MappingProxyType(
    {"fp8_scaled": "tensor", "mxfp8": None, "nvfp4": None, "int8": "row", "int8_convrot": "row"}
)
"""The formats of codes, and how far a scale reaches by default: as in the files that ComfyUI's authors publish. None
where the format itself says it."""

FORMATS = (*DTYPES, *SCALES)
"""Every format that can be written."""

Spelling = Literal["comfy", "legacy"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a written checkpoint's weights.

    Attributes:
        format: one of ``FORMATS``; None where they stay in what they are in.
        spelling: how side tensors are called. ``comfy``: ``weight_scale``, and a marker ``comfy_quant`` for each layer.
            ``legacy``: ``scale_weight``, and one marker ``scaled_fp8``; only of fp8. None: as the input has them; those
            of new codes as ``comfy``.
        scale: how far a scale reaches; None for the format's default.
        remainder: what becomes of the plain layers of a file that is quantised already: ``keep`` or ``quantise``.

    Raises:
        SettingsError: a combination that does not exist.
    """

    format: str | None = None
    spelling: Spelling | None = None
    scale: Literal["tensor", "row"] | None = None
    remainder: Literal["keep", "quantise"] = "keep"

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise SettingsError(
                f"the format {self.format!r} to write",
                expected="one of " + ", ".join(FORMATS),
                hint="choose one of these; other formats can only be read",
                field="format",
            )
        if self.scale is not None and SCALES.get(self.format or "") is None:
            raise SettingsError(
                f"scales by {self.scale} in the format {self.format or 'that the file has'}",
                expected="them with a format that has a choice: "
                + ", ".join(name for name, scale in SCALES.items() if scale is not None),
                hint="leave the scale out",
                field="scale",
            )
        if self.spelling is not None and self.format in DTYPES:
            raise SettingsError(
                f"the spelling {self.spelling!r} for weights in {self.format}",
                expected="a spelling for side tensors, which only codes have",
                hint="leave the spelling out",
                field="spelling",
            )
        if self.spelling == "legacy" and self.format not in (None, "fp8_scaled"):
            raise no_legacy(str(self.format))

    @property
    def dtype(self) -> str | None:
        """The dtype of a format without codes, as the container spells it."""
        return DTYPES.get(self.format or "")

    @property
    def quantises(self) -> bool:
        """Whether weights are to be in codes of a format."""
        return self.format in SCALES

    def codec(self, columns: int) -> Codec:
        """The codec for a weight of so many columns in a format of codes."""
        assert self.format is not None
        scale = self.scale or SCALES[self.format] or "row"
        if self.format == "fp8_scaled":
            return Float8(scale)
        if self.format in ("int8", "int8_convrot"):
            return Int8(scale, rotation=rotation_group(columns) if self.format == "int8_convrot" else 0)
        return MXFP8() if self.format == "mxfp8" else NVFP4("comfy")


def no_legacy(format_: str) -> SettingsError:
    """The error for codes that the legacy spelling has no names for."""
    return SettingsError(
        f"the spelling 'legacy' for codes in {format_}",
        expected="it for fp8 with scales alone, for which it was made",
        hint="take the spelling comfy",
        field="spelling",
    )


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
