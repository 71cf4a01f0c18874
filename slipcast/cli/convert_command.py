"""``slipcast convert``: writes a checkpoint back in another naming."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipcast import api
from slipcast.cli.options import call_settings, common_options, path_argument, settings_options
from slipcast.cli.output import exact_bytes, progress_bar, write, write_facts, write_heading, write_json
from slipcast.registry.inspection import identify_path

if TYPE_CHECKING:
    from slipcast.engine.convert import Converted


@click.command("convert")
@path_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["native", "diffusers"]),
    required=True,
    help="Whose names to give the tensors: those of the family's own files, or those of the model class.",
)
@click.option(
    "--prefix",
    metavar="PREFIX",
    help="What to put before each name, one that the family knows. Left out: the file's own where the naming stays "
    "the same, else none.",
)
@click.option("--overwrite", is_flag=True, help="Replace what lies at OUT.")
@settings_options
@common_options
def command(
    path: Path,
    out: Path,
    layout: str,
    prefix: str | None,
    overwrite: bool,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the checkpoint PATH to OUT in another naming.

    Values and dtypes stay as they are. OUT is a file whose name ends in .safetensors; with --layout diffusers it may
    also be a folder, which gets the weights and a config.json. It is there whole or not at all.

    \b
    Examples:
      slipcast convert model.safetensors transformer --layout diffusers
      slipcast convert transformer model.safetensors --layout native --prefix model.diffusion_model.

    What the family drops is left out, and said.
    """
    settings = api.resolve(path, call_settings(assignments))
    identified = identify_path(path, settings)
    from slipcast.engine.convert import convert  # imports torch, which a wrong path should not wait for

    main = identified.main
    with progress_bar(out.name) as progress:
        converted = convert(
            main,
            out,
            "native" if layout == "native" else "diffusers",
            prefix=prefix,
            overwrite=overwrite,
            others=[match for match in identified.matches if match.header is main.header],
            unexpected=settings.unexpected,
            progress=progress,
        )
    if as_json:
        write_json(converted.to_dict())
    else:
        _write(converted)


def _write(converted: Converted) -> None:
    conversion = converted.conversion
    write_heading(str(converted.path))
    write_facts(
        [
            ("family", converted.family),
            ("layout", f"from {converted.source_layout or 'both namings, which are one,'} to {conversion.layout}"),
            ("prefix", conversion.prefix or "none"),
            ("tensors", f"{len(conversion.tensors)}, {exact_bytes(conversion.nbytes)}"),
            ("written", [str(file) for file in converted.files]),
            ("left out", [f"{name}: {reason}" for name, reason in conversion.left_out.items()]),
            ("altered", list(conversion.altered)),
        ]
    )
    if conversion.left_out:
        write("What was left out is lost: converting back does not bring it.")
