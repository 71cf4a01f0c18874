"""What the programs that train the demonstration have in common: options, batches, and the optimiser's steps."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# cuBLAS reads this when it starts; without it, deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all of them have."""
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training after so long, at any step")
    parser.add_argument("--batch", type=int, default=256, help="samples per step; a quarter for a VAE (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at its peak (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, captions, training and samples (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")


@contextmanager
def repeatable() -> Iterator[None]:
    """Within it, training twice on one kind of device gives the same weights."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The plain attention kernel: at these lengths as fast, and its gradient is deterministic on every device.
    with sdpa_kernel(SDPBackend.MATH):
        yield


@dataclass(frozen=True)
class Schedule:
    """How long to train, and at what rate.

    Attributes:
        steps: at the most.
        batch: samples of each.
        peak: the highest learning rate.
        seconds: after which the training ends, whatever the step.
        report_every: steps from one report to the next.
    """

    steps: int
    batch: int
    peak: float
    seconds: float
    report_every: int


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a twentieth of the steps (at most 200), then a cosine down to a hundredth of the peak."""
    warm_up = max(1, min(200, steps // 20))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


def batches(count: int, steps: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each step's batch: the images in a new random order again and again, across the seams."""
    waiting = torch.empty(0, dtype=torch.long, device=generator.device)
    for _ in range(steps):
        while len(waiting) < batch:
            order = torch.randperm(count, generator=generator, device=generator.device)
            waiting = torch.cat([waiting, order])
        yield waiting[:batch]
        waiting = waiting[batch:]


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    """Move the running average of the weights towards the model: over a tenth of the steps so far, at most 1000."""
    weight = max(1e-3, 10 / (step + 10))
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, weight)


def optimise(
    name: str,
    model: nn.Module,
    schedule: Schedule,
    count: int,
    loss_of: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    report: Callable[[str], str],
    generator: torch.Generator,
    *,
    beside: Iterable[nn.Parameter] = (),
    average: nn.Module | None = None,
) -> None:
    """Train a model in place with AdamW, its gradient clipped to a norm of 1.

    Args:
        name: of the model, for what is printed.
        model: what is trained.
        schedule: how long.
        count: of samples that there are.
        loss_of: of a step's number and its rows: the loss, and what of it is reported, the mean since the last report.
        report: what to say beside that.
        generator: what shuffles the samples.
        beside: parameters that are trained with the model's, and not clipped.
        average: a copy of the model that follows it.
    """
    optimiser = torch.optim.AdamW([*model.parameters(), *beside], betas=(0.9, 0.99), weight_decay=0.01)
    started = time.perf_counter()
    reported: list[Tensor] = []
    for step, rows in enumerate(batches(count, schedule.steps, schedule.batch, generator)):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, schedule.steps, schedule.peak)
        loss, shown = loss_of(step, rows)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if average is not None:
            update_average(average, model, step)
        reported.append(shown.detach())
        late = time.perf_counter() - started > schedule.seconds
        if late or (step + 1) % schedule.report_every == 0 or step + 1 == schedule.steps:
            said = report(f"{torch.stack(reported).mean().item():.5f}")
            print(f"{name}: step {step + 1:5d}  {said}  {time.perf_counter() - started:.0f} s", flush=True)
            reported.clear()
        if late:
            print(f"{name}: stopped after {schedule.seconds:.0f} s and {step + 1} of {schedule.steps} steps")
            break
