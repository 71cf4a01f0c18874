"""What a load did: the plan beside the outcome, and where the two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from slipcast.engine.compiled_blocks import CompiledBlocks
from slipcast.engine.measure import Peaks, count_bytes
from slipcast.engine.plan import Plan

_MIB = 2**20
_REFUSABLE = frozenset({"dtype", "fp8", "compile", "reader"})
"""Requests that can be refused. Others are only made more exact, as cuda is, or have no bearing, as mmap on a GPU."""


@dataclass(frozen=True, slots=True)
class Report:
    """The plan and what came of it.

    Attributes:
        plan: what was to be done.
        resident: bytes of the loaded model's parameters and buffers, counted.
        host_peak_anonymous: measured peak of anonymous host memory above the start of the load, or None where the
            system does not say.
        device_peak: measured peak of device memory above the start of the load, or None on the CPU.
        seconds: duration of the load, after imports.
        differences: where the outcome is not what was planned, as sentences; empty in a load that kept its word.
        notes: what a user should know of the values that were read, as sentences; the plan has notes of its own.
        compiled: what says how each class of compiled blocks runs, at any time; None where none is compiled. A block is
            compiled in its first forward, so what fails there is seen after the load.
    """

    plan: Plan
    resident: int
    host_peak_anonymous: int | None
    device_peak: int | None
    seconds: float
    differences: tuple[str, ...]
    notes: tuple[str, ...] = ()
    compiled: CompiledBlocks | None = None

    def to_dict(self) -> dict[str, Any]:
        """The contract of ``slipcast load --json``: the plan's, and the outcome."""
        return {
            **self.plan.to_json(),
            "actual_bytes": self.resident,
            "peaks": {"host_anonymous": self.host_peak_anonymous, "device": self.device_peak},
            "seconds": self.seconds,
            "differences": list(self.differences),
            "notes": [*self.plan.notes, *self.notes],
            "compile": {} if self.compiled is None else self.compiled.to_dict(),
        }

    def summary(self) -> str:
        """The load in one line, for the log."""
        plan = self.plan
        quantised = sum(module.codec is not None for module in plan.modules)
        kept = sum(module.codec is None and bool(module.reason) for module in plan.modules)
        refused = "; ".join(
            f"{name}={decision.requested} became {decision.engaged}: {decision.reason}"
            for name, decision in plan.settings.items()
            if name in _REFUSABLE and decision.requested not in ("auto", decision.engaged)
        )
        variant = f" ({plan.origin.variant})" if plan.origin.variant else ""
        codes = dict.fromkeys(module.precision for module in plan.modules if module.codec is not None)
        in_fp8 = sum(module.products is not None for module in plan.modules)
        products = f", {in_fp8} multiply in fp8" if in_fp8 else ""
        storage = " and ".join(codes) or plan.compute_dtype
        reader = plan.settings["reader"].engaged if "reader" in plan.settings else "file"
        return (
            f"{plan.origin.family}{variant}: storage {storage}, compute {plan.compute_dtype}, "
            f"{plan.bytes.resident / _MIB:,.1f} MiB predicted, {self.resident / _MIB:,.1f} MiB resident "
            f"on {plan.device}, "
            f"{quantised} modules quantised, {kept} kept in {plan.compute_dtype}{products}, "
            f"{plan.bytes.read:,} bytes read by {reader} in {self.seconds:.2f} s, "
            f"{plan.bytes.read / max(self.seconds, 1e-9) / 1e9:.1f} GB/s" + (f" [{refused}]" if refused else "")
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model and the report of how it came about.

    Attributes:
        model: in eval mode, on the plan's device.
        report: the plan beside the outcome.
    """

    model: nn.Module
    report: Report

    def __repr__(self) -> str:
        plan = self.report.plan
        precisions = ", ".join(f"{count} {precision}" for precision, count in plan.precisions.items())
        size = f"{self.report.resident:,} bytes on {plan.device}"
        return f"<Loaded {type(self.model).__name__}: {plan.origin.family}, {precisions}, {size}>"


def make_report(
    plan: Plan,
    model: nn.Module,
    peaks: Peaks,
    notes: tuple[str, ...] = (),
    compiled: CompiledBlocks | None = None,
) -> Report:
    """Count the model and compare it with its plan; ``notes`` is what was seen while it was loaded."""
    resident = count_bytes(model)
    return Report(
        plan=plan,
        resident=resident,
        host_peak_anonymous=peaks.host_anonymous,
        device_peak=peaks.device,
        seconds=peaks.seconds,
        differences=tuple(_differences(plan, model, resident)),
        notes=notes,
        compiled=compiled,
    )


def _differences(plan: Plan, model: nn.Module, resident: int) -> list[str]:
    found: list[str] = []
    if resident != plan.bytes.resident:
        found.append(f"{plan.bytes.resident:,} bytes were predicted, {resident:,} are resident")
    actual = {name: tensor for tensors in (model.named_parameters(), model.named_buffers()) for name, tensor in tensors}
    planned = {stored.name: stored for target in plan.targets for stored in target.stored}
    for name, stored in planned.items():
        tensor = actual.get(name)
        seen = "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if seen != f"{stored.dtype} {list(stored.shape)}":
            found.append(f"{name}: {stored.dtype} {list(stored.shape)} was planned, {seen} is there")
    found += [f"{name} is there and was not planned" for name in actual.keys() - planned.keys()]
    return found
