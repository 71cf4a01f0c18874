"""Which codec a weight of the file is in, and which of its tensors are the codec's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4, SCALE_2
from slipcast.engine.codecs.scaled import Granularity
from slipcast.engine.reader import TORCH_DTYPES
from slipcast.registry.errors import QuantisationError
from slipcast.registry.header import Shape, TensorInfo
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import SECOND_SCALE, WEIGHT_SCALE

_ROLES: Mapping[str, str] = MappingProxyType({SCALE: WEIGHT_SCALE, SCALE_2: SECOND_SCALE})


def file_codec(bundle: Bundle, nvfp4_layout: str | None) -> Codec | None:
    """The codec of a bundle; None of a plain one.

    Args:
        bundle: a weight of a loadable format.
        nvfp4_layout: the family's hint, for files in which nothing tells the two byte layouts apart.

    Raises:
        QuantisationError: nvfp4 whose layout nothing tells.
    """
    if bundle.format in ("fp8_scaled", "fp8_raw"):
        return _float8(bundle)
    if bundle.format in ("int8", "int8_convrot"):
        granularity: Granularity = "tensor" if bundle.granularity == "tensor" else "row"
        return Int8(granularity, rotation=int(bundle.options.get("convrot_groupsize", 0)))
    if bundle.format == "mxfp8":
        return MXFP8()
    if bundle.format == "nvfp4":
        return NVFP4(_layout(bundle, nvfp4_layout))
    return GGUF(bundle.weight.dtype) if bundle.format == "gguf" else None


def _float8(bundle: Bundle) -> Codec:
    dtype = TORCH_DTYPES[bundle.weight.dtype]
    if bundle.format == "fp8_raw":
        return Float8("none", dtype=dtype)
    if bundle.granularity == "block":
        return Float8("block", block=bundle.shape[1] // bundle.sides[WEIGHT_SCALE].shape[1], dtype=dtype)
    return Float8(
        "tensor" if bundle.granularity == "tensor" else "row", axis=int(bundle.granularity == "column"), dtype=dtype
    )


def _layout(bundle: Bundle, hint: str | None) -> Literal["comfy", "linear"]:
    layout = bundle.options.get("layout", hint)
    if layout not in ("comfy", "linear"):
        raise QuantisationError(
            "nvfp4 weights of which nothing in the file tells the byte layout: every scale fits both",
            expected="comfy (high nibble first, scales swizzled) or linear (low nibble first), by metadata or a shape",
            hint="ask whoever made the file, and say precision.nvfp4_layout in the family file: read as the other, "
            "the weights are noise",
            items=[bundle.name],
        )
    return layout


def matrix_shape(shape: Shape) -> Shape:
    """A shape that codecs can have: a vector is a matrix of one column."""
    return (*shape, 1) if len(shape) < 2 else shape


def part_tensors(bundle: Bundle, codec: Codec) -> dict[str, TensorInfo]:
    """The tensors of the file that are the codec's parts, by part."""
    codes = bundle.weight
    if bundle.format == "gguf":
        codes = replace(codes, dtype="U8", shape=(codes.nbytes,))
    roles = {CODES: codes} | {part: bundle.sides[role] for part, role in _ROLES.items() if role in bundle.sides}
    return {part: roles[part] for part in codec.parts(matrix_shape(bundle.shape)) if part in roles}
