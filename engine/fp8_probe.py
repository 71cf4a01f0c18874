"""Whether a device multiplies float8 through torch: found out by doing it, not by the device's number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipcast.engine.codecs.base import CODES, SCALE
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.devices import Device
from slipcast.engine.kernels.operators import quantise_rows
from slipcast.engine.scaled_matmul import scaled_matmul

_FLOAT8_CAPABILITY = (8, 9)
_SHAPES = ((16, 16, 16), (1001, 3072, 2048))
"""Rows, inputs, outputs: the smallest product, and one of a size that models have, with an odd number of rows."""
_LARGEST_ERROR = 0.06
"""In relative L2: two factors in float8, each off by 0.026, are off by 0.037 together."""
_NEVER = ("compute capability", "not supported", "no kernel image", "not implemented", "could not run")
"""What torch says of a device that can't do it at all. Any other failure may pass, as running out of memory does."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe found.

    Attributes:
        ok: whether the device multiplies float8.
        definite: whether that was found out and will not change; False for a rule, or a failure that may pass.
        reason: what the answer rests on, as a clause.
    """

    ok: bool
    definite: bool
    reason: str


_answers: dict[str, Probe] = {}


def probe_fp8(device: Device) -> Probe:
    """Whether a device multiplies float8 as ``Float8ComputeLinear`` asks it to.

    A device that is there is asked once to do it, and remembered if the answer is definite. A device that is only
    described is judged by its compute capability. A CPU computes the same numbers without being faster for it.
    """
    if not device.present:
        return _by_capability(device)
    if device.kind == "cpu":
        return Probe(True, True, "emulated: no speed-up")
    answer = _answers.get(device.name)
    if answer is None:
        answer = _try_out(device.torch_device)
        if answer.definite:
            _answers[device.name] = answer
    return answer


def _by_capability(device: Device) -> Probe:
    ok = device.capability is not None and device.capability >= _FLOAT8_CAPABILITY
    needed = ".".join(map(str, _FLOAT8_CAPABILITY))
    found = "unknown" if device.capability is None else ".".join(map(str, device.capability))
    return Probe(ok, False, f"by rule, not tried: compute capability {found}, where fp8 needs {needed}")


def _try_out(device: torch.device) -> Probe:
    try:
        with torch.no_grad():
            error = max(_error_of(*shape, per_row, device) for shape in _SHAPES for per_row in (True, False))
    except (RuntimeError, ValueError, AttributeError) as failure:
        message = str(failure).strip().partition("\n")[0]
        definite = not isinstance(failure, torch.OutOfMemoryError) and any(word in message.lower() for word in _NEVER)
        return Probe(False, definite, f"tried: {message or type(failure).__name__}")
    if error <= _LARGEST_ERROR:
        return Probe(True, True, f"tried: relative error {error:.3f}")
    return Probe(False, True, f"tried: the product is wrong, relative error {error:.3g}")


def _error_of(rows: int, inputs: int, outputs: int, per_row: bool, device: torch.device) -> float:
    """Relative L2 of a product against float32, of random values in the first half of the rows and zeros in the rest.

    Infinite where the rows of zeros give anything else than zeros.
    """
    random = torch.Generator().manual_seed(0)
    activations = torch.randn(rows, inputs, generator=random)
    activations[rows // 2 :] = 0
    weight = torch.randn(outputs, inputs, generator=random).to(device)
    activations = activations.to(device, torch.bfloat16)
    parts = Float8("row" if per_row else "tensor").encode(weight)
    static = None if per_row else torch.tensor(0.01, device=device)
    product = scaled_matmul(*quantise_rows(activations, static), parts[CODES], parts[SCALE], torch.bfloat16).float()
    if not bool((product[rows // 2 :] == 0).all()):
        return float("inf")
    expected = _in_float32(activations, weight)
    return float((product - expected).norm() / expected.norm())


def _in_float32(activations: Tensor, weight: Tensor) -> Tensor:
    return activations.to(torch.float32) @ weight.t()
