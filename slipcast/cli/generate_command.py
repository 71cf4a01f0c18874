"""``slipcast generate``: puts a pipeline together and draws with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slipcast import api
from slipcast.cli.options import call_settings, common_options, device_option, path_argument, settings_options
from slipcast.cli.output import mebibytes, progress_bar, write, write_facts, write_heading, write_json, write_table
from slipcast.cli.plan_view import write_settings
from slipcast.engine.pipeline.request import LARGEST_SEED, MOST_STEPS, make_request
from slipcast.engine.policy.sizes import AskedSize
from slipcast.registry.errors import UnsupportedFileError
from slipcast.registry.found_pipeline import find_pipeline
from slipcast.registry.new_files import new_file, refuse_place
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.generate import Generated
    from slipcast.engine.pipeline.pipeline_plan import PipelinePlan
    from slipcast.engine.pipeline.request import GenerationRequest
    from slipcast.registry.companions import Companion

_PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_VIDEOS = {".png": "PNG", ".gif": "GIF", ".webp": "WEBP"}
_FRAME_RATE = 16.0


def _endings(kinds: Mapping[str, str]) -> str:
    *first, last = kinds
    return f"{', '.join(first)} or {last}"


_NAMES = f"{_endings(_PICTURES)}; of a video an animated {_endings(_VIDEOS)}"
"""How the name of what is written may end."""


class Size(click.ParamType[tuple[int, int]]):
    """``WIDTHxHEIGHT`` in pixels."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """The two numbers."""
        width, _, height = str(value).lower().partition("x")
        if not (width.isdecimal() and height.isdecimal() and len(value) < 16):
            self.fail(f"{value!r} is no size; write it as 1024x768", param, ctx)
        return int(width), int(height)


@click.command("generate")
@path_argument
@click.option("--prompt", metavar="TEXT", help="What is to be seen.")
@click.option("--negative", "negative_prompt", metavar="TEXT", help="What is not to be seen.")
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), help="Number of steps; the family's if left out.")
@click.option("--guidance", type=click.FloatRange(0), help="Strength of guidance; the family's if left out.")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), default=0, show_default=True, help="Of the noise.")
@click.option("--size", type=Size(), metavar="WxH", help="Width and height in pixels; the pipeline's if left out.")
@click.option("--frames", type=click.IntRange(1), help="Number of frames of a video.")
@click.option("--image", type=click.Path(path_type=Path), metavar="FILE", help="A picture to start from.")
@click.option("--strength", type=click.FloatRange(0, 1, min_open=True), help="How far to go from that picture.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("slipcast.png"),
    show_default=True,
    metavar="FILE",
    help=f"Where to write: {_NAMES}.",
)
@click.option("--overwrite", is_flag=True, help="Replace what lies there.")
@click.option("--dry-run", is_flag=True, help="Show the plan of all parts, and draw nothing.")
@settings_options
@device_option
@common_options
def command(
    path: Path,
    prompt: str | None,
    size: tuple[int, int] | None,
    image: Path | None,
    out: Path,
    overwrite: bool,
    dry_run: bool,
    assignments: tuple[str, ...],
    device: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Draw a picture, or a video, with a denoiser and the parts of its pipeline.

    The parts (text encoders, VAE, tokenizers, scheduler) are taken from the setting companions, from the pipeline's
    folder, from the same file, or from what lies beside the file. Nothing is downloaded; what is missing is named.

    \b
    Examples:
      slipcast generate FOLDER --prompt "a red fox in snow" --out fox.png
      slipcast generate model.safetensors --prompt "a red fox" --set companions=FOLDER --set fp8=storage
      slipcast generate FOLDER --prompt "in oil" --image fox.png --strength 0.6 --out oil.png
      slipcast generate model.safetensors --dry-run
    """
    settings = api.resolve(path, call_settings(assignments, device))
    if dry_run:
        width, height = size or (None, None)
        picture = _opened(image)
        asked_size = AskedSize(width, height, asked["frames"], None if picture is None else picture.size)
        _show_plan(path, settings, asked_size, asked["steps"], asked["guidance"], as_json)
        return
    if prompt is None:
        raise click.UsageError("Missing option '--prompt'.")
    if out.suffix.lower() not in _PICTURES | _VIDEOS:
        raise UnsupportedFileError(
            f"the name ends in {out.suffix or 'nothing'}",
            expected=f"a name that ends in {_NAMES}",
            hint="give --out another ending",
            path=out,
        )
    refuse_place(out, overwrite=overwrite)
    width, height = size or (None, None)
    request = make_request(prompt=prompt, width=width, height=height, image=_opened(image), **asked)
    pipe, drawn = _draw(path, settings, request, out)
    _save(drawn, pipe, out, overwrite)
    facts = _facts(pipe, request, drawn, out)
    if as_json:
        write_json(facts)
    else:
        _write(facts)


def _draw(path: Path, settings: Settings, request: GenerationRequest, out: Path) -> tuple[Any, Generated]:
    from slipcast.engine.described_device import refuse_described

    refuse_described(settings.device)
    found = find_pipeline(path, settings)
    from slipcast.engine.pipeline.assemble import assemble  # imports torch, which what is refused should not wait for
    from slipcast.engine.pipeline.generate import check_request, draws_several, generate
    from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan

    plan = make_pipeline_plan(path, settings, request.size, found=found)
    check_request(plan, request)
    _format(out, several=draws_several(plan, request))
    with progress_bar("loading") as progress:
        pipe = assemble(plan, progress=progress)
    with progress_bar("drawing", in_bytes=False) as progress:
        return pipe, generate(pipe, request, lambda at: progress(at.step, at.total))


def _opened(image: Path | None) -> Any:
    if image is None:
        return None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as found:
            found.load()
            return found
    except FileNotFoundError as error:
        raise UnsupportedFileError(
            "the picture can't be read: there is no such file",
            expected="a PNG, JPEG or WebP file",
            hint="check the path that --image names",
            path=image,
        ) from error
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise UnsupportedFileError(
            f"the picture can't be read: {error}",
            expected="a PNG, JPEG or WebP file",
            hint="give --image another file, or save this one anew",
            path=image,
        ) from error


def _format(out: Path, *, several: bool) -> str:
    """What Pillow calls the format of a file, which holds one picture or several frames."""
    kinds = _VIDEOS if several else _PICTURES
    kind = kinds.get(out.suffix.lower())
    if kind is None:
        raise UnsupportedFileError(
            f"{'several frames' if several else 'one picture'} for a {out.suffix} file, "
            f"which holds {'one picture' if several else 'several frames'}",
            expected=f"a name that ends in {_endings(kinds)}",
            hint="give --out another ending",
            path=out,
        )
    return kind


def _save(drawn: Generated, pipe: Any, out: Path, overwrite: bool) -> None:
    from slipcast.engine.pipeline.assemble import pipeline_record

    first, *others = drawn.images
    kind = _format(out, several=drawn.is_video)
    rate = pipeline_record(pipe).plan.found.sampling.frame_rate or _FRAME_RATE
    moving = {"save_all": True, "append_images": others, "duration": round(1000 / rate), "loop": 0} if others else {}
    with new_file(out, overwrite=overwrite) as file:
        first.save(file, kind, **moving)


def _facts(pipe: Any, request: GenerationRequest, drawn: Generated, out: Path) -> dict[str, Any]:
    from slipcast.engine.pipeline.assemble import pipeline_record, pipeline_status

    plan = pipeline_record(pipe).plan
    width, height = drawn.images[0].size
    return {
        "path": str(plan.found.path),
        "family": plan.found.family.id,
        "variant": plan.found.variant,
        "pipeline": drawn.pipeline,
        "out": str(out),
        "seed": request.seed,
        "arguments": dict(drawn.arguments),
        "width": width,
        "height": height,
        "frames": len(drawn.images),
        "seconds": drawn.seconds,
        "notes": list(drawn.notes),
        "device": plan.device,
        "compute_dtype": plan.compute_dtype,
        "bytes": plan.nbytes,
        "status": {name: decision.model_dump() for name, decision in pipeline_status(pipe).items()},
    }


def _write(facts: dict[str, Any]) -> None:
    variant = f" ({facts['variant']})" if facts["variant"] else ""
    write_heading(f"{facts['out']}: {facts['width']} x {facts['height']} pixels by {facts['pipeline']}")
    how = ", ".join(f"{name} {value!r}" for name, value in facts["arguments"].items())
    write_facts(
        [
            ("family", f"{facts['family']}{variant}"),
            ("device", f"{facts['device']}, {facts['compute_dtype']}, {mebibytes(facts['bytes'])} MiB"),
            ("how", f"seed {facts['seed']}{f', {how}' if how else ''}"),
            ("frames", [str(facts["frames"])] if facts["frames"] > 1 else []),
            ("seconds", f"{facts['seconds']:.2f}"),
            ("notes", facts["notes"]),
        ]
    )


def _show_plan(
    path: Path, settings: Settings, size: AskedSize, steps: int | None, guidance: float | None, as_json: bool
) -> None:
    found = find_pipeline(path, settings)
    steps = found.sampling.steps if steps is None else steps
    guidance = found.sampling.guidance if guidance is None else guidance
    from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan  # imports torch

    plan = make_pipeline_plan(path, settings, size, found=found)
    if as_json:
        write_json({**plan.to_json(), "steps": steps, "guidance": guidance})
    else:
        _write_plan(plan, steps, guidance)


def _named(part: Companion) -> str:
    if part.match is None:
        return part.class_name
    return part.match.family.id + (f" ({part.match.variant})" if part.match.variant else "")


def _write_plan(plan: PipelinePlan, steps: int | None, guidance: float | None) -> None:
    variant = f" ({plan.found.variant})" if plan.found.variant else ""
    write_heading(f"{plan.pipeline} of {plan.found.family.id}{variant}: {mebibytes(plan.nbytes)} MiB on {plan.device}")
    size = plan.policies.size
    frames = f", {size.frames} frames" if size.frames > 1 else ""
    write_facts(
        [
            ("drawn at", f"{size.width} x {size.height} pixels{frames}"),
            ("steps", "the pipeline's own number" if steps is None else str(steps)),
            ("guidance", "the pipeline's own strength" if guidance is None else f"{guidance:g}"),
        ]
    )
    write_table(
        ("part", "what", "bytes", "precision", "found", "in"),
        (
            (
                role,
                _named(part.companion),
                f"{part.nbytes:,}",
                ", ".join(part.plan.precisions) if part.plan is not None else "",
                part.companion.found,
                "" if part.companion.path is None else str(part.companion.path),
            )
            for role, part in plan.parts.items()
        ),
        right=("bytes",),
    )
    for role, reason in plan.absent.items():
        write(f"  {role}: none; {reason}")
    write_settings(plan.settings)
