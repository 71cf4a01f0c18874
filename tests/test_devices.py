"""What devices compute, and what a plan makes of it: every backend, on devices that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from slipcast.engine.devices import Device, resolve_device
from slipcast.engine.fp8_probe import Probe
from slipcast.engine.precision import decide_dtype, decide_fp8
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import DeviceError, SettingsError
from slipcast.registry.family import Family
from slipcast.registry.precision import Precision
from slipcast.registry.settings import resolve_settings


def made_up(kind: Any, backend: Any, *, bfloat16: bool) -> Device:
    return Device(kind, kind, 2**34, None, bfloat16, True, f"a device of {backend}", backend)


TURING = made_up("cuda", "cuda", bfloat16=False)
AMPERE = made_up("cuda", "cuda", bfloat16=True)
ROCM = made_up("cuda", "rocm", bfloat16=True)
XPU = made_up("xpu", "xpu", bfloat16=True)
OLD_MPS = made_up("mps", "mps", bfloat16=False)
MPS = made_up("mps", "mps", bfloat16=True)
CPU = made_up("cpu", "cpu", bfloat16=False)


def _precision(fp16: str) -> Precision:
    families = load_catalogue()
    fitting = (family.precision for family in families.values() if family.precision.fp16 == fp16)
    return next(precision for precision in fitting if precision.compute_default == "bfloat16")


@pytest.mark.parametrize(
    ("device", "fp16", "expected"),
    [
        (AMPERE, "unsafe", "bfloat16"),
        (ROCM, "unsafe", "bfloat16"),
        (XPU, "safe", "bfloat16"),
        (MPS, "safe", "bfloat16"),
        (TURING, "safe", "float16"),
        (TURING, "unsafe", "float32"),
        (OLD_MPS, "safe", "float32"),
        (CPU, "safe", "float32"),
    ],
    ids=lambda value: value.label if isinstance(value, Device) else value,
)
def test_bfloat16_becomes_what_the_device_and_the_family_can_do(device: Device, fp16: str, expected: str) -> None:
    precision = _precision(fp16).model_copy(update={"compute": "bfloat16"})
    decision = decide_dtype("auto", precision, [], device, None)
    assert decision.engaged == expected
    refused = f"but {device.label} does not compute bfloat16 natively" in decision.reason
    assert refused == (expected != "bfloat16")


def _fp8_family() -> Family:
    return next(family for family in load_catalogue().values() if family.precision.fp8.compute.supported)


@pytest.mark.parametrize("mode", ["storage", "compute"])
def test_fp8_is_off_where_torch_has_no_float8(mode: str) -> None:
    decision = decide_fp8(mode, _fp8_family(), [], MPS, lambda: Probe(True, True, "not asked"))
    assert (decision.engaged, decision.reason) == ("off", "torch has no float8 on a device of mps")
    assert decide_fp8(mode, _fp8_family(), [], XPU, lambda: Probe(True, True, "tried")).engaged == mode


@pytest.mark.parametrize("name", ["xpu", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"the device {name}, where torch sees none") as caught:
        resolve_device(name)
    assert "device=cpu" in caught.value.hint


def test_a_card_in_another_unit_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(DeviceError) as caught:
        resolve_device("cuda:8.6,8gb")
    with pytest.raises(SettingsError) as refused:
        resolve_settings({"device": "cuda:8.6,8gb"})
    for error in (caught.value, refused.value):
        assert "memory in GiB, GB or MiB: cuda:8.6,12GiB" in error.expected
    for size in ("8GiB", "8GB", "8000MiB"):
        assert resolve_device(f"cuda:8.6,{size}")[0].memory


def test_auto_prefers_cuda_then_xpu_then_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from slipcast.engine import devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(devices, "_xpu", lambda: XPU)
    monkeypatch.setattr(devices, "_mps", lambda: MPS)
    assert resolve_device("auto")[0] is XPU
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert resolve_device("auto")[0] is MPS
