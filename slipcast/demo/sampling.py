"""Sampling the demonstration's digits: a flow from noise to image in a few Euler steps.

The conventions are those of diffusers' pipeline for this class of transformer. At noise level sigma an image is
``x = (1 - sigma) * image + sigma * noise``. The scheduler counts ``timestep = 1000 * sigma``; the model is given
``t = (1000 - timestep) / 1000 = 1 - sigma``, which grows from 0 (noise) to 1 (image). The pipeline negates the model's
output to get ``dx/dsigma = noise - image``, so the output itself is ``dx/dt = image - noise``, and a step adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from slipcast.demo.recognise import IMAGE_SIZE
from slipcast.registry.errors import SlipcastError

CAPTIONS = "captions"
STEPS = 8

Velocity = Callable[[Tensor, Tensor], Tensor]
"""From images ``[n, 1, 16, 16]`` and times ``[n]`` to ``dx/dt`` of the images' shape, all float32."""


def load_captions(path: str | Path) -> Tensor:
    """The caption features of the ten digits, ``[10, tokens, features]``, in the file's dtype.

    Raises:
        KeyError: the file has no tensor ``captions``.
    """
    return load_file(path)[CAPTIONS]


def draw_noise(count: int, *, seed: int) -> Tensor:
    """The noise that ``count`` samples start from, ``[count, 1, 16, 16]`` float32: of the seed alone.

    It is drawn on the CPU in one piece, so neither the model, its dtype and device nor the batch size changes it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator, dtype=torch.float32)


def integrate(velocity: Velocity, noise: Tensor, *, steps: int) -> Tensor:
    """Follow ``dx/dt = velocity(x, t)`` from ``t = 0`` to ``t = 1`` in equal Euler steps.

    Args:
        velocity: see `Velocity`; called at ``t = 0, 1/steps, ..., (steps - 1)/steps``.
        noise: where to start, float32.
        steps: how many, at least 1.

    Returns:
        The end of the path, of the noise's shape and dtype.

    Raises:
        SlipcastError: ``steps`` is less than 1.
    """
    if steps < 1:
        raise SlipcastError(f"{steps} steps", expected="at least 1", hint=f"{STEPS} are enough for a clear image")
    x = noise
    for step in range(steps):
        t = torch.full((len(x),), step / steps, dtype=torch.float32, device=x.device)
        x = x + velocity(x, t) / steps
    return x


def sample(
    model: nn.Module,
    captions: Tensor,
    digits: Sequence[int],
    *,
    seed: int,
    steps: int = STEPS,
    compute_dtype: torch.dtype,
    batch: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Draw one image for each digit.

    Args:
        model: the transformer, on the device to sample on.
        captions: what `load_captions` returned, ``[10, tokens, features]``.
        digits: what to draw, each 0 to 9.
        seed: of the noise; see `draw_noise`.
        steps: Euler steps.
        compute_dtype: the dtype that the model is fed; the path itself is followed in float32.
        batch: images per forward. It changes time and memory, not the result beyond rounding.
        progress: called after each batch with the images drawn so far and in all.

    Returns:
        Images ``[len(digits), 1, 16, 16]``, float32 in [-1, 1], on the CPU.

    Raises:
        SlipcastError: ``digits`` is empty, or ``steps`` or ``batch`` is less than 1.
    """
    if not digits or batch < 1:
        raise SlipcastError(
            f"{len(digits)} digits in batches of {batch}",
            expected="at least one digit, and batches of at least one",
            hint="name digits to draw; a larger batch takes more memory and less time",
        )
    device = next(model.parameters()).device
    captions = captions.to(device, compute_dtype)
    noise = draw_noise(len(digits), seed=seed).to(device)
    images: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, len(digits), batch):
            rows = [captions[digit] for digit in digits[start : start + batch]]
            velocity = model_velocity(model, rows, compute_dtype)
            images.append(integrate(velocity, noise[start : start + batch], steps=steps))
            if progress is not None:
                progress(start + len(rows), len(digits))
    return torch.cat(images).clamp(-1, 1).cpu()


def model_velocity(model: nn.Module, captions: Sequence[Tensor], compute_dtype: torch.dtype) -> Velocity:
    """The model's ``dx/dt`` for images with these captions, one ``[tokens, features]`` for each image."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        latents = list(x.to(compute_dtype).unsqueeze(2).unbind(0))  # each [channels, frames, height, width]
        output = model(latents, t, list(captions), return_dict=False)[0]
        return torch.stack([one.float() for one in output]).squeeze(2)

    return velocity
