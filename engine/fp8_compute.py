"""Linears that multiply in float8: quantised activations times the stored codes, through torch's scaled matmul.

The layer holds what a layer in fp8 storage holds, and a static scale of activations where the checkpoint has a usable
one. What it computes depends on nothing but its tensors and its input: not on where the weight usually lies, nor on the
number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipcast.engine.codecs.base import SCALE, Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.kernels.operators import dequantise
from slipcast.engine.kernels.plain import FLOAT8
from slipcast.engine.layers import QuantisedLinear
from slipcast.engine.quantised_input import quantised_input
from slipcast.engine.scaled_matmul import (
    ALIGNMENT,
    input_scale_obstacle,
    scaled_matmul,
    tensor_scale,
)
from slipcast.engine.weight_entries import tensor_name
from slipcast.registry.errors import QuantisationError

INPUT_SCALE = "input_scale"
_WEIGHT_SCALE = tensor_name(SCALE)


def compute_obstacle(in_features: int, out_features: int, codec: Codec) -> str | None:
    """Why a Linear kept in this codec can't multiply in float8, as a clause; None where it can.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        codec: how the weight is kept. float8_e4m3fn under a scale for each row, for the whole, or without one.
    """
    if not isinstance(codec, Float8) or codec.dtype is not FLOAT8:
        return f"its weight is stored as {codec.name}, not in {str(FLOAT8).removeprefix('torch.')}"
    if codec.granularity == "block":
        return "its scales are of blocks, which the kernel can't apply to the products"
    for name, features in (("inputs", in_features), ("outputs", out_features)):
        if features % ALIGNMENT:
            return f"it has {features} {name}, not a multiple of {ALIGNMENT}"
    return None


def enable_compute_(
    layer: QuantisedLinear, *, input_scale: Tensor | None, per_tensor: bool = False
) -> Float8ComputeLinear:
    """Let a quantised Linear multiply in float8, in place: it keeps its identity, codes, scales and hooks.

    Args:
        layer: on any device, the meta device too. One that multiplies in float8 already takes the new scale.
        input_scale: a static scale of activations, of one element, or None for a scale for each row in each forward.
            Taken over without a copy where it is float32.
        per_tensor: without a static scale, take one scale for all rows of an input instead of one for each.

    Returns:
        The layer.

    Raises:
        QuantisationError: the layer can't (see ``compute_obstacle``), or the scale can't be used (see
            ``input_scale_obstacle``).
    """
    obstacle = compute_obstacle(layer.in_features, layer.out_features, layer.codec)
    if type(layer) not in (QuantisedLinear, Float8ComputeLinear):
        obstacle = f"its class is {type(layer).__qualname__}"
    elif "forward" in vars(layer):
        obstacle = "a hook has replaced its forward; enable it before offloading or casting hooks are installed"
    if obstacle is not None:
        raise QuantisationError(
            f"a layer to multiply in float8: {obstacle}",
            expected=f"a quantised Linear in float8_e4m3fn whose sizes are multiples of {ALIGNMENT}",
            hint="leave this layer on fp8 storage",
        )
    scale = None if input_scale is None else _scalar(input_scale)
    layer.__class__ = Float8ComputeLinear
    layer.register_buffer(INPUT_SCALE, scale)
    computing: Float8ComputeLinear = layer  # type: ignore[assignment]
    computing.per_tensor = per_tensor
    return computing


def _scalar(input_scale: Tensor) -> Tensor:
    """A static scale as the layer keeps it: float32 ``[]``."""
    obstacle = None
    if input_scale.numel() != 1:
        obstacle = f"it has shape {list(input_scale.shape)}, not one element"
    elif not input_scale.is_meta:
        obstacle = input_scale_obstacle(float(input_scale))
    if obstacle is not None:
        raise QuantisationError(
            f"a static scale of activations that can't be used: {obstacle}",
            expected="one number that is finite, positive and not exactly 1.0",
            hint="leave it out: each row of activations then gets its own scale",
        )
    return input_scale.detach().reshape(()).to(torch.float32)


class Float8ComputeLinear(QuantisedLinear):
    """A Linear that multiplies in float8. ``enable_compute_`` makes it of a quantised Linear.

    Attributes:
        input_scale: the static scale of activations, float32 ``[]``, or None for a scale of each input.
        per_tensor: whether a scale of each input spans all of its rows; else each row has its own.
    """

    input_scale: Tensor | None
    per_tensor: bool

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the compute dtype, or in autocast's where that is on."""
        dtype, device = self.compute_dtype, input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        input_scale = tensor_scale(input.detach()) if self.per_tensor and self.input_scale is None else self.input_scale
        factors = (input, self.weight.detach(), self._buffers.get(_WEIGHT_SCALE), input_scale, dtype)
        if torch.is_grad_enabled() and input.requires_grad:
            result: Tensor = _Product.apply(*factors)
        else:
            result = _product(*factors)
        return result if self.bias is None else result + self.bias.to(dtype)

    def constants(self) -> tuple[str, ...]:
        """Also the static scale of activations."""
        names = super().constants()
        return names if self.input_scale is None else (*names, INPUT_SCALE)

    def extra_repr(self) -> str:
        """The quantised layer's, with how activations are scaled."""
        scaling = "static" if self.input_scale is not None else "of each input" if self.per_tensor else "of each row"
        return f"{super().extra_repr()}, fp8 compute, activation scale {scaling}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        key, error_msgs = prefix + INPUT_SCALE, arguments[-1]
        if isinstance(state_dict.get(key), Tensor):
            try:
                state_dict[key] = _scalar(state_dict[key])
            except QuantisationError as error:
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _product(
    input: Tensor, codes: Tensor, scale: Tensor | None, input_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[..., K]`` times a weight in codes."""
    rows, row_scale = quantised_input(input, codes.shape[1], input_scale)
    return scaled_matmul(rows, row_scale, codes, scale, dtype).view(*input.shape[:-1], codes.shape[0])


class _Product(torch.autograd.Function):
    """The same with a gradient, which passes the rounding by, as if activations were not quantised."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, codes: Tensor, scale: Tensor | None, input_scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.dtype = input.dtype
        return _product(input, codes, scale, input_scale, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        one = torch.ones((), device=codes.device)
        weight = dequantise(codes, one if scale is None else scale.view(-1, 1), gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None, None
