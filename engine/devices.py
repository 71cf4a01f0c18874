"""Where a model goes: what a device can do, probed where it is there, described where it is not."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from typing import Literal

import torch

from slipcast.engine.described_device import described, label_of
from slipcast.registry.errors import DeviceError

_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20}
_BFLOAT16_CAPABILITY = (8, 0)
_EXPECTED = "auto, cpu, cuda, cuda:N, or a card that is not there, as in cuda:8.6,12GiB (capability, memory)"


@dataclass(frozen=True, slots=True)
class Device:
    """A device as a plan sees it.

    Attributes:
        name: torch's name ("cpu", "cuda:0"), or the description of a card that is not there.
        kind: "cpu" or "cuda".
        memory: bytes in all, or None on the CPU.
        capability: CUDA's compute capability, or None.
        bfloat16: whether it computes bfloat16 natively.
        present: whether a model can be loaded to it.
        label: a name for people.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int | None
    capability: tuple[int, int] | None
    bfloat16: bool
    present: bool
    label: str

    def computes(self, dtype: str) -> bool:
        """Whether the device computes a dtype natively. float16 is not native on a CPU."""
        if dtype == "bfloat16":
            return self.bfloat16
        return dtype == "float32" or (dtype == "float16" and self.kind == "cuda")

    @property
    def torch_device(self) -> torch.device:
        """The device for torch; only of one that is present."""
        return torch.device(self.name)


def resolve_device(request: str) -> tuple[Device, str]:
    """The device that a request means, and why.

    Args:
        request: auto, cpu, cuda, cuda:N, or ``cuda:8.6,12GiB`` for a card that is not there.

    Raises:
        DeviceError: no such device, or a request that can't be read.
    """
    request = request.strip()
    if request == "auto":
        if torch.cuda.is_available():
            return _cuda(torch.cuda.current_device()), "torch's current CUDA device"
        return _cpu(), "torch sees no CUDA device"
    if request == "cpu":
        return _cpu(), "as requested"
    if (card := described(request)) is not None:
        return _described(request, card), "described, not present: for planning only"
    if index := re.fullmatch(r"cuda(?::(\d{1,3}))?", request):
        return _cuda(int(index[1] or 0)), "as requested"
    raise DeviceError(f"the device {request!r}", expected=_EXPECTED, hint="give the setting device one of these")


def _cpu() -> Device:
    return Device("cpu", "cpu", None, None, _cpu_bfloat16(), True, f"CPU ({platform.machine() or 'unknown'})")


def _cpu_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively; elsewhere torch emulates it, slower than float32."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)


def _cuda(index: int) -> Device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise DeviceError(
            f"the device cuda:{index}, where torch sees {count} CUDA devices",
            expected="a CUDA device that is there",
            hint="use device=cpu, or describe the card to plan for it: device=cuda:8.6,12GiB",
        )
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    native = capability >= _BFLOAT16_CAPABILITY
    return Device(f"cuda:{index}", "cuda", properties.total_memory, capability, native, True, properties.name)


def _described(request: str, match: re.Match[str]) -> Device:
    capability = (int(match["major"]), int(match["minor"]))
    memory = int(float(match["size"]) * _UNITS[match["unit"]])
    if memory <= 0:
        raise DeviceError(f"the device {request!r}", expected=_EXPECTED, hint="give the card some memory")
    return Device(request, "cuda", memory, capability, capability >= _BFLOAT16_CAPABILITY, False, label_of(match))
