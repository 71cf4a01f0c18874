"""A small model with values of its own: its files in both namings, its inputs, and what its forward gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from slipcast.engine.build import build_with_buffers
from slipcast.engine.check.subject import Built, identify_alone
from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in
from slipcast.engine.convert import convert
from slipcast.engine.model_tensors import model_tensors
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import CheckError
from slipcast.registry.family import Family
from slipcast.registry.identify import Match
from slipcast.registry.tiny import Recipe, parse_recipe

Tensors = dict[str, torch.Tensor]
_SEED = 20


@dataclass(frozen=True)
class SmallFiles:
    """The files of a small model.

    Attributes:
        tensors: its values, by the model's names; tied ones once.
        in_model_names: a file of them, without a prefix where the family knows files without one.
        native: the same values in the family's own names, under its first prefix.
        match: the native file, recognised.
    """

    tensors: Tensors
    in_model_names: Path
    native: Path
    match: Match


def match_of(family: Family, path: Path) -> Match:
    """A file as one of this family."""
    return identify_alone(family, read_checkpoint(path).headers[""])


def write_files(family: Family, tensors: Tensors, folder: Path) -> SmallFiles:
    """Write a small model's values in both namings, with what the family's evidence names of models that it contains.

    Raises:
        SlipcastError: the family doesn't recognise one of the files, or its key map can't write it.
    """
    folder.mkdir()
    in_model_names, native = folder / "model.safetensors", folder / "native.safetensors"
    beside = {name: torch.zeros(1) for name in family.identify.has if family.key_map.contained(name) is not None}
    whole = {model_prefix(family) + name: tensor for name, tensor in (tensors | beside).items()}
    save_file(whole, in_model_names)
    convert(match_of(family, in_model_names), native, "native", prefix=family.prefixes[0])
    return SmallFiles(tensors, in_model_names, native, match_of(family, native))


def model_prefix(family: Family) -> str:
    """What stands before the model's names in a file: nothing, where the family knows such files."""
    return "" if "" in family.prefixes else family.prefixes[0]


def unique_values(built: Built) -> Tensors:
    """For every tensor of a model whole numbers that stand nowhere else, int32."""
    tensors: Tensors = {}
    stop = 0
    for name, shape in _untied(built):
        start, stop = stop, stop + prod(shape)
        tensors[name] = torch.arange(start, stop, dtype=torch.int32).view(shape)
    return tensors


def random_values(built: Built) -> Tensors:
    """Random float32 values that keep activations near one: weights by their number of inputs, norms near one.

    Integers, which count something, are ones.
    """
    random = torch.Generator().manual_seed(_SEED)
    norms = {path for path, module in built.model.named_modules() if "norm" in type(module).__name__.lower()}
    tensors: Tensors = {}
    for name, shape in _untied(built):
        owner, _, leaf = name.rpartition(".")
        values = torch.randn(shape, generator=random)
        buffer = built.tensors.persistent.get(name)
        if buffer is not None and not buffer.is_floating_point():
            tensors[name] = torch.ones(shape, dtype=buffer.dtype)
        elif len(shape) >= 2:
            tensors[name] = values / max(prod(shape[1:]), 1) ** 0.5
        else:
            tensors[name] = values / 10 + (1.0 if owner in norms and leaf != "bias" else 0.0)
    return tensors


def _untied(built: Built) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in built.shapes.items():
        if name not in built.tensors.ties:
            yield name, shape


def reference_model(match: Match, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The class with these values, put in by torch alone."""
    model = build_with_buffers(match.model, match.config)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    tied = {name: values[first] for name, first in model_tensors(model).ties.items() if first in values}
    model.load_state_dict({**values, **tied}, strict=False, assign=True)
    return model.eval()


def make_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, the same ones in every call.

    Args:
        inputs: the section ``tiny.inputs`` of a family file.
    """
    random = torch.Generator().manual_seed(_SEED + 1)
    return {name: _made(value, random) for name, value in inputs.items()}


def _made(value: Any, random: torch.Generator) -> Any:
    if isinstance(value, str):
        return _tensor(parse_recipe(value), random)
    if isinstance(value, Mapping):
        return {name: _made(item, random) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_made(item, random) for item in value]
    return value


def _tensor(recipe: Recipe, random: torch.Generator) -> torch.Tensor:
    if recipe.kind == "normal":
        return torch.randn(recipe.shape, generator=random)
    if recipe.kind == "uniform":
        return torch.rand(recipe.shape, generator=random) * recipe.bound
    if recipe.kind == "integers":
        return torch.randint(recipe.bound, recipe.shape, generator=random)
    return torch.ones(recipe.shape, dtype=torch.bool if recipe.kind == "true" else torch.float32)


def run(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """All floats that a forward gives, one after another, float32.

    Raises:
        CheckError: the forward fails, gives no floats, or gives some that are not finite.
    """
    given = _outputs(model, make_inputs(inputs))
    floats = [tensor.float().flatten() for tensor in _floats(given)]
    values = torch.cat(floats) if floats else torch.empty(0)
    if not values.numel() or not bool(torch.isfinite(values).all()):
        raise _wrong("the forward gives " + ("values that are not finite" if values.numel() else "no floats"))
    return values


def output_dtypes(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The dtypes of the floats that a forward gives, of inputs in bfloat16.

    Raises:
        CheckError: the forward fails.
    """
    given = _outputs(model, _in_bfloat16(make_inputs(inputs)))
    return [str(tensor.dtype).removeprefix("torch.") for tensor in _floats(given)]


def _in_bfloat16(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _in_bfloat16(item) for name, item in value.items()}
    return [_in_bfloat16(item) for item in value] if isinstance(value, list | tuple) else value


def _outputs(model: nn.Module, arguments: dict[str, Any]) -> Any:
    if "return_dict" in inspect.signature(model.forward).parameters:
        arguments.setdefault("return_dict", False)
    try:
        with torch.no_grad(), torchvision_or_stand_in(model):
            return model(**arguments)
    except Exception as error:  # whatever a class of another library raises
        raise _wrong(f"the forward fails: {type(error).__name__}: {error}") from error


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def _wrong(found: str) -> CheckError:
    return CheckError(
        found,
        expected="finite outputs of the small model",
        hint="correct tiny.inputs, or tiny.config",
    )
