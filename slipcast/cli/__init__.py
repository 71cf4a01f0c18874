"""The command line: thin, it calls ``slipcast.api`` and renders what comes back."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process; ends it with the exit code."""
    from slipcast.cli.application import application

    application.main()
