"""The formats as programs write them, and what slipcast promises of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from support.fp8_checkpoints import in_model_names
from support.quantised_checkpoints import (
    EVEN,
    FOLDED,
    UNEVEN,
    Draw,
    QuantisedFile,
    fp8,
    int8,
    mxfp8,
    nvfp4,
    quantised_file,
)


@dataclass(frozen=True)
class Case:
    """A format as some program writes it.

    Attributes:
        draw: makes a layer.
        format: what ``inspect`` calls it.
        codec: what layers keep their codes in, with "{group}" for rotated columns; "" where they are dequantised.
        marked: how the file says what its layers are.
        extra: more tensors of the file.
        block: what the columns of a layer in this format must be a multiple of.
    """

    draw: Draw
    format: str
    codec: str
    marked: str = ""
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    block: int = 1


def _marker(elements: int, dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, torch.Tensor]:
    return {"scaled_fp8": torch.zeros(elements).to(dtype)}


CONFIGS = {"uneven": UNEVEN, "even": EVEN}
TENSOR, ROW, BLOCK = (f"float8_e4m3fn/{kind}" for kind in ("tensor", "row", "block16"))
BF16, E5M2, BYTES = torch.bfloat16, torch.float8_e5m2, torch.uint8
OLD = "scale_weight"
ROTATED = "int8_convrot"

CASES: dict[str, Case] = {
    "legacy": Case(fp8(spelling=OLD, input_scale="scale_input"), "fp8_scaled", TENSOR, extra=_marker(0)),
    "legacy by rows": Case(fp8("N1", spelling=OLD), "fp8_scaled", ROW, extra=_marker(1)),
    "legacy, marked in float32": Case(fp8("1", spelling=OLD), "fp8_scaled", TENSOR, extra=_marker(2, torch.float32)),
    "legacy e5m2, marked e4m3": Case(fp8(spelling=OLD, codes=E5M2), "fp8_scaled", "", extra=_marker(0)),
    "metadata": Case(fp8(input_scale="input_scale"), "fp8_scaled", TENSOR, "metadata"),
    "markers": Case(fp8("1", input_scale="input_scale"), "fp8_scaled", TENSOR, "tensors"),
    "markers, bytes": Case(fp8(container=BYTES), "fp8_scaled", TENSOR, "tensors"),
    "metadata, bytes of e5m2": Case(fp8(container=BYTES, codes=E5M2), "fp8_scaled", "", "metadata"),
    "markers without scales": Case(fp8("none"), "fp8_raw", "float8_e4m3fn/none", "tensors"),
    "unmarked, by rows": Case(fp8("N", dtype=BF16), "fp8_scaled", ROW),
    "unmarked, by blocks": Case(fp8("NB1", dtype=BF16, spelling=OLD), "fp8_scaled", BLOCK, block=16),
    "int8 by rows": Case(int8(), "int8", "int8/row", "tensors"),
    "int8, one scale": Case(int8(""), "int8", "int8/tensor", "metadata"),
    "int8, unmarked": Case(int8("N", dtype=BF16), "int8", "int8/row"),
    "int8, rotated": Case(int8(group=256), ROTATED, "int8/row/convrot{group}", "tensors", block=16),
    "int8, rotated, one scale": Case(int8("", group=16), ROTATED, "int8/tensor/convrot16", "metadata", block=16),
    "mxfp8": Case(mxfp8(clean=True), "mxfp8", "mxfp8", "tensors"),
    "mxfp8, scales as E8M0": Case(mxfp8(torch.float8_e8m0fnu), "mxfp8", "mxfp8"),
    "nvfp4": Case(nvfp4(clean=True), "nvfp4", "nvfp4/comfy", "tensors"),
    "nvfp4, unmarked": Case(nvfp4(input_scale=True), "nvfp4", "nvfp4/comfy"),
    "nvfp4, linear": Case(nvfp4(comfy=False), "nvfp4", "nvfp4/linear", block=16),
}


def draw_file(case: Case, config: str) -> QuantisedFile:
    """A small checkpoint in a format."""
    return quantised_file(case.draw, CONFIGS[config], block=case.block)


def promised_codecs(case: Case, file: QuantisedFile) -> dict[str, str]:
    """The codec of each layer of the model that keeps its codes."""
    if not case.codec:
        return {}
    native = {key: tensor for key, tensor in file.values.items() if key.removesuffix(".weight") not in FOLDED}
    return {
        key.removesuffix(".weight"): case.codec.format(group=_group(tensor.shape[1]))
        for key, tensor in in_model_names(native).items()
    }


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tensors are the same but for 1e-6 of the largest magnitude."""
    difference = (actual.detach().double() - expected.double()).abs().max()
    return bool(difference <= 1e-6 * expected.double().abs().max())


def _group(columns: int) -> int:
    return next((group for group in (256, 64, 16) if columns % group == 0), 0)
