"""Layers that keep their weight quantised: subclasses of the torch layers that they replace.

The codes are the parameter ``weight``, the scales are buffers beside it (``weight_scale``, ...), the bias stays a
parameter in the compute dtype. A forward decodes the weight into a temporary and never writes back. Codes and scales
are constants: no cast, move or copy of the module changes a bit of them, and no gradient reaches them, whatever
``requires_grad`` says (of integer codes torch refuses to set it).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipcast.engine.codecs.base import Codec, Part, Shape, bits, is_plain_float
from slipcast.engine.codes import Codes
from slipcast.engine.weight_entries import WEIGHT, is_weight_entry, read_entries, tensor_name
from slipcast.registry.errors import QuantisationError


class QuantisedModule(nn.Module):
    """What all quantised layers share. ``quantise_module_`` makes them of plain layers.

    Attributes:
        codec: how the weight is stored.
        compute_dtype: dtype that the weight is decoded to, which inputs must have; follows ``.to(dtype)`` and its like.
        full_precision: whether the producer of the codes marks the layer for products in full precision. Without a
            bearing here; it is saved with the model, so that a plan for the saved folder knows it.
    """

    codec: Codec
    compute_dtype: torch.dtype
    full_precision: bool = False
    weight: Tensor
    _places: tuple[tuple[str, str], ...]
    """Each part's name with that of the tensor which holds it."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """Of the plain class's arguments make a plain layer.

        For those who want a layer like another and call ``type(layer)``, as peft does for adapters of convolutions. It
        would be no quantised layer, for a codec and codes are no arguments. Without arguments, as copies are made, the
        class is what it says.
        """
        if not arguments and not options:
            return super().__new__(cls)
        return next(kind for kind in cls.__mro__ if not issubclass(kind, QuantisedModule))(*arguments, **options)

    @property
    def weight_shape(self) -> Shape:
        """The weight's logical shape: that of the plain layer."""
        return weight_shape(self)

    def expected_tensors(self) -> dict[str, Part]:
        """Dtype and shape of each tensor that holds the weight, by its name in the module."""
        return {tensor_name(name): part for name, part in self.codec.parts(self.weight_shape).items()}

    def constants(self) -> tuple[str, ...]:
        """Names of the tensors that no cast may touch: those that hold the weight, and what a subclass adds."""
        return tuple(self.expected_tensors())

    def set_weight(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over codes and scales, by name in the module; nothing is copied or cast.

        Raises:
            QuantisationError: names, dtypes or shapes other than ``expected_tensors``.
        """
        expected = self.expected_tensors()
        found = {name: Part(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if found != expected:
            raise QuantisationError(
                "; ".join(f"{name} in {part.dtype} of shape {list(part.shape)}" for name, part in found.items()),
                expected="; ".join(
                    f"{name} in {part.dtype} of shape {list(part.shape)}" for name, part in expected.items()
                ),
                hint=f"give all tensors of {self.codec.name}, as the layer's expected_tensors() lists them",
            )
        self._places = tuple((name, tensor_name(name)) for name in self.codec.parts(self.weight_shape))
        for name, tensor in tensors.items():
            if name == WEIGHT:
                self._parameters[name] = Codes(tensor)
            else:
                self._buffers[name] = tensor.detach()

    def parts(self) -> dict[str, Tensor]:
        """The weight as its codec takes it. Detached: to a forward the codes are constants."""
        return {name: _tensor(self, tensor).detach() for name, tensor in self._places}

    def dequantised_weight(self) -> Tensor:
        """The weight in the compute dtype, as a new tensor of the logical shape.

        Not in a buffer that layers share: autograd keeps the weight of a product with an input that takes a gradient,
        a compiler or a recorded graph would keep the buffer, and two streams would write it at once. Nor is there need:
        torch's allocator gives the place of one layer's weight to the next one's, as soon as it is let go.
        """
        return self.codec.decode(self.parts(), self.weight_shape, self.compute_dtype)

    def extra_repr(self) -> str:
        """The plain layer's, with the codec and the compute dtype."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, codec={self.codec.name}, compute_dtype={dtype}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a move or cast to the bias and, as far as it is a move, to codes and scales.

        These are handed over as integers, which casts of floats pass by; a cast all the same (``.type``) is undone.
        So is a cast of the bias to a dtype that nothing can be computed in.
        """
        own = [_tensor(self, name) for name in self.constants()]

        def keep_bits(tensor: Tensor) -> Tensor:
            if not any(tensor is part for part in own):
                applied = fn(tensor)
                return applied if is_plain_float(applied.dtype) else tensor.to(applied.device)
            integers = bits(tensor.detach())
            applied = fn(integers)
            if applied is integers:
                return tensor.detach() if isinstance(tensor, Codes) else tensor
            if applied.dtype != integers.dtype:
                applied = integers.to(applied.device)
            return applied.view(tensor.dtype)

        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device))
        super()._apply(keep_bits, recurse)
        self._guard_codes()
        if is_plain_float(probe.dtype):
            self.compute_dtype = probe.dtype
        return self

    def _guard_codes(self) -> None:
        """Torch makes plain parameters of what it moves to the meta device, swaps or assigns."""
        weight: Any = self._parameters[WEIGHT]
        weight.__class__ = Codes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(super().__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The state for a pickle, which can't hold float8 tensors: they travel as their bits."""
        state = dict(super().__getstate__())
        for group in ("_parameters", "_buffers"):
            state[group] = {name: self._pickled(name, tensor) for name, tensor in state[group].items()}
        return state

    def _pickled(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or name not in self.expected_tensors() or is_plain_float(tensor.dtype):
            return tensor
        return bits(tensor.detach())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        expected = self.expected_tensors()
        self.set_weight({name: _tensor(self, name).view(part.dtype) for name, part in expected.items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load codes with their scales, or encode a float weight; anything else is an error, strict or not."""
        own = {key: key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
        keys = {key: name for key, name in own.items() if is_weight_entry(name)}
        entries = {name: state_dict.pop(key) for key, name in keys.items()}
        failed = False
        if entries:
            try:
                parts = read_entries(entries, self.codec, self.weight_shape)
                state_dict.update({prefix + name: tensor for name, tensor in parts.items()})
            except QuantisationError as error:
                failed = True
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
        bias = state_dict.get(f"{prefix}bias")
        if isinstance(bias, Tensor) and local_metadata.get("assign_to_params_buffers", False):
            state_dict[f"{prefix}bias"] = bias.to(self.compute_dtype)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        self._guard_codes()
        reported = {prefix + name for name in self.expected_tensors()} if failed else set()
        missing_keys += [key for key in missing if key not in reported]


def _tensor(module: nn.Module, name: str) -> Tensor:
    tensor = module._parameters.get(name)
    return module._buffers[name] if tensor is None else tensor  # type: ignore[return-value]


class QuantisedLinear(QuantisedModule, nn.Linear):
    """A Linear that decodes its weight in each forward."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` in the compute dtype to ``[..., out_features]``."""
        return functional.linear(input, self.dequantised_weight(), self.bias)


class QuantisedEmbedding(QuantisedModule, nn.Embedding):
    """An Embedding that decodes only the rows that it is asked for."""

    def forward(self, input: Tensor) -> Tensor:
        """Indices ``[...]`` to rows ``[..., embedding_dim]`` in the compute dtype."""
        rows = input.reshape(-1)
        chosen = self.codec.select_rows(self.parts(), rows)
        decoded = self.codec.decode(chosen, (rows.numel(), self.embedding_dim), self.compute_dtype)
        return decoded.reshape(*input.shape, self.embedding_dim)


class _QuantisedConv(QuantisedModule):
    def forward(self, input: Tensor) -> Tensor:
        """``[N, C_in, ...]`` in the compute dtype to ``[N, C_out, ...]``."""
        layer: Any = self
        result: Tensor = layer._conv_forward(input, self.dequantised_weight(), layer.bias)
        return result


class _QuantisedConvTranspose(QuantisedModule):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """``[N, C_in, ...]`` in the compute dtype to ``[N, C_out, ...]``."""
        layer: Any = self
        dimensions = len(layer.kernel_size)
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, dimensions, layer.dilation
        )
        weight = self.dequantised_weight()
        transposed: Callable[..., Tensor] = _CONV_TRANSPOSE[dimensions]
        return transposed(
            input, weight, layer.bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
        )


_CONV_TRANSPOSE = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


class QuantisedConv1d(_QuantisedConv, nn.Conv1d):
    """A Conv1d that decodes its weight in each forward."""


class QuantisedConv2d(_QuantisedConv, nn.Conv2d):
    """A Conv2d that decodes its weight in each forward."""


class QuantisedConv3d(_QuantisedConv, nn.Conv3d):
    """A Conv3d that decodes its weight in each forward."""


class QuantisedConvTranspose1d(_QuantisedConvTranspose, nn.ConvTranspose1d):
    """A ConvTranspose1d that decodes its weight in each forward."""


class QuantisedConvTranspose2d(_QuantisedConvTranspose, nn.ConvTranspose2d):
    """A ConvTranspose2d that decodes its weight in each forward."""


class QuantisedConvTranspose3d(_QuantisedConvTranspose, nn.ConvTranspose3d):
    """A ConvTranspose3d that decodes its weight in each forward."""


QUANTISED_CLASSES: Mapping[type[nn.Module], type[QuantisedModule]] = MappingProxyType(
    {
        nn.Linear: QuantisedLinear,
        nn.Conv1d: QuantisedConv1d,
        nn.Conv2d: QuantisedConv2d,
        nn.Conv3d: QuantisedConv3d,
        nn.ConvTranspose1d: QuantisedConvTranspose1d,
        nn.ConvTranspose2d: QuantisedConvTranspose2d,
        nn.ConvTranspose3d: QuantisedConvTranspose3d,
        nn.Embedding: QuantisedEmbedding,
    }
)
"""Plain classes and what they become. By exact class: a subclass of a torch layer may do more than the layer."""


def weight_shape(module: nn.Module) -> Shape:
    """The logical shape of the weight of a layer, plain or quantised, from the layer's own attributes."""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)
    if isinstance(module, nn.Embedding):
        return (module.num_embeddings, module.embedding_dim)
    layer: Any = module
    outputs, inputs, groups = layer.out_channels, layer.in_channels, layer.groups
    channels = (inputs, outputs // groups) if layer.transposed else (outputs, inputs // groups)
    return (*channels, *layer.kernel_size)


def layer_codec(module: nn.Module, codec: Codec) -> Codec:
    """The codec as this layer uses it: scales of rows follow the outputs, axis 1 of transposed convolutions."""
    return codec.for_axis(1 if getattr(module, "transposed", False) else 0)


def quantisation_obstacle(module: nn.Module, codec: Codec) -> str | None:
    """Why a layer can't keep its weight in this codec, as a clause; None where it can.

    The answer is the same on the meta device, so a plan can ask it. A layer that is quantised already is no obstacle to
    the same codec.
    """
    codec = layer_codec(module, codec)
    if isinstance(module, QuantisedModule):
        return None if module.codec == codec else f"it is stored as {module.codec.name}"
    if type(module) not in QUANTISED_CLASSES:
        return f"its class is {type(module).__qualname__}, which has no quantised counterpart"
    if "forward" in vars(module):
        return "a hook has replaced its forward; quantise before offloading or casting hooks are installed"
    weight = module._parameters.get(WEIGHT)
    if weight is None or not is_plain_float(weight.dtype):
        return "its weight is not a float parameter"
    if tuple(weight.shape) != weight_shape(module):
        return f"its weight has shape {list(weight.shape)} where its attributes say {list(weight_shape(module))}"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse:
            return "an embedding with max_norm or sparse gradients writes to its weight"
        if not codec.embeds:
            return f"rows of {codec.name} can't be decoded by themselves"
    return codec.obstacle(tuple(weight.shape))


def quantise_module_(module: nn.Module, codec: Codec, compute_dtype: torch.dtype) -> QuantisedModule:
    """Turn a plain layer into its quantised counterpart, in place: it keeps its identity, hooks and attributes.

    On the meta device the parts are made there too, to be filled with ``set_weight``. A layer that is already quantised
    with this codec stays as it is.

    Args:
        module: a layer of a class in ``QUANTISED_CLASSES``, on any device.
        codec: how to store the weight.
        compute_dtype: dtype to decode the weight to, and of the bias.

    Returns:
        The module.

    Raises:
        QuantisationError: the layer can't be stored so (see ``quantisation_obstacle``), or its weight isn't finite.
    """
    obstacle = quantisation_obstacle(module, codec)
    if obstacle is not None:
        raise QuantisationError(
            f"a layer to be stored as {codec.name}: {obstacle}",
            expected="a layer of "
            + ", ".join(kind.__name__ for kind in QUANTISED_CLASSES)
            + " that the format can hold",
            hint="keep this layer in the compute dtype, or choose another format for it",
        )
    if isinstance(module, QuantisedModule):
        return module
    codec = layer_codec(module, codec)
    weight: Tensor = module._parameters[WEIGHT]  # type: ignore[assignment]
    if weight.is_meta:
        parts = {name: part.empty("meta") for name, part in codec.parts(tuple(weight.shape)).items()}
    else:
        parts = codec.encode(weight)
    bias = module._parameters.get("bias")
    if bias is not None:
        bias.data = bias.data.to(compute_dtype)
    module.__class__ = QUANTISED_CLASSES[type(module)]
    quantised: QuantisedModule = module  # type: ignore[assignment]
    quantised.codec, quantised.compute_dtype = codec, compute_dtype
    quantised.set_weight({tensor_name(name): part for name, part in parts.items()})
    return quantised
