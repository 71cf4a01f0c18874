"""Which devices the fused kernels run on, and what their instructions can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch

Answer = TypeVar("Answer", bound=Callable[..., bool])

_TURING, _ADA, _HOPPER = (7, 5), (8, 9), (9, 0)
"""Compute capabilities: the first that Triton compiles for; the first with instructions that convert float8; the first
that rounds float32 to float8 at once. Ada goes through float16, which Triton cuts rather than rounds."""


def _constant(answer: Answer) -> Answer:
    """Let compiled code ask once, when it is compiled."""
    marked: Answer = torch.compiler.assume_constant_result(answer)
    return marked


@_constant
def runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a device: NVIDIA's from Turing on, and AMD's."""
    return device.type == "cuda" and _has_triton() and (_is_amd() or _capability(device) >= _TURING)


@_constant
def reads_float8(device: torch.device) -> bool:
    """Whether instructions of the device read float8_e4m3fn, and Triton's type for it compiles."""
    return device.type == "cuda" and not _is_amd() and _capability(device) >= _ADA


@_constant
def writes_float8(device: torch.device) -> bool:
    """Whether instructions of the device round float32 to float8_e4m3fn, once."""
    return device.type == "cuda" and not _is_amd() and _capability(device) >= _HOPPER


def _is_amd() -> bool:
    return torch.version.hip is not None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
