"""``slipcast explain``: why each family did or did not match."""

from __future__ import annotations

from pathlib import Path

import click

from slipcast import api
from slipcast.cli.options import call_settings, common_options, path_argument, settings_options
from slipcast.cli.output import write, write_heading, write_json, write_table
from slipcast.registry.explanation import Explanation, explain_path


@click.command("explain")
@path_argument
@settings_options
@common_options
def command(path: Path, assignments: tuple[str, ...], as_json: bool) -> None:
    """Say why each family does or does not match a checkpoint.

    For each family, the one that found most of its evidence first: the prefix and the naming in which it found most,
    what it found, and what speaks against it. Exactly one family must find all that it looks for.

    \b
    Examples:
      slipcast explain model.safetensors
      slipcast explain --json model.safetensors
    """
    explanations = explain_path(path, api.resolve(path, call_settings(assignments)))
    if as_json:
        write_json({"path": str(path), "components": [explanation.to_dict() for explanation in explanations]})
        return
    write_heading(str(path))
    for explanation in explanations:
        _write_explanation(explanation)


def _write_explanation(explanation: Explanation) -> None:
    if explanation.component:
        write()
        write_heading(explanation.component)
    claims = explanation.claims
    write(f"  {'claimed by ' + ' and '.join(claims) if claims else 'no family claims it'}")
    rows = []
    for answer in explanation.answers:
        evidence = answer.evidence
        found = [*evidence.found, *evidence.held]
        asked = len(found) + len(evidence.missing)
        rows.append(
            (
                answer.family.id,
                "yes" if evidence.complete else "no",
                repr(answer.prefix),
                answer.layout,
                f"{len(found)} of {asked}",
                ", ".join(evidence.missing),
            )
        )
    write_table(("family", "claims it", "prefix", "names", "found", "against it"), rows)
