"""``slipcast demo``: draws digits with the shipped model in two precisions, or the one that a prompt names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slipcast.cli.errors import DONE, INCOMPLETE
from slipcast.cli.options import call_settings, common_options, device_option, settings_options
from slipcast.cli.output import mebibytes, progress_bar, write, write_facts, write_heading, write_json, write_table
from slipcast.engine.pipeline.request import LARGEST_SEED, MOST_STEPS
from slipcast.registry.new_files import new_file, refuse_place
from slipcast.registry.settings import resolve_settings

if TYPE_CHECKING:
    from slipcast.demo.prompted import Prompted
    from slipcast.demo.run import Comparison, Drawn


@click.command("demo")
@click.option("--prompt", metavar="TEXT", help="Draw one picture of this with the small pipeline, and compare nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("slipcast-demo.png"),
    show_default=True,
    metavar="FILE",
    help="Where to write the picture.",
)
@click.option("--overwrite", is_flag=True, help="Replace what lies there.")
@click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    default=0,
    show_default=True,
    help="Of the noise that the digits are drawn from.",
)
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), help="Steps to the prompt's picture; 8 if left out.")
@settings_options
@device_option
@common_options
def command(
    prompt: str | None,
    out: Path,
    overwrite: bool,
    seed: int,
    steps: int | None,
    assignments: tuple[str, ...],
    device: str | None,
    as_json: bool,
) -> int:
    """Draw digits with a small trained model, unquantised and in fp8 storage, and compare.

    Both start from the same noise. A classifier that was trained on real digits says how many of 200 show the digit
    that they should. The picture has a row of digits for each. Takes a minute or so on two cores.

    With --prompt a small pipeline of text encoder, denoiser and VAE draws the digit that the prompt names, in seconds.

    \b
    Examples:
      slipcast demo
      slipcast demo --prompt seven --set fp8=storage --out seven.png
      slipcast demo --device cpu --set dtype=float32 --out digits.png

    Of the comparison the exit code is 0 only if both loads took the bytes predicted, at least 190 digits of the
    unquantised model are recognised, and fp8 storage changes that by 1 at most.
    """
    settings = call_settings(assignments, device)
    resolve_settings(settings)
    refuse_place(out, overwrite=overwrite)
    if steps is not None and prompt is None:
        raise click.UsageError("Option '--steps' needs '--prompt': the comparison always takes the same steps.")
    from slipcast.demo import run  # imports torch, which a wrong option should not wait for

    run.require_extras()
    if prompt is not None:
        _draw_prompt(prompt, settings, seed, steps, out, overwrite, as_json)
        return DONE
    with progress_bar("drawing", in_bytes=False) as progress:
        comparison = run.compare(settings, seed=seed, samples=run.SAMPLES, progress=progress)
    _write_picture(comparison, out, overwrite)
    if as_json:
        write_json({**comparison.to_dict(), "picture": str(out)})
    else:
        _write(comparison, out)
    return INCOMPLETE if comparison.problems else DONE


def _draw_prompt(
    prompt: str, settings: dict[str, Any], seed: int, steps: int | None, out: Path, overwrite: bool, as_json: bool
) -> None:
    from slipcast.demo.picture import to_picture
    from slipcast.demo.prompted import draw_prompt

    with progress_bar("drawing", in_bytes=False) as progress:
        drawn = draw_prompt(prompt, settings, seed=seed, steps=steps, progress=progress)
    with new_file(out, overwrite=overwrite) as file:
        to_picture(drawn.picture).save(file, "PNG", optimize=True)
    if as_json:
        write_json({**drawn.to_dict(), "picture": str(out)})
    else:
        _write_prompted(drawn, out)


def _write_prompted(drawn: Prompted, out: Path) -> None:
    write_heading(f"{drawn.prompt!r}: the classifier sees a {drawn.digit}")
    write_facts(
        [
            ("device", f"{drawn.device}, {drawn.compute_dtype}, {mebibytes(drawn.nbytes)} MiB"),
            ("drawn", f"in {drawn.steps} steps, seed {drawn.seed}, {drawn.seconds:.1f} seconds"),
        ]
    )
    write(f"The picture is {out}.")


def _write_picture(comparison: Comparison, out: Path, overwrite: bool) -> None:
    from slipcast.demo.picture import Row, draw_picture
    from slipcast.demo.recognise import DIGITS

    rows = [Row(_title(drawn, len(comparison.digits)), drawn.images[:DIGITS]) for drawn in comparison.both]
    foot = f"the same noise, {comparison.steps} steps;  {_difference(comparison)}"
    picture = draw_picture(rows, [str(digit) for digit in comparison.digits[:DIGITS]], foot)
    with new_file(out, overwrite=overwrite) as file:
        picture.save(file, "PNG", optimize=True)


def _title(drawn: Drawn, samples: int) -> str:
    return f"{drawn.storage},  {mebibytes(drawn.report.resident)} MiB,  {drawn.recognised} of {samples} recognised"


def _difference(comparison: Comparison) -> str:
    return f"relative L2 {comparison.relative_l2:.4f}, PSNR {comparison.psnr:.1f} dB"


def _write(comparison: Comparison, out: Path) -> None:
    found, plan = comparison.inspection, comparison.unquantised.plan
    write_heading(f"{found.path.name}: {found.main.family}, {found.main.layout} names, {mebibytes(found.nbytes)} MiB")
    write_facts(
        [
            ("device", plan.device),
            ("dtype", f"{plan.compute_dtype}: {plan.settings['dtype'].reason}"),
            ("samples", f"{len(comparison.digits)} in {comparison.steps} steps, seed {comparison.seed}"),
        ]
    )
    write()
    columns = ("weights", "bytes predicted", "bytes resident", "recognised", "seconds")
    write_table(columns, (_row(drawn, len(comparison.digits)) for drawn in comparison.both), right=columns[1:])
    write()
    write(f"Between the two: {_difference(comparison)}.")
    write(f"The picture is {out}.")
    for problem in comparison.problems:
        write(f"not as it should be: {problem}")


def _row(drawn: Drawn, samples: int) -> tuple[str, ...]:
    return (
        drawn.storage,
        f"{drawn.plan.bytes.resident:,}",
        f"{drawn.report.resident:,}",
        f"{drawn.recognised} of {samples}",
        f"{drawn.seconds:.1f}",
    )
