"""The demonstration's pipeline: a text encoder, a denoiser and a VAE that draw the digit that a prompt names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from slipcast import api
from slipcast.demo.recognise import PICTURE_SIZE, as_recognised, recognised_digits, train_recogniser
from slipcast.engine.pipeline.assemble import pipeline_record
from slipcast.engine.plan import Decision
from slipcast.registry.errors import SlipcastError

PIPELINE = Path(__file__).with_name("pipeline")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STEPS = 8
LATENT_SHAPE = (16, PICTURE_SIZE // 8, PICTURE_SIZE // 8)

_LONGEST_PROMPT = 512
_MARKS = 16
"""Tokens that the chat template adds to a prompt, and to spare; of the prompt each byte is a token."""


@dataclass(frozen=True)
class Prompted:
    """A picture of a prompt.

    Attributes:
        prompt: what was asked for.
        seed: of the noise.
        steps: from noise to picture.
        picture: ``[3, 64, 64]``, float32 in [-1, 1], on the CPU.
        digit: what the classifier takes it for.
        seconds: that drawing took, without the load.
        device: torch's name of the device.
        compute_dtype: torch's name of the denoiser's dtype.
        nbytes: of all models, loaded.
        status: what became of each setting.
    """

    prompt: str
    seed: int
    steps: int
    picture: Tensor = field(repr=False)
    digit: int
    seconds: float
    device: str
    compute_dtype: str
    nbytes: int
    status: Mapping[str, Decision] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The contract of ``slipcast demo --prompt TEXT --json``, less the picture's path."""
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "steps": self.steps,
            "recognised": self.digit,
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "settings": {name: decision.model_dump() for name, decision in self.status.items()},
        }


def draw_prompt(
    prompt: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prompted:
    """Load the shipped pipeline and draw one picture with it.

    Args:
        prompt: such as "seven".
        settings: those of configs/defaults.yaml, by dotted names.
        seed: of the noise.
        steps: from noise to picture, at least 1; 8 if left out.
        progress: called with the steps that are done and those that there are.

    Raises:
        SlipcastError: as ``slipcast.pipeline`` does.
    """
    steps = STEPS if steps is None else steps
    pipe = api.pipeline(PIPELINE, **settings)
    began = perf_counter()
    (picture,) = draw(pipe, [prompt], seed=seed, steps=steps, progress=progress)
    seconds = perf_counter() - began
    (digit,) = recognised_digits(train_recogniser(), as_recognised(picture[None]))
    plan = pipeline_record(pipe).plan
    return Prompted(
        prompt, seed, steps, picture, digit, seconds, plan.device, plan.compute_dtype, plan.nbytes, api.status(pipe)
    )


def start_noise(count: int, *, seed: int) -> Tensor:
    """The latents that ``count`` pictures start from, ``[count, 16, 8, 8]`` float32, drawn on the CPU in one piece."""
    return torch.randn(count, *LATENT_SHAPE, generator=torch.Generator("cpu").manual_seed(seed))


def draw(
    pipe: Any,
    prompts: Sequence[str],
    *,
    seed: int,
    steps: int = STEPS,
    batch: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Draw a picture of each prompt by the pipeline's own call.

    Args:
        pipe: the shipped pipeline, however it was loaded.
        prompts: at least one.
        seed: of the noise; see `start_noise`.
        steps: from noise to picture.
        batch: pictures for each call. It changes time and memory, not the result beyond rounding.
        progress: called with the steps that are done and those that there are, of all calls.

    Returns:
        Pictures ``[len(prompts), 3, 64, 64]``, float32 in [-1, 1], on the CPU.

    Raises:
        SlipcastError: there is no prompt, or ``steps`` or ``batch`` is less than 1.
    """
    if not prompts or min(steps, batch) < 1:
        raise SlipcastError(
            f"{len(prompts)} prompts in {steps} steps and batches of {batch}",
            expected="at least one prompt, one step, and batches of at least one",
            hint=f"{STEPS} steps are enough for a clear digit",
        )
    starts = range(0, len(prompts), batch)
    longest = max(len(prompt.encode()) for prompt in prompts)
    pipe.set_progress_bar_config(disable=True)
    noise = start_noise(len(prompts), seed=seed)
    pictures: list[Tensor] = []
    for number, start in enumerate(starts):
        done = number * steps

        def report(_: Any, step: int, __: Any, tensors: dict[str, Any], done: int = done) -> dict[str, Any]:
            if progress is not None:
                progress(done + step + 1, len(starts) * steps)
            return tensors

        pictures.append(
            pipe(
                list(prompts[start : start + batch]),
                height=PICTURE_SIZE,
                width=PICTURE_SIZE,
                num_inference_steps=steps,
                guidance_scale=0.0,
                latents=noise[start : start + batch],
                max_sequence_length=min(longest + _MARKS, _LONGEST_PROMPT),
                output_type="pt",
                callback_on_step_end=report,
            ).images
        )
    return torch.cat([part.float().cpu() for part in pictures]) * 2 - 1
