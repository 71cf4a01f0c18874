"""``slipcast convert``: writes a checkpoint in another naming or another format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipcast import api
from slipcast.cli.collapse import collapse
from slipcast.cli.options import call_settings, common_options, is_verbose, path_argument, settings_options
from slipcast.cli.output import (
    exact_bytes,
    progress_bar,
    without_deprecations,
    write,
    write_facts,
    write_heading,
    write_json,
)

if TYPE_CHECKING:
    from slipcast.engine.convert import Converted
    from slipcast.engine.wanted import Scale, Spelling
    from slipcast.registry.claims import Layout

_MOST_LINES = 6
"""Lines of names that one reason may take."""


@click.command("convert")
@path_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["native", "diffusers"]),
    help="Whose names to give the tensors: those of the family's own files, or those of the model class. Left out: "
    "the file's own.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["bf16", "fp16", "fp32", "fp8_scaled", "mxfp8", "nvfp4", "int8", "int8_convrot"]),
    help="What to write the weights in: a dtype, for all of them, or a format of codes, for those that the family lets "
    "be quantised. Left out: as they are.",
)
@click.option(
    "--spelling",
    type=click.Choice(["comfy", "legacy"]),
    help="How scales are called: weight_scale, and a comfy_quant marker for each layer, or, of fp8 alone, scale_weight "
    "and one scaled_fp8 marker. Left out: as the file has them, of new codes comfy.",
)
@click.option(
    "--scale",
    type=click.Choice(["tensor", "row"]),
    help="How far one scale of fp8 or int8 reaches. Left out: tensor for fp8, row for int8, as ComfyUI reads them.",
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
    layout: Layout | None,
    format_: str | None,
    spelling: Spelling | None,
    scale: Scale | None,
    prefix: str | None,
    overwrite: bool,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the checkpoint PATH to OUT in another naming, or its weights in another format.

    What is not asked to change stays as it is, codes and scales too. OUT is a file whose name ends in .safetensors; in
    the model's names it may also be a folder, which gets the weights and a config.json. It is there whole or not at
    all.

    \b
    Examples:
      slipcast convert model.safetensors transformer --layout diffusers
      slipcast convert transformer model.safetensors --layout native --prefix model.diffusion_model.
      slipcast convert model.safetensors small.safetensors --format fp8_scaled
      slipcast convert small.safetensors plain.safetensors --format bf16

    What the family drops and what is of other models is left out, and said; --verbose names every tensor. In a file
    that is quantised already, --format leaves layers that are not alone, unless the setting fp8.remainder is quantise.
    Each layer that does not get the format is said with the reason.
    """
    with progress_bar(out.name) as progress, without_deprecations():
        converted = api.convert(
            path,
            out,
            layout=layout,
            format=format_,
            spelling=spelling,
            scale=scale,
            prefix=prefix,
            overwrite=overwrite,
            progress=progress,
            **call_settings(assignments),
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
            ("layout", _layouts(converted.source_layout, conversion.layout)),
            ("prefix", conversion.prefix or "none"),
            ("formats", _formats(_counts(converted.source_formats), _counts(conversion.formats))),
            ("tensors", f"{len(conversion.tensors)}, {exact_bytes(conversion.nbytes)}"),
            ("written", [str(file) for file in converted.files]),
            ("stayed", _reasons(conversion.stayed)),
            ("dequantised", _reasons(conversion.folded)),
            ("left out", _reasons(conversion.left_out) if is_verbose() else _groups(conversion.left_out)),
            ("altered", list(conversion.altered)),
        ]
    )
    if conversion.left_out:
        write("What was left out is lost: converting back does not bring it.")


def _groups(reasons: Mapping[str, str]) -> list[str]:
    """As ``_reasons``, but for a reason of more than a few lines the number of its names alone."""
    counts = Counter(block.label for block in collapse(reasons.items()))
    many = {reason for reason, lines in counts.items() if lines > _MOST_LINES}
    tensors = Counter(reasons.values())
    few = _reasons({name: reason for name, reason in reasons.items() if reason not in many})
    groups = [f"{tensors[reason]:,} tensors: {reason}" for reason in counts if reason in many]
    return [*few, *groups, *(["--verbose names them"] if groups else [])]


def _layouts(source: Layout | None, layout: Layout) -> str:
    if source is None:
        return f"{layout}, which the native and the diffusers names both are"
    return f"{layout}, as it was" if source == layout else f"from {source} to {layout}"


def _formats(source: str, written: str) -> str:
    return f"{written}, as they were" if source == written else f"from {source} to {written}"


def _counts(formats: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in formats.items())


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Names with their reasons, those that differ in indices alone in one line; a reason of several lines once."""
    names: dict[str, list[str]] = {}
    for block in collapse(reasons.items()):
        names.setdefault(block.label, []).append(block.pattern + (f" ({block.count})" if block.count > 1 else ""))
    lines: list[str] = []
    for reason, patterns in names.items():
        lines += [f"{patterns[0]}: {reason}"] if len(patterns) == 1 else [f"{reason}:", *(f"  {x}" for x in patterns)]
    return lines
