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
_EXPECTED = (
    "auto, cpu, cuda, cuda:N, xpu, mps, or a card that is not there by its compute capability and memory in "
    f"{', '.join(list(_UNITS)[:-1])} or {list(_UNITS)[-1]}: cuda:8.6,12GiB"
)

Kind = Literal["cpu", "cuda", "xpu", "mps"]
Backend = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
_FLOAT16 = frozenset({"cuda", "xpu"})
"""Kinds that compute float16 well. On a CPU it is emulated, and on MPS sums overflow in it."""
_FLOAT8 = frozenset({"cpu", "cuda", "xpu"})
"""Kinds on which torch holds and converts float8."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device as a plan sees it.

    Attributes:
        name: torch's name ("cpu", "cuda:0"), or the description of a card that is not there.
        kind: torch's name of the kind of device; AMD's cards are "cuda" to torch.
        memory: bytes in all, or None on the CPU.
        capability: CUDA's compute capability, or None.
        bfloat16: whether it computes bfloat16 natively.
        present: whether a model can be loaded to it.
        label: a name for people.
        backend: what it is programmed through.
    """

    name: str
    kind: Kind
    memory: int | None
    capability: tuple[int, int] | None
    bfloat16: bool
    present: bool
    label: str
    backend: Backend

    def computes(self, dtype: str) -> bool:
        """Whether the device computes a dtype natively."""
        if dtype == "bfloat16":
            return self.bfloat16
        return dtype == "float32" or (dtype == "float16" and self.kind in _FLOAT16)

    @property
    def float8(self) -> bool:
        """Whether weights can be kept in float8 on it, whatever it multiplies in."""
        return self.kind in _FLOAT8

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
        if torch.xpu.is_available():
            return _xpu(), "torch sees no CUDA device, and an XPU"
        if torch.backends.mps.is_available():
            return _mps(), "torch sees no CUDA device, and MPS"
        return _cpu(), "torch sees no CUDA device"
    if request == "cpu":
        return _cpu(), "as requested"
    if request == "xpu":
        return _xpu(), "as requested"
    if request == "mps":
        return _mps(), "as requested"
    if (card := described(request)) is not None:
        return _described(request, card), "described, not present: for planning only"
    if index := re.fullmatch(r"cuda(?::(\d{1,3}))?", request):
        return _cuda(int(index[1] or 0)), "as requested"
    raise DeviceError(f"the device {request!r}", expected=_EXPECTED, hint="give the setting device one of these")


def _cpu() -> Device:
    label = f"CPU ({platform.machine() or 'unknown'})"
    return Device("cpu", "cpu", None, None, _cpu_bfloat16(), True, label, "cpu")


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
    rocm = torch.version.hip is not None
    # On NVIDIA's cards by capability: torch says yes to older ones as well, which emulate it slowly.
    native = torch.cuda.is_bf16_supported() if rocm else capability >= _BFLOAT16_CAPABILITY
    return Device(
        name=f"cuda:{index}",
        kind="cuda",
        memory=properties.total_memory,
        capability=None if rocm else capability,
        bfloat16=native,
        present=True,
        label=properties.name,
        backend="rocm" if rocm else "cuda",
    )


def _xpu() -> Device:
    if not torch.xpu.is_available():
        raise _absent("xpu", "Intel's graphics")
    properties = torch.xpu.get_device_properties()
    native = bool(torch.xpu.is_bf16_supported())
    return Device("xpu", "xpu", properties.total_memory, None, native, True, properties.name, "xpu")


def _mps() -> Device:
    if not torch.backends.mps.is_available():
        raise _absent("mps", "Apple's graphics")
    memory = int(torch.mps.recommended_max_memory())
    return Device("mps", "mps", memory, None, _mps_bfloat16(), True, "Apple's graphics", "mps")


def _mps_bfloat16() -> bool:
    """Whether MPS adds in bfloat16: older systems refuse it, or give what is not finite."""
    try:
        total = torch.ones(2, dtype=torch.bfloat16, device="mps") + 1
        return bool(torch.isfinite(total).all())
    except (RuntimeError, TypeError):
        return False


def _absent(name: str, what: str) -> DeviceError:
    return DeviceError(
        f"the device {name}, where torch sees none",
        expected=f"{what}, and a torch that is built for it",
        hint="use device=cpu, or device=auto for what is there",
    )


def _described(request: str, match: re.Match[str]) -> Device:
    capability = (int(match["major"]), int(match["minor"]))
    memory = int(float(match["size"]) * _UNITS[match["unit"]])
    if memory <= 0:
        raise DeviceError(f"the device {request!r}", expected=_EXPECTED, hint="give the card some memory")
    native = capability >= _BFLOAT16_CAPABILITY
    return Device(request, "cuda", memory, capability, native, False, label_of(match), "cuda")
