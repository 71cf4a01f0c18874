"""Options that commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slipcast.registry.settings import parse_assignments
from slipcast.registry.settings_layers import CONFIG_VARIABLE

Function = TypeVar("Function", bound=Callable[..., Any])


def common_options(function: Function) -> Function:
    """``--json``, given to the command as ``as_json``, and ``--verbose``, which is dealt with here."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON to standard output.")
    verbose = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_log_to_errors,
        help="Log to standard error what is done.",
    )
    return as_json(verbose(function))


def path_argument(function: Function) -> Function:
    """The argument ``PATH``, given as ``path``; whether anything is there is for the library to say."""
    return click.argument("path", callback=_path)(function)


def settings_options(function: Function) -> Function:
    """``--set``, given to the command as ``assignments``, and ``--config``, which is dealt with here."""
    assignments = click.option(
        "--set",
        "-s",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="Give a setting for this call, as in fp8=storage; may be repeated. See 'slipcast settings'.",
    )
    config_file = click.option(
        "--config",
        metavar="FILE",
        expose_value=False,
        callback=_choose_config,
        help="Take settings from this file in place of your own and the project's.",
    )
    return assignments(config_file(function))


def device_option(function: Function) -> Function:
    """``--device`` of commands that load, given as ``device``."""
    help_ = "Where the model goes: auto, cpu, cuda, cuda:N, xpu or mps. Short for --set device=DEVICE."
    return click.option("--device", metavar="DEVICE", help=help_)(function)


def planned_device_option(function: Function) -> Function:
    """``--device`` of commands that only plan, given as ``device``: it may be a card that is not there."""
    help_ = (
        "Where the model would go: auto, cpu, cuda, cuda:N, xpu, mps, or a card that is not there by its compute "
        "capability and memory, as cuda:8.6,12GiB. Short for --set device=DEVICE."
    )
    return click.option("--device", metavar="DEVICE", help=help_)(function)


def call_settings(assignments: tuple[str, ...], device: str | None = None) -> dict[str, Any]:
    """The settings of a call, by dotted names.

    Raises:
        SettingsError: an assignment can't be read.
    """
    settings = parse_assignments(assignments)
    return settings if device is None else {**settings, "device": device}


def _path(ctx: click.Context, parameter: click.Parameter, text: str) -> Path:
    if not text:  # as of a shell variable that is not set; it would be the working folder
        raise click.BadParameter("the path is empty", ctx, parameter)
    return Path(text)


def _choose_config(ctx: click.Context, parameter: click.Parameter, file: str | None) -> None:  # noqa: ARG001
    """Choose the settings file as the environment would, while the command runs."""
    if file is None:
        return
    if not file:
        raise click.UsageError("--config needs the name of a file", ctx)
    before = os.environ.get(CONFIG_VARIABLE)
    os.environ[CONFIG_VARIABLE] = file
    ctx.call_on_close(lambda: _set_back(before))


def _set_back(before: str | None) -> None:
    if before is None:
        del os.environ[CONFIG_VARIABLE]
    else:
        os.environ[CONFIG_VARIABLE] = before


def is_verbose() -> bool:
    """Whether the command that runs was given ``--verbose``."""
    return logging.getLogger("slipcast").level == logging.INFO


def _log_to_errors(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:  # noqa: ARG001
    """Show the library's log while the command runs."""
    if not wanted:
        return
    logger = logging.getLogger("slipcast")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ctx.call_on_close(lambda: logger.removeHandler(handler))
    ctx.call_on_close(lambda: logger.setLevel(before))
