"""Decides whether the repeated blocks of a model are compiled: what the family, the device and the machine allow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection

from torch.utils._triton import has_triton_package

from slipcast.engine.devices import Device
from slipcast.engine.plan import Decision
from slipcast.registry.runtime import Compile

_TRITON_CAPABILITY, _TRITON_BFLOAT16 = (7, 0), (8, 0)
_COMPILERS = {"darwin": "clang++", "win32": "cl"}
"""The C++ compiler that torch calls where the variable CXX names none; elsewhere g++."""


def decide_compile(
    requested: str, declared: Compile | None, classes: Collection[str], device: Device, dtype: str
) -> tuple[Decision, tuple[str, ...]]:
    """Whether blocks are compiled, and which. Engaged is ``off``, ``blocks`` or ``max``.

    Args:
        requested: auto, off, blocks or max. What a pipeline's speed makes of auto is put in its place before.
        declared: what the family file says of it.
        classes: names of the classes of all modules of the model.
        device: where the model goes.
        dtype: torch's name of the dtype that it computes in.

    Returns:
        The decision, and the names of the blocks' classes; none where it is off.
    """
    if requested in ("auto", "off"):
        reason = "as requested" if requested == "off" else "neither this setting nor speed asks for it"
        return Decision(requested=requested, engaged="off", reason=reason), ()
    blocks = tuple(name for name in declared.blocks if name in classes) if declared is not None else ()
    if declared is None:
        obstacle = "the family file names no blocks"
    elif declared.unsupported:
        obstacle = declared.unsupported
    elif not blocks:
        obstacle = f"this model has no {' or '.join(declared.blocks)}"
    else:
        obstacle = _cpu_obstacle() if device.kind == "cpu" else _cuda_obstacle(device, dtype)
    if obstacle:
        return Decision(requested=requested, engaged="off", reason=obstacle), ()
    return Decision(requested=requested, engaged=requested, reason=f"as requested: {', '.join(blocks)}"), blocks


def _cpu_obstacle() -> str:
    compiler = os.environ.get("CXX") or _COMPILERS.get(sys.platform, "g++")
    return "" if shutil.which(compiler) else f"torch compiles for the CPU with {compiler}, which is not there"


def _cuda_obstacle(device: Device, dtype: str) -> str:
    if device.present and not has_triton_package():
        return "torch compiles for a GPU with Triton, which is not installed"
    in_bfloat16 = dtype == "bfloat16"
    needed = _TRITON_BFLOAT16 if in_bfloat16 else _TRITON_CAPABILITY
    if device.capability is not None and device.capability >= needed:
        return ""
    found = "unknown" if device.capability is None else _dotted(device.capability)
    return f"compute capability {found}, where Triton needs {_dotted(needed)}" + " for bfloat16" * in_bfloat16


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
