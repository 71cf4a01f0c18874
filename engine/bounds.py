"""Bounds of what a model class makes of its configuration, which nobody vouches for: seen before memory is taken."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slipcast.engine.materialise import tables
from slipcast.registry.errors import ConfigError

_LARGEST_NUMBER = 1 << 20
_LARGEST_RESULT = 2 << 30
"""Bytes of one step on the way to a table."""
_TABLES_FLOOR = 512 << 20
"""Bytes of tables that any model may have: a position table of a video model takes 220 MB."""
MOST_TENSORS = 1 << 15
"""Tensors that a constructor may make, of layers beyond number; published models have some thousands."""
_HINT = "put the config.json beside the weights that they were published with, or correct config: in the family file"
_FREE = ("theta", "seed")
"""Words of numbers that count nothing."""


class TooLargeError(ValueError):
    """A step of a constructor whose result, or whose repetition, would not stay within bounds."""


class BoundedResults(TorchDispatchMode):
    """Refuses each operation with a result of more than 2 GiB, before it is allocated; parameters may have any size.

    What is on the meta device takes no memory, but will, where the model is built for its load.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if _takes_no_memory(func):
            return func(*args, **options)
        given = next((value for value in tree_leaves((args, options)) if isinstance(value, torch.Tensor)), None)
        device = options.get("device") or ("cpu" if given is None else given.device)
        if torch.device(device).type != "meta":
            _refuse_large(_on_meta(func, args, options), func)
        result = func(*args, **options)
        _refuse_large(result, func)
        return result


@cache
def _takes_no_memory(func: Any) -> bool:
    """Whether an operation gives what is there already, or what a parameter begins as."""
    returned = func._schema.returns
    return (
        not returned
        or any(value.alias_info is not None for value in returned)
        or "empty" in func._schema.name
        or func._schema.name == "aten::_to_copy"
    )


def _on_meta(func: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """An operation's result without its values; None of one that the meta device has not."""
    try:
        moved, named = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, dict(options)))
        if "device" in named or any(argument.name == "device" for argument in func._schema.arguments):
            named["device"] = torch.device("meta")
        return func(*moved, **named)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _refuse_large(result: Any, func: Any) -> None:
    for tensor in result if isinstance(result, tuple | list) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.numel() * tensor.element_size() > _LARGEST_RESULT:
            nbytes = tensor.numel() * tensor.element_size()
            raise TooLargeError(f"{func._schema.name} of {list(tensor.shape)} would take {nbytes:,} bytes")


def refuse_large_numbers(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse whole numbers by which a class would count beyond reason, at once or when it first runs.

    Raises:
        ConfigError: it lists them.
    """
    large = [
        f"{key}: {str(value)[:80]}"
        for key, value in arguments.items()
        if not any(word in key for word in _FREE)
        for number in (value if isinstance(value, list | tuple) else [value])
        if isinstance(number, int) and abs(number) > _LARGEST_NUMBER
    ]
    if large:
        raise ConfigError(
            f"numbers of a configuration that {name} can't count to: {', '.join(dict.fromkeys(large))}",
            expected=f"whole numbers up to {_LARGEST_NUMBER:,}",
            hint=_HINT,
            items=dict.fromkeys(large),
        )


def refuse_large_tables(model: nn.Module, weights: int, path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model whose computed tables would take out of proportion more than its weights.

    Args:
        model: on the meta device.
        weights: bytes of the weights in the file.
        path: of the file, for the message.
        config: the constructor's arguments, for the message.

    Raises:
        ConfigError: they take more than half of what the weights take, and more than 512 MiB.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tables(model).items()}
    total, most = sum(sizes.values()), max(_TABLES_FLOOR, weights // 2)
    if total > most:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        raise ConfigError(
            f"a configuration of which {type(model).__name__} would compute tables of {total:,} bytes",
            expected=f"at most {most:,} bytes beside weights of {weights:,}",
            hint=_HINT,
            path=path,
            items=[*(f"{name}: {sizes[name]:,} bytes" for name in largest), *_numbers(config)],
        )


def _numbers(config: Mapping[str, Any]) -> list[str]:
    """The largest whole numbers of a configuration, which are likely to be at fault."""
    numbers = {key: value for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)}
    return [f"{key} is {numbers[key]}" for key in sorted(numbers, key=lambda key: -numbers[key])[:3]]
