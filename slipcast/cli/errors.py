"""Errors as people and programs read them, and the exit codes. Bad input never ends in a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import click

from slipcast.cli.output import discard_output, write, write_json
from slipcast.registry.errors import SlipcastError

DONE = 0
"""What was asked for was done."""
INCOMPLETE = 1
"""It was done in part or came out otherwise than planned, or the machine failed."""
REFUSED = 2
"""The input, a setting or the command line itself was refused; nothing was done."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and the number of the signal."""


class Failure(NamedTuple):
    """What ended a command.

    Attributes:
        kind: the name that ``--json`` gives it.
        error: what is to be said.
        exit_code: of the process.
    """

    kind: str
    error: SlipcastError
    exit_code: int


def run_reporting(action: Callable[[], object], *, as_json: bool) -> int:
    """Run a command, and report what fails; returns the exit code, which is the command's own result if it has one.

    A pipe that nobody reads any more is click's business: it ends the process with 1 and without a word.
    """
    try:
        result = action()
    except (Exception, KeyboardInterrupt) as error:
        failed = failure(error)
        if failed is None:
            raise
        report(failed, as_json=as_json)
        _let_go_of_output()
        return failed.exit_code
    return result if isinstance(result, int) else DONE


def failure(error: BaseException) -> Failure | None:
    """What to say of an error, or None where it is a fault of slipcast, whose traceback is wanted."""
    if isinstance(error, SlipcastError):
        return Failure(type(error).__name__, error, REFUSED)
    if isinstance(error, click.ClickException):
        return Failure("UsageError", _usage(error), REFUSED)
    if isinstance(error, click.Abort | KeyboardInterrupt | EOFError):
        stopped = SlipcastError(
            "interrupted", expected="a command that runs to its end", hint="run it again when wanted"
        )
        return Failure("Interrupted", stopped, INTERRUPTED)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own is no MemoryError
        small = SlipcastError(
            f"memory ran out: {str(error) or 'none is left'}",
            expected="memory for what the plan predicts, and for what other programs take",
            hint="see 'slipcast plan PATH' for what would make it smaller",
        )
        return Failure("MemoryError", small, INCOMPLETE)
    if isinstance(error, OSError):
        broken = SlipcastError(
            error.strerror or str(error),
            expected="files and devices that can be read and written",
            hint="check the disk and the permissions",
            path=error.filename if isinstance(error.filename, str) else None,
        )
        return Failure("OSError", broken, INCOMPLETE)
    return None


def report(failed: Failure, *, as_json: bool) -> None:
    """Say what went wrong: to people on standard error, to programs as one object on standard output."""
    try:
        if as_json:
            write_json({**failed.error.to_dict(), "error": failed.kind})
        elif failed.exit_code == INTERRUPTED:
            write("interrupted", to_errors=True)
        else:
            write(f"error: {failed.error}", to_errors=True)
    except OSError:  # what can't be written to is itself what failed
        discard_output()


def _let_go_of_output() -> None:
    """Write what is left in buffers, or drop it where it can't be written: Python would try again as it ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard_output()


def _usage(error: click.ClickException) -> SlipcastError:
    context = getattr(error, "ctx", None)  # click leaves it out of some
    usage = "a command line as the help describes it"
    if context is not None:
        usage = context.command.get_usage(context).removeprefix("Usage: ")
    return SlipcastError(
        error.format_message().rstrip("."),
        expected=usage,
        hint=f"see '{context.command_path if context is not None else 'slipcast'} --help'",
    )
