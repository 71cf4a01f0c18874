"""Runs the command line, in this process or in one of its own, away from the settings of whoever runs the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from slipcast.cli.application import application


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """Run a command line in this process. An error that the command line does not report is raised."""
    result = CliRunner().invoke(application, [str(argument) for argument in arguments], env=dict(env or {}))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output_of(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What a command line that succeeds writes to standard output."""
    result = run(*arguments, env=env)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*arguments: str | Path, env: Mapping[str, str] | None = None, exit_code: int = 0) -> Any:
    """What a command line writes with ``--json``: one JSON document, and nothing to standard error."""
    result = run(*arguments, "--json", env=env)
    assert result.exit_code == exit_code, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def start(*arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start a command line in a process of its own, with its output in pipes."""
    command = [sys.executable, "-m", "slipcast.cli", *(str(argument) for argument in arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, **pipes)


def run_process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own."""
    process = start(*arguments, **options)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
