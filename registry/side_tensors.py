"""The spellings of everything that stands beside a weight: scales, markers, zero points. Known here and nowhere else.

Sources: ComfyUI's documented per-layer quantisation metadata (version 1) and its earlier ``scaled_fp8`` convention,
ModelOpt's and BFL's exports, bitsandbytes' and Nunchaku's checkpoints, the compressed-tensors specification.
"""

from __future__ import annotations

from types import MappingProxyType

WEIGHT_SCALE = "weight_scale"
SECOND_SCALE = "weight_scale_2"
INPUT_SCALE = "input_scale"
MARKER = "comfy_quant"

FILE_MARKER = "scaled_fp8"
"""Last part of the tensor that marks a whole component; its dtype and element count carry meaning."""

LAYER_METADATA = "_quantization_metadata"
"""Key of the file's metadata whose JSON describes each quantised layer."""

IGNORED_LEAVES = frozenset({"comfy_attention.config"})
"""A preference for a kernel, without a bearing on any weight."""

SPELLINGS = MappingProxyType(
    {
        "weight_scale": WEIGHT_SCALE,
        "scale_weight": WEIGHT_SCALE,
        "weight_scale_2": SECOND_SCALE,
        "input_scale": INPUT_SCALE,
        "scale_input": INPUT_SCALE,
        "comfy_quant": MARKER,
    }
)
"""Last part of a side tensor's name -> its role; ``layer.scale_weight`` belongs to ``layer.weight``."""

FOREIGN_ROLES = MappingProxyType(
    {
        "absmax": "bitsandbytes",
        "quant_map": "bitsandbytes",
        "nested_absmax": "bitsandbytes",
        "nested_quant_map": "bitsandbytes",
        "SCB": "bitsandbytes",
        "weight_format": "bitsandbytes",
        "qweight": "packed weight",
        "wscales": "scale",
        "wzeros": "zero point",
        "qzeros": "zero point",
        "scales": "scale",
        "smooth_factor": "smoothing",
        "smooth": "smoothing",
        "smooth_orig": "smoothing",
        "proj_down": "low rank",
        "proj_up": "low rank",
        "wtscale": "scale",
        "wcscales": "scale",
        "weight_packed": "packed weight",
        "weight_global_scale": "scale",
        "input_global_scale": "scale",
        "weight_shape": "shape",
        "weight_zero_point": "zero point",
        "weight_zeros": "zero point",
        "weight_zero": "zero point",
        "weight_s_rel": "scale",
        "weight_s_channel": "scale",
        "weight_codebook": "codebook",
        "weight_code": "codebook",
        "weight_scale_inv": "scale",
        "pre_quant_scale": "smoothing",
        "zero_point": "zero point",
        "scale_2": "scale",
        "scale_zero_point": "zero point",
        "zero_point_scale": "scale",
        "zero_point_2": "zero point",
        "svd_up": "low rank",
        "svd_down": "low rank",
        "int8_weight": "packed weight",
    }
)
"""Side tensors of formats that are recognised and refused. Outside such a format one of them is an orphan."""

AMBIGUOUS_LEAVES = frozenset(
    {
        "scales",
        "smooth",
        "smooth_factor",
        "smooth_orig",
        "proj_down",
        "proj_up",
        "zero_point",
        "scale_2",
        "svd_up",
        "svd_down",
    }
    | {"scale_zero_point", "zero_point_scale", "zero_point_2"}
)
"""Leaves that an ordinary model may use as well; side tensors only beside a weight of integers or float8."""

BITSANDBYTES_STATE = "quant_state.bitsandbytes__"
"""``layer.weight.quant_state.bitsandbytes__nf4`` holds the logical shape as JSON bytes."""


def split_side(name: str) -> tuple[str, str] | None:
    """Split a side tensor's name into its layer and its leaf, or None where the name is not a side tensor's.

    ``a.b.scale_weight`` is ``("a.b", "scale_weight")``; bitsandbytes hangs its tensors on the weight's own name, so
    ``a.b.weight.absmax`` is ``("a.b", "absmax")``.
    """
    layer, _, leaf = name.rpartition(".")
    if BITSANDBYTES_STATE in name:
        layer, _, state = name.partition("." + BITSANDBYTES_STATE)
        leaf = BITSANDBYTES_STATE + state
    elif leaf not in SPELLINGS and leaf not in FOREIGN_ROLES:
        return None
    return layer.removesuffix(".weight"), leaf


def is_file_marker(name: str) -> bool:
    """Whether the tensor marks a whole component as scaled fp8."""
    return name.rpartition(".")[2] == FILE_MARKER
