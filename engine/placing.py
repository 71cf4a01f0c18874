"""Builds the model that a plan describes and puts its tensors in their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slipcast.engine.build import build_with_buffers
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.layers import quantise_module_
from slipcast.engine.materialise import refuse_meta_tensors
from slipcast.engine.plan import Plan
from slipcast.engine.quantised_model import mark_quantised_
from slipcast.engine.weight_entries import WEIGHT
from slipcast.registry.side_tensors import INPUT_SCALE


def build_model(plan: Plan, built: nn.Module | None = None) -> nn.Module:
    """Build the class, with layers that take codes where the plan has them, and no parameter yet.

    Args:
        plan: of the model.
        built: the model without its parameters, if it is there already.
    """
    model = build_with_buffers(plan.origin.model, plan.origin.config) if built is None else built
    compute_dtype = getattr(torch, plan.compute_dtype)
    for module in plan.modules:
        if module.codec is not None:
            layer = quantise_module_(model.get_submodule(module.path), codec_named(module.codec), compute_dtype)
            layer.full_precision = module.full_precision
    return model


def place(plan: Plan, model: nn.Module, tensors: Mapping[str, torch.Tensor], *, mapped: bool) -> None:
    """Put tensors in the model, filled or not.

    Args:
        plan: that the model was built by.
        model: where they go.
        tensors: stored name -> tensor.
        mapped: whether those that stay in the mapped file, which come with their values, or all others.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for target in plan.targets:
        if target.mapped is not mapped or target.how == "tie":
            continue
        if target.codec is not None:
            quantised: Any = modules[target.name.removesuffix(f".{WEIGHT}")]
            weight = [stored.name for stored in target.stored if _leaf(stored.name) != INPUT_SCALE]
            quantised.set_weight({_leaf(name): tensors[name] for name in weight})
            continue
        for stored in target.stored:
            owner, leaf = _place(modules, stored.name)
            if target.how == "computed":
                owner._buffers[leaf] = model.get_buffer(stored.name).to(plan.device)
            elif stored.kind == "buffer":
                owner._buffers[leaf] = tensors[stored.name]
            else:
                _put_parameter(owner, leaf, tensors[stored.name])


def finished(plan: Plan, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model, with its ties and with its products in float8, once every tensor is filled and in its place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for target in plan.targets:
        if target.how == "tie":
            _tie(modules, target.name, target.tied_to or "")
    for module in plan.modules:
        if module.products is not None:
            multiplying: Any = modules[module.path]
            scale = tensors.get(f"{module.path}.{INPUT_SCALE}")
            enable_compute_(multiplying, input_scale=scale, per_tensor=module.activation_scale == "tensor")
    refuse_meta_tensors(model)
    return mark_quantised_(model) if any(module.codec is not None for module in plan.modules) else model


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _place(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and what it calls it."""
    path, _, leaf = name.rpartition(".")
    return modules[path], leaf


def _put_parameter(owner: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    old = owner._parameters[leaf]
    owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)


def _tie(modules: Mapping[str, nn.Module], name: str, first: str) -> None:
    owner, leaf = _place(modules, first)
    module, own_leaf = _place(modules, name)
    kind = "_parameters" if leaf in owner._parameters else "_buffers"
    getattr(module, kind)[own_leaf] = getattr(owner, kind)[leaf]
