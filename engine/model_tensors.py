"""The tensors of a model class by name: parameters, buffers, what is tied, and what stands in no state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model class, by name.

    Attributes:
        parameters: every parameter, tied ones under each name.
        persistent: buffers that a state dict holds.
        computed: buffers that the class makes itself, by dotted path.
        ties: name -> the first name of the same tensor.
    """

    parameters: Mapping[str, torch.Tensor]
    persistent: Mapping[str, torch.Tensor]
    computed: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]


def model_tensors(model: nn.Module) -> ModelTensors:
    """Every parameter and buffer of a model, with what is tied and what is not in its state dict."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent: dict[str, torch.Tensor] = {}
    computed: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{path}.{leaf}" if path else leaf
                (computed if leaf in module._non_persistent_buffers_set else persistent)[name] = buffer
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in chain(parameters.items(), persistent.items(), computed.items()):
        if first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ModelTensors(parameters, persistent, computed, ties)
