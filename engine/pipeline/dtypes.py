"""Lets models of different compute dtypes stand in one pipeline: what a model is given is cast to its own dtype.

Pipelines hand on what one model returns as it is. They do so in one dtype, but for models that would overflow in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from slipcast.engine.compute_dtype import compute_dtype


def match_dtypes_(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Where models compute in more than one dtype, make each cast its inputs.

    Vectors stay as they are: timesteps lose in a short dtype what tells them apart, and models cast them themselves.

    Args:
        models: role -> model.

    Returns:
        Role -> torch's name of the dtype, of the models that cast; empty where all compute in one.
    """
    dtypes = {role: compute_dtype(model) for role, model in models.items()}
    if len(set(dtypes.values())) <= 1:
        return {}
    for role, model in models.items():
        if hasattr(model, "encode") and hasattr(model, "decode"):
            plain: Any = type(model)
            model.__class__ = _casting_class(plain)
        else:
            model.register_forward_pre_hook(_Caster(dtypes[role]), with_kwargs=True)
    return {role: str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}


class _Caster:
    """A hook that casts the inputs of a forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(inputs, self.dtype), _cast(named, self.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.ndim > 1 else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


class _Casting:
    """What a VAE does otherwise: cast what it is given to encode and to decode."""

    def encode(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """As the plain class does."""
        plain: Any = super()
        return plain.encode(x.to(compute_dtype(self)), *arguments, **options)  # type: ignore[arg-type]

    def decode(self, z: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """As the plain class does."""
        plain: Any = super()
        return plain.decode(z.to(compute_dtype(self)), *arguments, **options)  # type: ignore[arg-type]


@cache
def _casting_class(plain: Any) -> Any:
    same = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain)(plain.__name__, (_Casting, plain), same)
