"""``slipcast load``: loads, and compares the outcome with the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipcast import api
from slipcast.cli.errors import DONE, INCOMPLETE
from slipcast.cli.options import call_settings, common_options, device_option, path_argument, settings_options
from slipcast.cli.output import progress_bar, without_deprecations, write_json
from slipcast.cli.plan_view import write_report
from slipcast.registry.errors import HeaderError, PlanMismatchError, UnsupportedFileError
from slipcast.registry.untrusted_files import read_json_object

if TYPE_CHECKING:
    from slipcast.engine.plan import Plan

_PLAN_LIMIT_MIB = 64


@click.command("load")
@path_argument
@settings_options
@device_option
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Load as this plan says, which 'slipcast plan PATH --json' wrote; settings that it decides are refused.",
)
@common_options
def command(path: Path, assignments: tuple[str, ...], device: str | None, plan_file: Path | None, as_json: bool) -> int:
    """Load a checkpoint, and show the plan beside the outcome.

    The model is gone when the command ends: it shows what 'slipcast.load(path)' does in a program.

    \b
    Examples:
      slipcast load model.safetensors --set fp8=storage
      slipcast load model.safetensors --plan plan.json --json

    The exit code is 0 only if the outcome is what was planned.
    """
    settings = call_settings(assignments, device)
    with _naming(plan_file), without_deprecations(), progress_bar("loading") as progress:
        plan = None if plan_file is None else _read_plan(plan_file)
        report = api.load(path, plan=plan, progress=progress, **settings).report
    if as_json:
        write_json(report.to_dict())
    else:
        write_report(report)
    return INCOMPLETE if report.differences else DONE


@contextmanager
def _naming(plan_file: Path | None) -> Iterator[None]:
    """Name the plan's file in what is said against the plan."""
    try:
        yield
    except PlanMismatchError as error:
        raise PlanMismatchError(
            error.found, expected=error.expected, hint=error.hint, path=plan_file, items=error.items
        ) from error


def _read_plan(file: Path) -> Plan:
    from slipcast.engine.plan import Plan

    try:
        return Plan.from_json(read_json_object(file, limit_mib=_PLAN_LIMIT_MIB))
    except (HeaderError, UnsupportedFileError) as error:
        raise PlanMismatchError(
            error.found,
            expected="a plan as 'slipcast plan PATH --json' prints it",
            hint="name the file that holds it, or make the plan again",
            items=error.items,
        ) from error
