"""The table of file formats, settings and devices: what the planner decides for each, on made-up checkpoints."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from slipcast.cli.made_up_checkpoints import FORMATS, FileFormat, Outline, outline, write_checkpoint
from slipcast.cli.markdown import table
from slipcast.demo.run import CHECKPOINT
from slipcast.engine.plan import Module, Plan
from slipcast.engine.planner import make_plan
from slipcast.registry.identify import Match
from slipcast.registry.inspection import identify_path
from slipcast.registry.quantisation import count_formats
from slipcast.registry.settings import Fp8Settings, Settings, resolve_settings

MODES: tuple[str, ...] = get_args(Fp8Settings.model_fields["mode"].annotation)
DEVICES: Mapping[str, str] = {
    "cpu": "cpu",
    "8.6": "cuda:8.6,24GiB",
    "8.9": "cuda:8.9,24GiB",
    "9.0": "cuda:9.0,80GiB",
    "10.0": "cuda:10.0,180GiB",
}
"""What to call each device, cards by compute capability; and how the setting asks for it."""

_COMPUTE_DTYPE = "bfloat16"
"""Named outright: left to the machine, it would depend on the machine."""
_AS_IT_IS = "the file's codes and scales as they are"
"""What plans say of every layer that is kept: nothing that the decision doesn't say."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is planned for one combination.

    Attributes:
        text: the decision and what the layers of a block are kept in; ``× fp8`` where they multiply in float8.
        reason: why; "" where the decision is the one that was asked for.
    """

    text: str
    reason: str


def formats_table() -> str:
    """A row for each format, a column for each setting, split by device where devices differ, and the reasons."""
    outcomes = plan_all()
    columns = [(mode, devices) for mode in MODES for devices in _alike(outcomes, mode)]
    reasons: list[str] = []
    rows = [
        [format_.title, *(_cell(outcomes[format_.title, mode, devices[0]], reasons) for mode, devices in columns)]
        for format_ in FORMATS
    ]
    titles = [_title(mode, devices) for mode, devices in columns]
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{table(['file', *titles], rows)}\n\n{notes}"


def plan_all() -> dict[tuple[str, str, str], Outcome]:
    """The outcome of each combination of a format's title, a mode and a device."""
    found: dict[tuple[str, str, str], Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="slipcast-docs-") as scratch:
        folder = Path(scratch)
        plain = identify_path(CHECKPOINT, _settings(folder, "cpu", "storage")).main
        of = outline(plain, make_plan(plain, _settings(folder, "cpu", "storage")))
        for format_ in FORMATS:
            match = _made_up(of, format_, folder)
            for mode in MODES:
                for device, request in DEVICES.items():
                    plan = make_plan(match, _settings(folder, request, mode))
                    found[format_.title, mode, device] = _outcome(plan, of.modules, format_)
    return found


def _settings(nowhere: Path, device: str, mode: str) -> Settings:
    """The defaults and these, whatever the user's own settings are; products in float8 in narrow layers too."""
    call = {"device": device, "dtype": _COMPUTE_DTYPE, "fp8": {"mode": mode, "least_features": 0}}
    return resolve_settings(call, environ={}, cwd=nowhere, user_folder=nowhere).values


def _made_up(of: Outline, format_: FileFormat, folder: Path) -> Match:
    match = identify_path(write_checkpoint(of, format_, folder), _settings(folder, "cpu", "auto")).main
    counts = count_formats(match.bundles.values())
    in_codes = 0 if format_.codec is None else len(of.layers)
    assert counts.get(format_.name) == (in_codes or len(of.tensors)), (format_.title, counts)
    return match


def _outcome(plan: Plan, paths: Sequence[str], format_: FileFormat) -> Outcome:
    modules = {module.path: module for module in plan.modules}
    layers = [modules[path] for path in paths]
    decision = plan.settings["fp8"]
    texts = Counter(map(_layer_text, layers))
    inside = "; ".join(text if len(texts) == 1 else f"{count} × {text}" for text, count in texts.items())
    text = f"{decision.engaged}: {inside}"
    if decision.engaged == decision.requested:
        return Outcome(text, "")
    said = [decision.reason.replace(f"({format_.name})", "(*format*)"), *(layer.reason for layer in layers)]
    clauses = dict.fromkeys(
        clause for reason in said for clause in reason.split("; ") if clause and clause != _AS_IT_IS
    )
    return Outcome(text, "; ".join(clauses))


def _layer_text(layer: Module) -> str:
    kept = "compute dtype" if layer.codec is None else f"`{layer.codec}`"
    return kept if layer.products is None else f"{kept} × {layer.products}"


def _alike(outcomes: Mapping[tuple[str, str, str], Outcome], mode: str) -> Iterator[tuple[str, ...]]:
    """The devices in groups for which every format has the same outcome."""
    groups: dict[tuple[Outcome, ...], list[str]] = {}
    for device in DEVICES:
        groups.setdefault(tuple(outcomes[format_.title, mode, device] for format_ in FORMATS), []).append(device)
    return map(tuple, groups.values())


def _cell(outcome: Outcome, reasons: list[str]) -> str:
    """The outcome with the number of its reason, which is listed if it is new."""
    if not outcome.reason:
        return outcome.text
    if outcome.reason not in reasons:
        reasons.append(outcome.reason)
    return f"{outcome.text} ({reasons.index(outcome.reason) + 1})"


def _title(mode: str, devices: Sequence[str]) -> str:
    return f"`{mode}`" if len(devices) == len(DEVICES) else f"`{mode}` on {', '.join(devices)}"
