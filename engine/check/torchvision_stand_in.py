"""A stand-in for what forwards call of torchvision, where that is not installed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn

_NAME = "transforms"


def _resize(img: torch.Tensor, size: Sequence[int], interpolation: str = "nearest") -> torch.Tensor:
    """``torchvision.transforms.functional.resize`` of a batch of images, to height and width."""
    return nn.functional.interpolate(img, size=list(size), mode=interpolation)


_TRANSFORMS = SimpleNamespace(
    functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
)


@contextmanager
def torchvision_or_stand_in(model: nn.Module) -> Iterator[None]:
    """Let a model's forward call ``transforms``, where its module left out the import since torchvision is absent.

    The name is bound in the module of the class for the time of the block, and in no other.
    """
    space = vars(sys.modules[type(model).__module__])
    code = inspect.unwrap(type(model).forward).__code__
    if _NAME not in code.co_names or _NAME in space or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    space[_NAME] = _TRANSFORMS
    try:
        yield
    finally:
        del space[_NAME]
