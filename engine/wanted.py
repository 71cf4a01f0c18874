"""What is asked of a written checkpoint's weights. Imports no torch, so that what can't be asked is refused at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

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
Scale = Literal["tensor", "row"]


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
    scale: Scale | None = None
    remainder: Literal["keep", "quantise"] = "keep"

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise SettingsError(
                f"the format {self.format!r} to write",
                expected="one of " + ", ".join(FORMATS),
                hint="choose one of these; other formats can only be read",
                field="format",
            )
        _refuse_unknown("spelling", self.spelling, get_args(Spelling))
        _refuse_unknown("scale", self.scale, get_args(Scale))
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


def _refuse_unknown(field: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise SettingsError(
            f"the {field} {value!r}",
            expected="one of " + ", ".join(known),
            hint="choose one of these, or leave it out",
            field=field,
        )


def no_legacy(format_: str) -> SettingsError:
    """The error for codes that the legacy spelling has no names for."""
    return SettingsError(
        f"the spelling 'legacy' for codes in {format_}",
        expected="it for fp8 with scales alone, for which it was made",
        hint="take the spelling comfy",
        field="spelling",
    )
