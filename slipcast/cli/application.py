"""The table of commands, each imported only when it is run, and the one place where errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from slipcast import __version__
from slipcast.cli.errors import run_reporting
from slipcast.cli.output import prepare_streams

COMMANDS = {
    "inspect": "Say what a checkpoint is: family, layout, formats, size.",
    "plan": "Say what loading a checkpoint would do, to the byte.",
    "load": "Load a checkpoint and compare the outcome with the plan.",
    "generate": "Draw a picture with a checkpoint and the parts of its pipeline.",
    "bench": "Measure a pipeline, and compare with what was measured before.",
    "convert": "Write a checkpoint in another naming or another format.",
    "explain": "Say why each family does or does not match a checkpoint.",
    "families": "List the known families, or show one.",
    "check": "Prove family files.",
    "new": "Draft the family file of an unknown checkpoint.",
    "settings": "Show every setting and where its value comes from.",
    "demo": "Draw digits with a small trained model, in bf16 and in fp8.",
}
"""What each command does; the command ``name`` is ``command`` in ``slipcast.cli.name_command``."""


class Application(click.Group):
    """A group whose commands are imported when they are run, so that ``inspect`` never waits for the rest."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of the commands, in the order of their table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of a name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"slipcast.cli.{cmd_name}_command").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands in the help, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run a command line and end the process with its exit code; errors are said, not raised."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        extra["standalone_mode"] = False
        prepare_streams()
        run = super().main

        def run_and_write() -> Any:
            """Also write what is left in buffers: Python's own end would fail where the disk is full."""
            code = run(arguments, prog_name or "slipcast", **extra)
            sys.stdout.flush()
            return code

        sys.exit(run_reporting(run_and_write, as_json="--json" in arguments))


@click.command("slipcast", cls=Application, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="slipcast")
def application() -> None:
    """Loads diffusion checkpoints into ready PyTorch models, and says beforehand what it will do.

    Every command takes --json for output that programs read, and -h for its help.

    \b
    Exit codes:
      0    what was asked for was done
      1    done in part or otherwise than planned, or the machine failed
      2    the input, a setting or the command line was refused
      130  interrupted
    """
