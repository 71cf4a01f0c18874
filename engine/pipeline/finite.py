"""Notices a draw whose values are not finite, which comes out black without a word, and looks for the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slipcast.engine.compute_dtype import compute_dtype
from slipcast.engine.seen_values import not_finite


class Outputs:
    """Which models of a pipeline gave values that are not finite, in one draw.

    Attributes:
        models: role -> model, those that are watched.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = models
        self._bad: dict[str, torch.Tensor] = {}

    def look_at(self, role: str, output: Any) -> None:
        """Take down whether an output's first tensor is finite; a GPU is not waited for."""
        found = (value for value in tree_leaves(_plain(output)) if isinstance(value, torch.Tensor))
        first = next((value for value in found if value.is_floating_point()), None)
        if first is not None:
            bad = ~first.detach().sum(dtype=torch.float32).isfinite()
            self._bad[role] = bad | self._bad[role] if role in self._bad else bad

    def not_finite(self) -> tuple[str, ...]:
        """Roles of the models whose outputs were not finite, in the order of their first; waits for the GPU."""
        return tuple(role for role, bad in self._bad.items() if bool(bad))


@contextmanager
def watched(pipe: Any) -> Iterator[Outputs]:
    """A block in which the outputs of a pipeline's models are looked at.

    Args:
        pipe: a diffusers pipeline.
    """
    models = {role: part for role, part in pipe.components.items() if isinstance(part, nn.Module)}
    outputs = Outputs(models)
    decoding: dict[str, Any] = {role: model for role, model in models.items() if hasattr(model, "decode")}
    before = {role: model.__dict__.get("decode") for role, model in decoding.items()}
    hooks = []
    for role, model in models.items():
        if role in decoding:
            decoding[role].decode = _looking(outputs, role, decoding[role].decode)
        else:
            hooks.append(model.register_forward_hook(lambda _, __, output, role=role: outputs.look_at(role, output)))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
        for role, own in before.items():
            if own is None:
                del decoding[role].decode
            else:
                decoding[role].decode = own


def explained(outputs: Outputs) -> str | None:
    """What to say of a draw that is not finite, with the likely causes; None of one that is."""
    bad = outputs.not_finite()
    if not any(role == last for role in bad for last in _last(outputs)):
        return None
    first = outputs.models[bad[0]]
    causes = [f"{role}: {found}" for role in bad if (found := _weights(outputs.models[role])) is not None]
    dtype = str(compute_dtype(first)).removeprefix("torch.")
    if not causes and dtype == "float16":
        causes.append(f"{bad[0]} computes in float16, which holds no more than 65504: set dtype=bfloat16 or float32")
    if not causes:
        causes.append(f"no weight of it is, so its inputs or its {dtype} are: try dtype=float32, and another scheduler")
    return (
        f"the result holds values that are NaN or infinite, drawn as black or as noise; {bad[0]} gave the first of "
        f"them; {'; '.join(causes)}"
    )


def _last(outputs: Outputs) -> set[str]:
    """Roles whose outputs are the result: those that decode, else all."""
    return {role for role, model in outputs.models.items() if hasattr(model, "decode")} or set(outputs.models)


def _weights(model: nn.Module) -> str | None:
    tensors = {
        name: tensor
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not tensor.is_meta
    }
    return not_finite(tensors, tensors)


def _looking(outputs: Outputs, role: str, plain: Any) -> Any:
    def decode(*arguments: Any, **options: Any) -> Any:
        output = plain(*arguments, **options)
        outputs.look_at(role, output)
        return output

    return decode


def _plain(output: Any) -> Any:
    return list(output.values()) if isinstance(output, Mapping) else output
