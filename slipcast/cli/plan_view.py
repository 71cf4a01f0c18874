"""Shows plans and reports of loads to people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slipcast.cli.collapse import collapse
from slipcast.cli.output import exact_bytes, mebibytes, write, write_facts, write_heading, write_table

if TYPE_CHECKING:
    from slipcast.engine.plan import Decision, Plan
    from slipcast.engine.report import Report

_SECTIONS = (
    ("dropped", "Dropped from the file"),
    ("folded", "Folded: dequantised, then cast once"),
    ("synthesised", "Synthesised: in the model, not from a tensor of its own in the file"),
)
_FATES = {
    "side tensor": ("side tensor", "side tensors"),
    "other component": ("tensor of another component", "tensors of other components"),
}
"""How one, and several, of a fate are called that is no adjective."""


def write_plan(plan: Plan) -> None:
    """Show a whole plan."""
    write_heading(title(plan))
    if plan.verdict is not None:
        write_heading(f"Verdict: the weights {'fit' if plan.verdict.fits else 'do not fit'}")
        write_facts(
            [
                ("needed", _size(plan.verdict.needed)),
                ("available", _size(plan.verdict.available)),
                ("so", plan.verdict.advice),
            ]
        )
        write()
    write_facts([("from", _origin(plan)), ("tensors", _fates(plan)), ("notes", plan.notes)])
    write_settings(plan.settings)
    _write_bytes(plan)
    _write_modules(plan)
    for name, heading in _SECTIONS:
        _write_reasons(heading, getattr(plan, name))


def write_report(report: Report) -> None:
    """Show what came of a plan, beside it."""
    plan = report.plan
    write_heading(title(plan))
    write_facts(
        [
            ("from", _origin(plan)),
            ("modules", _precisions(plan)),
            ("notes", (*plan.notes, *report.notes)),
            ("seconds", f"{report.seconds:.2f}"),
        ]
    )
    write_settings(plan.settings)
    write()
    outcome = {
        "resident": report.resident,
        "device peak": report.device_peak,
        "host peak, anonymous": report.host_peak_anonymous,
    }
    rows = (
        (
            name,
            f"{count:,}",
            *(("not measured", "") if (got := outcome[name]) is None else (f"{got:,}", mebibytes(got))),
        )
        for name, count in _predicted(plan).items()
        if name in outcome
    )
    write_heading("Bytes")
    columns = ("planned", "outcome", "outcome in MiB")
    write_table(("", *columns), rows, right=columns)
    write()
    if report.differences:
        write_heading("The outcome differs from the plan")
        write_facts([("differences", report.differences)])
    else:
        write("The outcome is what was planned.")


def title(plan: Plan) -> str:
    """What a plan loads, in one line."""
    variant = f", variant {plan.origin.variant}" if plan.origin.variant else ""
    return f"{plan.origin.family}{variant}: {plan.origin.model} on {plan.device}, computed in {plan.compute_dtype}"


def write_settings(settings: Mapping[str, Decision]) -> None:
    """What was requested, what is done, and why."""
    write()
    write_heading("Settings")
    rows = ((name, decision.requested, decision.engaged, decision.reason) for name, decision in settings.items())
    write_table(("setting", "requested", "engaged", "reason"), rows)


def _origin(plan: Plan) -> str:
    origin = plan.origin
    names = f"{origin.layout} names" if origin.layout else "names that native and diffusers layouts share"
    prefix = f", prefix {origin.prefix}" if origin.prefix else ""
    return names + prefix + (f", component {origin.component}" if origin.component else "")


def _fates(plan: Plan) -> str:
    counts = Counter(tensor.fate for tensor in plan.tensors)
    return ", ".join(f"{count} {_FATES.get(fate, (fate, fate))[count != 1]}" for fate, count in counts.most_common())


def _precisions(plan: Plan) -> str:
    return ", ".join(f"{count} {precision}" for precision, count in plan.precisions.items())


def _write_bytes(plan: Plan) -> None:
    write()
    write_heading("Bytes")
    rows = ((name, mebibytes(count), f"{count:,}") for name, count in _predicted(plan).items())
    write_table(("", "MiB", "bytes"), rows, right=("MiB", "bytes"))


def _predicted(plan: Plan) -> dict[str, int]:
    """The predicted bytes by name; the peak of a device only where that has memory of its own."""
    peak = {} if plan.device == "cpu" else {"device peak": plan.bytes.device_peak}
    return {
        "resident": plan.bytes.resident,
        **peak,
        "host peak, anonymous": plan.bytes.host_peak_anonymous,
        "read from the file": plan.bytes.read,
    }


def _write_modules(plan: Plan) -> None:
    """Modules in blocks, then those of them that a rule keeps out of quantisation."""
    write()
    write_heading(f"Modules: {_precisions(plan)}")
    _write_collapsed("class", ((module.path, (module.precision, module.kind)) for module in plan.modules))
    kept = [module for module in plan.modules if module.codec is None and module.reason]
    if kept:
        write()
        write_heading("Kept from quantisation")
        _write_collapsed("reason", ((module.path, (module.precision, module.reason)) for module in kept))


def _write_collapsed(last: str, modules: Iterable[tuple[str, tuple[str, str]]]) -> None:
    rows = ((block.pattern, f"{block.count} × {block.label[0]}", block.label[1]) for block in collapse(modules))
    write_table(("modules", "precision", last), rows)


def _write_reasons(heading: str, reasons: Mapping[str, str]) -> None:
    if reasons:
        write()
        write_heading(heading)
        rows = ((block.pattern, str(block.count), block.label) for block in collapse(reasons.items()))
        write_table(("tensors", "count", "reason"), rows, right=("count",))


def _size(count: int) -> str:
    return f"{mebibytes(count)} MiB ({exact_bytes(count)})"
