"""Draws with a pipeline: a request, what the family's facts and the pipeline make of it, and the pictures."""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipcast.engine.pipeline.apply_policies import refit_
from slipcast.engine.pipeline.assemble import pipeline_record, same_parts
from slipcast.engine.pipeline.classes import is_modular, pipeline_class
from slipcast.engine.pipeline.finite import explained, watched
from slipcast.engine.pipeline.interruption import interruptible, refuse_cancelled
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan
from slipcast.engine.pipeline.request import GenerationRequest, refuse_no_multiple
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.errors import SettingsError
from slipcast.registry.runtime import Sampling

logger = logging.getLogger("slipcast")


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far a generation has come.

    Attributes:
        step: number of the step that is done, from 1.
        total: number of all steps.
        latents: the latents after it, as the pipeline has them: of its own shape, dtype and device. None where it does
            not show them. They are the pipeline's own; copy what is kept.
    """

    step: int
    total: int
    latents: torch.Tensor | None


StepProgress = Callable[[GenerationProgress], None]
"""Called after each step."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What was drawn.

    Attributes:
        images: PIL pictures; of a video its frames.
        is_video: whether they are frames.
        pipeline: name of the class that drew them.
        arguments: those of its call that say how, by the pipeline's own names.
        seconds: duration of the call.
        notes: what a user should know of the result, as sentences: values that are not finite, and why.
    """

    images: tuple[Any, ...]
    is_video: bool
    pipeline: str
    arguments: Mapping[str, Any]
    seconds: float
    notes: tuple[str, ...] = ()


def generate(
    pipe: Any,
    request: GenerationRequest,
    progress: StepProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Generated:
    """Draw what a request says.

    The noise is made on the CPU, so that a seed gives the same noise wherever the pipeline computes.

    Args:
        pipe: what ``slipcast.pipeline`` returned.
        request: what is to be drawn.
        progress: called after each step, of pipelines that say when one ends. What it raises ends the generation.
        cancelled: asked after each step and before each forward pass of a model.

    Raises:
        Cancelled: ``cancelled`` said True.
        SettingsError: the pipeline can't do what is asked, or its libraries fail at it.
        CompanionError: slipcast did not make the pipeline.
        DeviceError: the size does not fit the device. Nothing was allocated for it.
    """
    plan = pipeline_record(pipe).plan
    sampling = plan.found.sampling
    if request.image is not None:
        pipe = image_pipeline(pipe)
    size = plan.drawn_size(request.size)
    shown = call_arguments(type(pipe), request, sampling, size)
    refit_(pipe, size, encodes=request.image is not None)
    arguments = {**shown, "prompt": request.prompt, "generator": torch.Generator("cpu").manual_seed(request.seed)}
    if request.image is not None:
        arguments["image"] = _fitted(request.image, size)
    takes = _parameters(type(pipe))
    if "callback_on_step_end" in takes:
        arguments["callback_on_step_end"] = _reporting(progress, cancelled, shown.get("num_inference_steps", 0))
    pipe.set_progress_bar_config(disable=True)
    began = time.perf_counter()
    frames = "frames" if "num_frames" in takes else "images"
    with interruptible(pipe, cancelled), watched(pipe) as outputs, _refusing(type(pipe), shown):
        if is_modular(type(pipe)):
            _set_guidance(pipe, request, sampling)
            found = pipe(**arguments, output=frames)
        else:
            found = getattr(pipe(**arguments, output_type="pil"), frames)
    images = tuple(found[0] if frames == "frames" else found)
    seconds, damage = time.perf_counter() - began, explained(outputs)
    if damage is not None:
        logger.warning("%s", damage)
    notes = () if damage is None else (damage,)
    return Generated(images, frames == "frames", type(pipe).__name__, shown, seconds, notes)


@contextmanager
def _refusing(kind: type, arguments: Mapping[str, Any]) -> Iterator[None]:
    """A block in which what a pipeline's library can't draw becomes an error of ours; what others raise stays."""
    try:
        yield
    except (IndexError, KeyError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _is_of_libraries(error):
            raise
        raise SettingsError(
            f"{kind.__name__} can't draw what was asked for: {type(error).__name__}: {str(error)[:300]}",
            expected="a size, a number of steps and a prompt that the models of the pipeline were made for",
            hint="ask for a smaller or less narrow size first, then look at the other values",
            items=[f"{name}: {value!r:.80}" for name, value in arguments.items()],
        ) from error


def _is_of_libraries(error: BaseException) -> bool:
    """Whether the innermost frame of an error's traceback is in a library that draws, not in a caller's function."""
    frames = traceback.walk_tb(error.__traceback__)
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    return bool(names) and names[-1] in ("diffusers", "transformers", "torch")


def draws_several(plan: PipelinePlan, request: GenerationRequest) -> bool:
    """Whether a request is of several frames, as a pipeline of videos draws them unless it is asked for one."""
    takes = _parameters(pipeline_class(plan.pipeline if request.image is None else _of_images(plan)))
    return "num_frames" in takes and request.frames != 1


def check_request(plan: PipelinePlan, request: GenerationRequest) -> None:
    """Refuse what ``generate`` would refuse, before anything is loaded.

    Raises:
        SettingsError: the pipeline can't do what is asked.
    """
    sampling = plan.found.sampling
    kind = pipeline_class(plan.pipeline if request.image is None else _of_images(plan))
    call_arguments(kind, request, sampling, plan.drawn_size(request.size))


def image_pipeline(pipe: Any) -> Any:
    """The pipeline that starts from a picture, of the same parts.

    Raises:
        SettingsError: the family has none.
    """
    plan = pipeline_record(pipe).plan
    kind = pipeline_class(_of_images(plan))
    return pipe if isinstance(pipe, kind) else same_parts(pipe, kind)


def _of_images(plan: PipelinePlan) -> str:
    sampling = plan.found.sampling
    if sampling.image_to_image is None:
        raise _refused(
            "image",
            f"a picture to start from, for which diffusers has no pipeline like {plan.pipeline}",
            "a family whose sampling: names a pipeline for image_to_image",
            "leave the picture out",
        )
    return sampling.image_to_image


def call_arguments(kind: type, request: GenerationRequest, sampling: Sampling, size: ImageSize) -> dict[str, Any]:
    """The arguments of a pipeline's call that a request and the family's facts make, without prompt and seed.

    Args:
        kind: the pipeline's class.
        request: what is to be drawn.
        sampling: the family's facts.
        size: what is drawn. The call is told all of it, so that nothing else is drawn than was planned.

    Raises:
        SettingsError: the size is no multiple of the family's, or the call has no such argument.
    """
    takes = _parameters(kind)
    arguments: dict[str, Any] = {}
    steps = request.steps if request.steps is not None else sampling.steps
    if steps is not None:
        arguments["num_inference_steps"] = steps
    guidance = request.guidance if request.guidance is not None else sampling.guidance
    if guidance is not None and sampling.guidance_argument is not None:
        arguments[sampling.guidance_argument] = guidance
    for name, asked, drawn in (
        ("width", request.width, size.width),
        ("height", request.height, size.height),
        ("num_frames", request.frames, size.frames),
    ):
        if name != "num_frames" and asked is not None:
            refuse_no_multiple(name, asked, sampling.size_multiple)
        if name in takes or (asked is not None and (request.image is None or name == "num_frames")):
            arguments[name] = drawn
    if request.strength is not None:
        arguments["strength"] = request.strength
    negative = request.negative_prompt if request.negative_prompt is not None else sampling.negative_prompt
    if negative is not None and (request.negative_prompt is not None or "negative_prompt" in takes):
        arguments["negative_prompt"] = negative
    for name in arguments:
        if name not in takes:
            raise _refused(
                name,
                f"{name} for {kind.__name__}, which takes none",
                "what the pipeline takes",
                "leave it out",
            )
    return arguments


def _fitted(image: Any, size: ImageSize) -> Any:
    """A picture in colours, of the size that is drawn."""
    return image.convert("RGB").resize((size.width, size.height))


def _reporting(
    progress: StepProgress | None, cancelled: Callable[[], bool] | None, steps: int
) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    def report(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
        total = getattr(pipe, "num_timesteps", None) or steps  # from a picture on there are fewer than were asked for
        done = f"after step {step + 1} of {total}"
        refuse_cancelled(cancelled, done)
        if progress is not None:
            progress(GenerationProgress(step + 1, total, tensors.get("latents")))
            refuse_cancelled(cancelled, done)
        return tensors

    return report


def _set_guidance(pipe: Any, request: GenerationRequest, sampling: Sampling) -> None:
    """Give the strength of guidance to the part that guides, where it is no argument of the call."""
    guidance = request.guidance if request.guidance is not None else sampling.guidance
    if guidance is not None and "guider" in pipe.components:
        pipe.update_components(guider=type(pipe.guider).from_config({**pipe.guider.config, "guidance_scale": guidance}))


def _parameters(kind: Any) -> frozenset[str]:
    """What a pipeline's call takes."""
    if is_modular(kind):
        return frozenset(kind().blocks.input_names)
    return frozenset(inspect.signature(kind.__call__).parameters)


def _refused(field: str, found: str, expected: str, hint: str) -> SettingsError:
    return SettingsError(found, expected=expected, hint=hint, field=field)
