"""What the entries of a state dict mean for a quantised weight: parts to take over, a weight to encode, or a fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from slipcast.engine.codecs.base import CODES, Codec, Shape, is_plain_float
from slipcast.registry.errors import QuantisationError

WEIGHT = "weight"
_USE_LOAD = "load the checkpoint with slipcast.load, which chooses the codec by the file"


def tensor_name(part: str) -> str:
    """A part's name in its module: ``weight`` for the codes, ``weight_scale`` for the scale, and so on."""
    return WEIGHT if part == CODES else f"{WEIGHT}_{part}"


def is_weight_entry(name: str) -> bool:
    """Whether a name within a module is the weight's or one of its side tensors'."""
    return name == WEIGHT or (name.startswith(f"{WEIGHT}_") and "." not in name)


def read_entries(entries: Mapping[str, Tensor], codec: Codec, shape: Shape) -> dict[str, Tensor]:
    """The parts of a quantised weight by their names in the module.

    A weight in a plain float dtype is encoded; codes are taken with all of their scales, or not at all.

    Args:
        entries: what the state dict holds of the weight, by name within the module.
        codec: how the module keeps its weight.
        shape: the weight's logical shape.

    Raises:
        QuantisationError: entries that contradict each other or the module.
    """
    side = [name for name in entries if name != WEIGHT]
    weight = entries.get(WEIGHT)
    if weight is None:
        raise QuantisationError(
            f"{_listed(side)} without {WEIGHT}",
            expected=f"{WEIGHT} beside its scale",
            hint="load both from the same checkpoint; a scale alone would change what the present codes mean",
        )
    if is_plain_float(weight.dtype):
        return _encoded(weight, side, codec, shape)
    return _taken_over(entries, codec, shape)


def _encoded(weight: Tensor, side: list[str], codec: Codec, shape: Shape) -> dict[str, Tensor]:
    if side:
        raise QuantisationError(
            f"{WEIGHT} in {weight.dtype} together with {_listed(side)}",
            expected="codes with their scale, or a float weight without one",
            hint="if the scale is already multiplied in, remove it; if not, multiply it in, then remove it",
        )
    if tuple(weight.shape) != shape:
        raise QuantisationError(
            f"{WEIGHT} of shape {list(weight.shape)}",
            expected=f"shape {list(shape)}",
            hint="load a checkpoint of the same architecture",
        )
    return {tensor_name(part): tensor for part, tensor in codec.encode(weight).items()}


def _taken_over(entries: Mapping[str, Tensor], codec: Codec, shape: Shape) -> dict[str, Tensor]:
    expected = {tensor_name(name): part for name, part in codec.parts(shape).items()}
    if missing := expected.keys() - entries.keys():
        raise QuantisationError(
            f"{WEIGHT} in {entries[WEIGHT].dtype} without {_listed(missing)}",
            expected=f"what {codec.name} stores: {_listed(expected)}",
            hint="load the scale with its codes; codes alone are not the weight",
        )
    if unknown := entries.keys() - expected.keys():
        raise QuantisationError(
            f"{_listed(unknown)} beside {WEIGHT}",
            expected=f"what {codec.name} stores: {_listed(expected)}",
            hint=f"this layer would ignore it; {_USE_LOAD}",
        )
    parts = {}
    for name, part in expected.items():
        tensor = entries[name]
        if tensor.numel() == 1 and part.shape in ((), (1,)):
            tensor = tensor.reshape(part.shape)
        if tensor.dtype != part.dtype and is_plain_float(tensor.dtype) and is_plain_float(part.dtype):
            tensor = tensor.to(part.dtype)
        if tensor.dtype != part.dtype or tuple(tensor.shape) != part.shape:
            raise QuantisationError(
                f"{name} in {tensor.dtype} of shape {list(tensor.shape)}",
                expected=f"{part.dtype} of shape {list(part.shape)}, as {codec.name} stores it",
                hint=f"{_USE_LOAD}; or dequantise the weight first",
            )
        parts[name] = tensor
    return parts


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
