"""``slipcast bench``: measures a pipeline, and compares with what was measured before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slipcast import api
from slipcast.cli.errors import DONE, INCOMPLETE
from slipcast.cli.generate_command import Size
from slipcast.cli.options import call_settings, common_options, device_option, path_argument, settings_options
from slipcast.cli.output import exact_bytes, progress_bar, write, write_facts, write_heading, write_json
from slipcast.engine.pipeline.request import LARGEST_SEED, MOST_STEPS, make_request
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.comparison import Compared
    from slipcast.engine.pipeline.measurement import Measurement
    from slipcast.engine.pipeline.pipeline_plan import PipelinePlan
    from slipcast.engine.pipeline.reference import Reference
    from slipcast.engine.pipeline.request import GenerationRequest

_PERCENT = click.FloatRange(min=0)
_MEMORY = {"device": "of the device", "host_anonymous": "of the process"}


class _Outcome(NamedTuple):
    plan: PipelinePlan
    request: GenerationRequest
    measured: Measurement
    reference: Reference | None
    compared: Compared | None


@click.command("bench")
@path_argument
@click.option("--prompt", metavar="TEXT", help="What is drawn.")
@click.option("--negative", "negative_prompt", metavar="TEXT", help="What is not to be seen.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), help="Number of steps; the family's if left out.")
@click.option("--guidance", type=click.FloatRange(0), help="Strength of guidance; the family's if left out.")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), help="Of the noise; 0 if left out.")
@click.option("--size", type=Size(), metavar="WxH", help="Width and height in pixels; the pipeline's if left out.")
@click.option("--frames", type=click.IntRange(1), help="Number of frames of a video.")
@click.option(
    "--iterations", type=click.IntRange(1, 10_000), default=5, show_default=True, help="Generations that count."
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 10_000),
    default=1,
    show_default=True,
    help="Generations before them that do not.",
)
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE.json", help="Save what is measured as a reference."
)
@click.option("--overwrite", is_flag=True, help="Replace the reference that lies there.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Compare with this reference; what is drawn is then taken from it.",
)
@click.option("--max-latency-regression", type=_PERCENT, metavar="PERCENT", help="Fail if the latency grows by more.")
@click.option(
    "--max-memory-regression", type=_PERCENT, metavar="PERCENT", help="Fail if the peak memory grows by more."
)
@click.option("--min-psnr", type=float, metavar="DB", help="Fail if the pictures' PSNR is less.")
@settings_options
@device_option
@common_options
def command(
    path: Path,
    size: tuple[int, int] | None,
    iterations: int,
    warmup: int,
    save: Path | None,
    overwrite: bool,
    against: Path | None,
    max_latency_regression: float | None,
    max_memory_regression: float | None,
    min_psnr: float | None,
    assignments: tuple[str, ...],
    device: str | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Measure a pipeline: latency, peak memory, and the PSNR against a reference of the same seed.

    The latency is the median duration of whole generations, after those that warm up. The memory is what torch
    allocated on the device; on a CPU what the process took besides files. A reference is two files: FILE.json and,
    beside it, its pictures in FILE.safetensors.

    \b
    Examples:
      slipcast bench FOLDER --prompt "a red fox" --set fp8=off --save reference.json
      slipcast bench FOLDER --set fp8=storage --against reference.json --min-psnr 30 --max-latency-regression 10

    The exit code is 1 if a bound is passed, and 2 if the reference is of another device, pipeline or request.
    """
    settings = api.resolve(path, call_settings(assignments, device))
    bounds = (max_latency_regression, max_memory_regression, min_psnr)
    if bounds != (None, None, None) and against is None:
        raise click.UsageError("A bound needs '--against', the reference that it is relative to.")
    if asked["prompt"] is None and against is None:
        raise click.UsageError("Missing option '--prompt'; only with '--against' it may be left out.")
    asked["width"], asked["height"] = size or (None, None)
    given = {name: value for name, value in asked.items() if value is not None}
    if against is None:
        make_request(**given)
    outcome = _bench(path, settings, given, iterations, warmup, (save, overwrite), against, bounds)
    facts = _facts(outcome, path, warmup, save, against)
    if as_json:
        write_json(facts)
    else:
        _write(outcome, warmup, save)
    return INCOMPLETE if facts["regressions"] else DONE


def _bench(
    path: Path,
    settings: Settings,
    given: dict[str, Any],
    iterations: int,
    warmup: int,
    save: tuple[Path | None, bool],
    against: Path | None,
    limits: tuple[float | None, float | None, float | None],
) -> _Outcome:
    from slipcast.engine.described_device import refuse_described
    from slipcast.engine.devices import resolve_device
    from slipcast.engine.pipeline import reference as references
    from slipcast.engine.pipeline.comparison import Bounds, compare
    from slipcast.engine.pipeline.generate import check_request
    from slipcast.engine.pipeline.measurement import machine_name, measure
    from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan

    bounds = Bounds(*limits)
    refuse_described(settings.device)
    place, overwrite = save
    if place is not None:
        references.refuse_reference_place(place, overwrite=overwrite)
    reference = None if against is None else references.load_reference(against)
    drawn_before = {} if reference is None else dict(reference.request)
    request = make_request(**{**drawn_before, **given})
    plan = make_pipeline_plan(path, settings, request.size)
    check_request(plan, request)
    expected = None
    if against is not None and reference is not None:
        here = machine_name(resolve_device(plan.device)[0])
        references.refuse_other(against, reference, plan, request, here)
        expected = references.load_pictures(against, reference)
    with progress_bar("drawing", in_bytes=False) as progress:
        measured = measure(plan, request, iterations=iterations, warmup=warmup, progress=progress)
    compared = None
    if reference is not None and expected is not None:
        compared = compare(reference, expected, measured, bounds)
    if place is not None:
        references.save_reference(
            place, references.record(plan, request, measured), measured.pictures, overwrite=overwrite
        )
    return _Outcome(plan, request, measured, reference, compared)


def _facts(outcome: _Outcome, path: Path, warmup: int, save: Path | None, against: Path | None) -> dict[str, Any]:
    plan, request, measured, reference, compared = outcome
    beside = None
    if reference is not None and compared is not None:
        beside = {
            "reference": str(against),
            "median_seconds": reference.median_seconds,
            "peak_bytes": reference.peak_bytes,
            "latency_ratio": compared.latency,
            "memory_ratio": compared.memory,
            "psnr_db": compared.psnr if compared.psnr < float("inf") else None,
            "identical": compared.psnr == float("inf"),
        }
    return {
        "path": str(path),
        "family": plan.found.family.id,
        "variant": plan.found.variant,
        "pipeline": plan.pipeline,
        "device": plan.device,
        "machine": measured.machine,
        "compute_dtype": plan.compute_dtype,
        "prompt": request.prompt,
        "seed": request.seed,
        "arguments": dict(measured.arguments),
        "warmup": warmup,
        "seconds": list(measured.seconds),
        "median_seconds": measured.median_seconds,
        "peak_bytes": measured.peak_bytes,
        "peak_of": measured.peak_of,
        "status": {name: decision.model_dump() for name, decision in measured.status.items()},
        "saved": None if save is None else str(save),
        "against": beside,
        "regressions": [] if compared is None else list(compared.regressions),
    }


def _write(outcome: _Outcome, warmup: int, save: Path | None) -> None:
    plan, request, measured, reference, compared = outcome
    write_heading(f"{plan.pipeline} of {plan.found.family.id} on {measured.machine}, {plan.compute_dtype}")
    how = "".join(f", {name} {value!r}" for name, value in measured.arguments.items())
    spread = f"{min(measured.seconds):.3f} to {max(measured.seconds):.3f}"
    median = f"{measured.median_seconds:.3f} s, the median of {len(measured.seconds)} ({spread}) after {warmup}"
    peak = "not known"
    if measured.peak_bytes is not None:
        peak = f"{exact_bytes(measured.peak_bytes)} {_MEMORY[measured.peak_of]}"
    write_facts(
        [("drawn", f"{request.prompt!r}, seed {request.seed}{how}"), ("latency", median), ("peak memory", peak)]
    )
    if reference is not None and compared is not None:
        growth = f"{100 * (compared.latency - 1):+.1f} %, of {reference.median_seconds:.3f} s"
        memory = "not known" if compared.memory is None else f"{100 * (compared.memory - 1):+.1f} %"
        same = "infinite: the same pictures" if compared.psnr == float("inf") else f"{compared.psnr:.1f} dB"
        write("against the reference:")
        write_facts([("latency", growth), ("peak memory", memory), ("PSNR", same)])
        for regression in compared.regressions:
            write(f"regression: {regression}")
    if save is not None:
        write(f"The reference is {save}.")
