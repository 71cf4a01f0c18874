"""``slipcast check``: proves family files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipcast import api
from slipcast.cli.errors import DONE, INCOMPLETE
from slipcast.cli.options import call_settings, common_options, settings_options
from slipcast.cli.output import write, write_heading, write_json

if TYPE_CHECKING:
    from slipcast.engine.check.proof import CheckedFamily

_WIDTH = 12


@click.command("check")
@click.argument("names", metavar="[ID|FILE]...", nargs=-1)
@click.option("--all", "all_", is_flag=True, help="All known families, which is also what naming none means.")
@click.option(
    "--headers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the recorded headers; that of the repository that slipcast runs from, if left out.",
)
@settings_options
@common_options
def command(
    names: tuple[str, ...], all_: bool, headers: Path | None, assignments: tuple[str, ...], as_json: bool
) -> int:
    """Prove family files: those of the families called ID, or the files FILE, or all that are known.

    A file is laid over the known families. Each proof takes one line: ok, failed with what refutes it and where, or
    skipped with the reason, as for proofs on recorded headers where these are not there.

    \b
    Examples:
      slipcast check --all
      slipcast check families/my-family.yaml --headers tests/data/headers

    The exit code is 1 where a proof failed.
    """
    if all_ and names:
        raise click.UsageError("--all and names exclude one another: give one of both")
    checked = []
    for family in api.check(*names, headers=headers, **call_settings(assignments)):
        checked.append(family)
        if not as_json:
            _write(family)
    counts = {
        status: sum(proof.status == status for family in checked for proof in family.proofs)
        for status in ("ok", "failed", "skipped")
    }
    if as_json:
        write_json({"families": [family.to_dict() for family in checked], **counts})
    else:
        holds = f"{counts['ok']} {'proof holds' if counts['ok'] == 1 else 'proofs hold'}"
        write(f"{holds}, {counts['failed']} failed, {counts['skipped']} skipped")
    return INCOMPLETE if counts["failed"] else DONE


def _write(family: CheckedFamily) -> None:
    write_heading(f"{family.id} ({family.source})")
    for proof in family.proofs:
        write(f"  {proof.status:<{_WIDTH}}{proof.name:<{_WIDTH}}{proof.detail}")
        if proof.error is not None:
            for line in str(proof.error).splitlines()[1:]:
                write(f"  {'':<{2 * _WIDTH}}{line.strip()}")
