"""The last look at a loaded model: nothing may be left on the meta device, wherever a module keeps it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slipcast.registry.errors import AccountingError

_DEPTH = 6
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})


def refuse_meta_tensors(model: nn.Module) -> None:
    """Raise if a parameter, a buffer or a tensor in a plain attribute has no memory.

    Raises:
        AccountingError: it lists them.
    """
    left = sorted(set(meta_tensors(model)))
    if left:
        raise AccountingError(
            f"{len(left)} tensors of the model that nothing has filled",
            expected="a model without a tensor on the meta device",
            hint="the family file does not describe all of the class; run 'slipcast check' on it",
            items=left,
        )


def meta_tensors(model: nn.Module) -> Iterator[str]:
    """Dotted paths of all tensors on the meta device, also those in plain attributes, lists and helper objects."""
    return (path for path, tensor, _ in _tensors(model) if tensor.is_meta)


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a model computes itself, by dotted path, each once: what is in no state dict."""
    found = {id(tensor): (path, tensor) for path, tensor, is_stored in _tensors(model) if not is_stored}
    return dict(found.values())


def is_bare(model: nn.Module, left: Iterable[torch.Tensor]) -> bool:
    """Whether a model consists of parameters and of what a state dict holds, and nothing else.

    Args:
        model: the model.
        left: tensors that its constructor made, wherever they are.
    """
    stored = {id(tensor) for tensor in model.parameters()}
    for module in model.modules():
        stored |= {id(module._buffers[name]) for name in module._buffers.keys() - module._non_persistent_buffers_set}
    return all(id(tensor) in stored for tensor in left) and all(
        id(tensor) in stored for _, tensor, _ in _tensors(model)
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor with its dotted path, and whether a state dict has it."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for leaf, tensor in value.items():
                    if tensor is not None:
                        yield prefix + leaf, tensor, leaf not in module._non_persistent_buffers_set
            elif name != "_modules" and not _is_plain(value):
                for where, tensor in _walk(value, prefix + name, _DEPTH, set()):
                    yield where, tensor, isinstance(tensor, nn.Parameter)


def _is_plain(value: Any) -> bool:
    """Whether a value is plain at a glance: a number, text, or an empty container. Nearly all attributes are."""
    kind = type(value)
    return kind in _PLAIN or (kind in _CONTAINERS and not value)


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = [(str(index), child) for index, child in enumerate(value)]
    elif type(value).__module__.startswith(("diffusers.", "transformers.")) and hasattr(value, "__dict__"):
        children = list(vars(value).items())
    else:
        return
    for name, child in children:
        if not _is_plain(child):
            yield from _walk(child, f"{path}.{name}", depth - 1, seen)
