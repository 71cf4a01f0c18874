"""Small constant tensors, made once for each device instead of copied to it in every forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")


def kept(make: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """Keep what a function makes for each set of arguments, which name the device.

    Tensors of a tracer are not kept: they mean nothing outside of it.
    """
    made: dict[Hashable, Tensor] = {}

    @wraps(make)
    def look_up(*arguments: Arguments.args, **named: Arguments.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            return make(*arguments, **named)
        key = (arguments, tuple(named.items()))
        tensor = made.get(key)
        if tensor is None:
            with torch.inference_mode(False):
                tensor = make(*arguments, **named)
            if type(tensor) is Tensor:
                made[key] = tensor
        return tensor

    return look_up
