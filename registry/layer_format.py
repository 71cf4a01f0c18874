"""Which quantisation format a layer is in: a decision on dtypes, side tensors and what the file says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from slipcast.registry.dtypes import DTYPE_BITS, is_float
from slipcast.registry.ggml import is_block_quantised
from slipcast.registry.gguf_header import original_shape
from slipcast.registry.header import Shape, TensorInfo
from slipcast.registry.side_tensors import BITSANDBYTES_STATE, MARKER, SECOND_SCALE, WEIGHT_SCALE

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS = frozenset({"F32", "F16", "BF16"})
_FP4_BLOCK = 16
_MXFP8_BLOCK = 32
_ROTATED = 256
"""Columns of a rotated group where the file does not say."""
_NUNCHAKU_ROLES = frozenset({"wscales", "wtscale", "wcscales", "smooth_factor", "smooth", "wzeros"})
_SDNQ_FLOATS = frozenset({"F32", "F16", "BF16"})
_FLOAT8_MARKS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_MARKED_FLOAT8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "mxfp8": "F8_E4M3"}
_MARKED_FORMATS = {
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "int8_tensorwise": "int8",
    "svdquant_w4a4": "svdquant",
    "awq_w4a16": "awq",
    "nf4": "bnb_nf4",
}

Granularity = Literal["tensor", "row", "column", "block"]
"""How far one scale reaches: over the whole weight, one index of axis 0 or of axis 1, or a block of a row's columns."""


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The format of one weight.

    Attributes:
        name: a name of the formats' contract.
        shape: the logical shape.
        granularity: how far one scale reaches; None without a scale.
        full_precision: the producer wants the layer multiplied in full precision.
        options: what the marker says besides.
        problems: contradictions, as clauses.
    """

    name: str
    shape: Shape
    granularity: Granularity | None = None
    full_precision: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def unpacked(weight: TensorInfo, sides: Mapping[str, TensorInfo], described: Mapping[str, Any]) -> TensorInfo:
    """A weight whose float8 codes lie in a tensor of bytes, as float8; any other as it is.

    Only what the file says of the layer tells such bytes from codes of two to a byte.
    """
    dtype = _MARKED_FLOAT8.get(str(described.get("format")))
    if weight.dtype != "U8" or dtype is None or SECOND_SCALE in sides:
        return weight
    return replace(weight, dtype=dtype)


def layer_format(
    weight: TensorInfo, sides: Mapping[str, TensorInfo], described: Mapping[str, Any], metadata: Mapping[str, str]
) -> LayerFormat:
    """Decide the format of one weight.

    The weight's own dtype rules over a marker of the other float8, which is reported and not followed: a file marked
    ``float8_e4m3fn`` may hold e5m2 codes. Any other contradiction makes the format unknown.

    Args:
        weight: the tensor of values or codes.
        sides: its side tensors by role.
        described: what the file's metadata or the layer's marker says of it.
        metadata: the file's metadata.
    """
    shape = _original_shape(weight, metadata)
    if is_block_quantised(weight.dtype):
        return LayerFormat("gguf", shape, "block")
    foreign = _foreign_format(weight, sides, metadata)
    if foreign is not None:
        return LayerFormat(foreign, weight.shape)
    marked = described.get("format")
    name = _MARKED_FORMATS.get(str(marked))
    if name in ("svdquant", "awq", "bnb_nf4"):
        return LayerFormat(name, weight.shape, options=described)
    full_precision = described.get("full_precision_matrix_mult") is True
    if described.get("convrot", False) is not False and weight.dtype != "I8":
        problem = f"codes of {weight.dtype} whose marker says that columns are rotated, as is known of int8 alone"
        return LayerFormat("unknown", weight.shape, options=described, problems=(problem,))
    if weight.dtype in FLOAT8 and marked in (None, *_MARKED_FLOAT8):
        return _float8(weight, sides, marked, full_precision)
    if weight.dtype == "U8" and (name == "nvfp4" or (SECOND_SCALE in sides and marked is None)):
        return _nvfp4(weight, sides, bool(described), full_precision)
    if weight.dtype == "I8" and WEIGHT_SCALE in sides and (name == "int8" or marked is None):
        return _int8(weight, sides[WEIGHT_SCALE], described, full_precision)
    if MARKER in sides or described:
        return LayerFormat("unknown", weight.shape, options=described, problems=(_contradiction(marked, weight),))
    if weight.dtype in ("I8", "U8") and len(weight.shape) >= 2:
        return LayerFormat("unknown", weight.shape, problems=(f"codes of {weight.dtype} without a scale",))
    if is_float(weight.dtype) and DTYPE_BITS[weight.dtype] < 16:
        return LayerFormat("unknown", weight.shape, problems=(f"codes of {weight.dtype}, which no format has alone",))
    return LayerFormat("plain", shape)


def scale_granularity(scale: Shape, weight: Shape) -> Granularity | None:
    """How far one scale reaches, from its shape and the weight's; None where the two don't fit each other.

    Rows are ``[N]``, ``[N, 1]``, ...; columns ``[M]`` of a weight ``[N, M, ...]`` of a transposed convolution, whose
    outputs lie on axis 1; blocks ``[N, B]`` or ``[N, B, 1]`` of a matrix whose columns B divides.
    """
    if prod(scale) == 1:
        return "tensor"
    if weight and scale[0] == prod(scale) == weight[0]:
        return "row"
    if len(weight) > 2 and scale == weight[1:2]:
        return "column"
    if len(weight) == 2 and len(scale) > 1 and scale[1]:
        rows, blocks = weight[0], scale[1]
        return "block" if scale in ((rows, blocks), (rows, blocks, 1)) and weight[1] % blocks == 0 else None
    return None


def _float8(weight: TensorInfo, sides: Mapping[str, TensorInfo], marked: object, full_precision: bool) -> LayerFormat:
    scale = sides.get(WEIGHT_SCALE)
    problems = () if marked in (None, "mxfp8", _FLOAT8_MARKS[weight.dtype]) else (_contradiction(marked, weight),)
    if scale is None:
        return LayerFormat("fp8_raw", weight.shape, None, full_precision, problems=problems)
    if marked == "mxfp8" or scale.dtype in ("U8", "F8_E8M0"):
        tiled = _tiled(weight.shape, _MXFP8_BLOCK)
        fits = tiled == scale.shape and scale.dtype in ("U8", "F8_E8M0") and weight.dtype == "F8_E4M3"
        if not fits or weight.shape[0] % _MXFP8_BLOCK:
            whole = f"F8_E4M3 codes of whole blocks of {_MXFP8_BLOCK} by {_MXFP8_BLOCK}"
            return _misfit("mxfp8", weight, scale, whole if tiled is None else f"{whole}, U8 {list(tiled)}")
        return LayerFormat("mxfp8", weight.shape, "block", full_precision, problems=problems)
    granularity = scale_granularity(scale.shape, weight.shape)
    if scale.dtype not in FLOATS or granularity is None:
        return _misfit("float8", weight, scale, "floats: one, [rows] or [rows, 1], [rows, blocks] or [rows, blocks, 1]")
    return LayerFormat("fp8_scaled", weight.shape, granularity, full_precision, problems=problems)


def _int8(weight: TensorInfo, scale: TensorInfo, described: Mapping[str, Any], full_precision: bool) -> LayerFormat:
    granularity = scale_granularity(scale.shape, weight.shape)
    if scale.dtype not in FLOATS or granularity not in ("tensor", "row"):
        return _misfit("int8", weight, scale, "floats: one, [rows] or [rows, 1]")
    if described.get("convrot") is not True:
        return LayerFormat("int8", weight.shape, granularity, full_precision)
    group = described.get("convrot_groupsize", _ROTATED)
    if type(group) is not int or not _is_power_of_4(group) or len(weight.shape) != 2 or weight.shape[1] % group:
        problem = f"int8 codes {list(weight.shape)} with columns rotated in groups of {str(group)[:20]}"
        return LayerFormat("unknown", weight.shape, problems=(problem,))
    options = {"convrot_groupsize": group}
    return LayerFormat("int8_convrot", weight.shape, granularity, full_precision, options)


def _is_power_of_4(number: int) -> bool:
    return number >= 4 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _nvfp4(weight: TensorInfo, sides: Mapping[str, TensorInfo], described: bool, full_precision: bool) -> LayerFormat:
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if weight.shape else weight.shape
    scale, second = sides.get(WEIGHT_SCALE), sides.get(SECOND_SCALE)
    if scale is None or second is None:
        missing = WEIGHT_SCALE if scale is None else SECOND_SCALE
        return LayerFormat("unknown", shape, problems=(f"nvfp4 codes {list(weight.shape)} without {missing}",))
    known = _nvfp4_shapes(shape, described)
    if scale.dtype not in ("F8_E4M3", "U8") or scale.shape not in known.values():
        fitting = " or ".join(f"F8_E4M3 {list(fit)} ({layout})" for layout, fit in known.items())
        return _misfit("nvfp4", weight, scale, fitting or f"codes of whole blocks of {_FP4_BLOCK} columns")
    if second.dtype not in FLOATS or second.elements != 1:
        return _misfit("nvfp4", weight, second, "one float")
    layouts = [layout for layout, fit in known.items() if fit == scale.shape]
    return LayerFormat("nvfp4", shape, "block", full_precision, {"layout": layouts[0]} if len(layouts) == 1 else {})


def _nvfp4_shapes(shape: Shape, described: bool) -> dict[str, Shape]:
    """The shapes that the scales of a matrix's blocks can have in nvfp4's two byte layouts.

    A layer that the file describes is in the layout of the program that describes: high nibble first, scales swizzled,
    padded to 128 rows and 4 columns. Where both layouts have one shape, it does not tell them apart.
    """
    tiled = _tiled(shape, _FP4_BLOCK)
    if tiled is None:
        return {}
    comfy = {"comfy": tiled} if shape[0] % _FP4_BLOCK == 0 else {}
    return comfy if described else {**comfy, "linear": (shape[0], shape[1] // _FP4_BLOCK)}


def _tiled(shape: Shape, block: int) -> Shape | None:
    """The shape of the scales of a matrix's blocks in whole tiles of 128 rows and 4 blocks; None of no whole blocks."""
    if len(shape) != 2 or shape[1] % block:
        return None
    return -(-shape[0] // 128) * 128, -(-shape[1] // block // 4) * 4


def mxfp8_order_shows(weight: Shape, scale: Shape) -> bool:
    """Whether mxfp8's scales are of a shape that they have in no other order than the swizzled one."""
    return scale != (weight[0], weight[1] // _MXFP8_BLOCK)


def _misfit(kind: str, weight: TensorInfo, scale: TensorInfo, fitting: str) -> LayerFormat:
    odd = f"{kind} codes {list(weight.shape)} with a scale of {scale.dtype} {list(scale.shape)}, needed: {fitting}"
    return LayerFormat("unknown", weight.shape, problems=(odd,))


def _original_shape(weight: TensorInfo, metadata: Mapping[str, str]) -> Shape:
    """The shape that a GGUF's metadata gives a tensor, if it has as many elements; else its own."""
    shape = original_shape(metadata, weight.name)
    return shape if shape is not None and prod(shape) == weight.elements else weight.shape


def _contradiction(marked: object, weight: TensorInfo) -> str:
    return f"marked as {repr(marked)[:60]}, stored as {weight.dtype}"


def _foreign_format(weight: TensorInfo, sides: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> str | None:
    """The formats that are recognised and refused, by what only they have."""
    leaf = weight.name.rpartition(".")[2]
    for role in sides:
        if role.startswith(BITSANDBYTES_STATE):
            return "bnb_fp4" if role.endswith("fp4") else "bnb_nf4"
    if "absmax" in sides:
        return "bnb_nf4"
    if "SCB" in sides:
        return "bnb_int8"
    if "tensor_names" in metadata and ("_weight_" in leaf or leaf.startswith("_")):
        return "torchao"
    if leaf == "qweight":
        return "nunchaku" if _NUNCHAKU_ROLES & sides.keys() else "awq"
    if leaf == "weight_packed":
        return "compressed_tensors"
    if "scale" in sides and sides["scale"].dtype in _SDNQ_FLOATS:
        return "sdnq"
    return "unknown" if leaf == "int8_weight" else None
