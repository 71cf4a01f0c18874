"""``slipcast plan``: what loading would do."""

from __future__ import annotations

from pathlib import Path

import click

from slipcast import api
from slipcast.cli.options import call_settings, common_options, path_argument, planned_device_option, settings_options
from slipcast.cli.output import without_deprecations, write_json
from slipcast.cli.plan_view import write_plan


@click.command("plan")
@path_argument
@settings_options
@planned_device_option
@common_options
def command(path: Path, assignments: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Say what loading a checkpoint would do, to the byte. No weight is read.

    Shows what each setting asked for, what is done and why; the bytes; the precision of each module; what is dropped,
    folded or made, and why. For a card, also one that is not there, it says whether the weights fit.

    \b
    Examples:
      slipcast plan model.safetensors --set fp8=storage
      slipcast plan model.safetensors --device cuda:8.6,12GiB
      slipcast plan model.safetensors --json > plan.json

    The exit code is 0 also where the weights do not fit: the plan says so. Where nothing could be loaded at all, as of
    a file that is incomplete, it is 2.
    """
    settings = call_settings(assignments, device)
    with without_deprecations():
        plan = api.plan(path, **settings)
    if as_json:
        write_json(plan.to_json())
    else:
        write_plan(plan)
