"""Which layers multiply in float8: decided in the plan, from codec, sizes, settings, hints and static scales."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.fp8_compute import compute_obstacle
from slipcast.engine.scaled_matmul import input_scale_obstacle
from slipcast.registry.checkpoint import read_tensor_bytes
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.quantisation import Bundle
from slipcast.registry.settings_model import Fp8Settings
from slipcast.registry.side_tensors import INPUT_SCALE

_FORMS = {"F32": "<f", "F16": "<e", "F64": "<d"}


@dataclass(frozen=True, slots=True)
class Products:
    """How a layer's products are made.

    Attributes:
        in_fp8: on float8 codes; else in the compute dtype.
        static_scale: whether activations take the checkpoint's scale; else each row gets its own.
        reason: why not in float8, or why the checkpoint's scale is not taken; "" where there is nothing to say.
    """

    in_fp8: bool
    static_scale: bool = False
    reason: str = ""


_NARROW = "narrower than fp8.least_features: quantising its input would cost more than the product saves"

IN_COMPUTE_DTYPE = Products(False)
"""Products of a layer that nobody asked to multiply in float8."""


def choose_products(
    module: nn.Module, codec: Codec, bundles: Sequence[Bundle], header: Header, *, kept: bool, settings: Fp8Settings
) -> Products:
    """Decide for one quantised layer.

    Args:
        module: the layer, plain, on the meta device.
        codec: what its weight is kept in.
        bundles: the file's weights that it is made of.
        header: whose files hold the static scales; these few bytes are read.
        kept: whether the codes are the file's, with which its scales of activations were calibrated.
        settings: whether a producer's wish for full precision is followed, and from which width on float8 pays.
    """
    if type(module) is not nn.Linear:
        return Products(False, reason=f"a {type(module).__name__} has no product in float8")
    obstacle = compute_obstacle(module.in_features, module.out_features, codec)
    if obstacle is not None:
        return Products(False, reason=obstacle)
    if settings.hints == "follow" and any(bundle.full_precision for bundle in bundles):
        return Products(False, reason="its producer marks it for products in full precision")
    if min(module.in_features, module.out_features) < settings.least_features:
        return Products(False, reason=_NARROW)
    if not kept:
        calibrated = any(INPUT_SCALE in bundle.sides for bundle in bundles)
        return Products(True, reason="its scale of activations was calibrated with other codes" if calibrated else "")
    value, reason = _static_scale(bundles, header)
    return Products(True, value is not None, reason)


def _static_scale(bundles: Sequence[Bundle], header: Header) -> tuple[float | None, str]:
    """The scale of activations that a checkpoint was calibrated with, or None and why it is not taken."""
    scales = [bundle.sides.get(INPUT_SCALE) for bundle in bundles]
    if not scales or any(scale is None for scale in scales):
        return None, ""
    values = {_number(header, scale) for scale in scales if scale is not None}
    if len(values) > 1:
        return None, "its rows were calibrated with different scales of activations"
    (value,) = values
    if value is None:
        odd = next(filter(None, (number_obstacle(scale) for scale in scales if scale is not None)), "")
        return None, f"its scale of activations is not taken: {odd}"
    obstacle = input_scale_obstacle(value)
    return (None, f"its scale of activations is not taken: {obstacle}") if obstacle is not None else (value, "")


def number_obstacle(tensor: TensorInfo) -> str | None:
    """Why a tensor can't hold a scale of activations, whatever its value, as a clause; None where it can."""
    if tensor.elements != 1:
        return f"it has shape {list(tensor.shape)}, where one number is needed"
    return None if tensor.dtype in (*_FORMS, "BF16") else f"it is in {tensor.dtype}, where a float is needed"


def _number(header: Header, tensor: TensorInfo) -> float | None:
    """The value of a tensor of one float."""
    if number_obstacle(tensor) is not None:
        return None
    raw = read_tensor_bytes(header, tensor, limit=8)
    if tensor.dtype == "BF16":
        return float(struct.unpack("<f", b"\x00\x00" + raw)[0])
    return float(struct.unpack(_FORMS[tensor.dtype], raw)[0])
