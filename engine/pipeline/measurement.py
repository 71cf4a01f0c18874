"""Measures a pipeline: the duration of a generation, the peak of memory, and the pictures that came out."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slipcast.engine.devices import Device, resolve_device
from slipcast.engine.measure import Peaks, anonymous_bytes
from slipcast.engine.pipeline.assemble import assemble, pipeline_status
from slipcast.engine.pipeline.generate import Generated, generate
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.plan import Decision

MemoryKind = Literal["device", "host_anonymous"]
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What generations of one request took.

    Attributes:
        machine: the device by its product's name; of a CPU with the number of threads.
        arguments: of the pipeline's call, those that say how.
        seconds: duration of each generation, text encoders and VAE included, loading not.
        peak_bytes: the most memory during a generation; None where the system does not say.
        peak_of: whether that is memory of the device that torch allocated, or memory of the process that no file backs,
            above what it had before the load.
        pictures: of the last generation, uint8 ``[pictures or frames, height, width, 3]``, on the CPU.
        status: what became of each setting.
    """

    machine: str
    arguments: Mapping[str, Any]
    seconds: tuple[float, ...]
    peak_bytes: int | None
    peak_of: MemoryKind
    pictures: Tensor = field(repr=False)
    status: Mapping[str, Decision] = field(repr=False)

    @property
    def median_seconds(self) -> float:
        """Median of the durations."""
        return statistics.median(self.seconds)


def measure(
    plan: PipelinePlan,
    request: GenerationRequest,
    *,
    iterations: int,
    warmup: int,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Put a pipeline together and draw the same request again and again.

    Args:
        plan: of the pipeline.
        request: what is drawn, each time from the same noise.
        iterations: generations that count, at least 1.
        warmup: generations before them that do not: compilation and choices of kernels fall there.
        progress: called with the generations that are done and those that there are.

    Raises:
        SlipcastError: as ``assemble`` and ``generate`` do.
    """
    device, _ = resolve_device(plan.device)
    before = anonymous_bytes()
    pipe = assemble(plan)
    total = warmup + iterations

    def draw(number: int) -> Generated:
        drawn = generate(pipe, request)
        if progress is not None:
            progress(number + 1, total)
        return drawn

    for number in range(warmup):
        draw(number)
    counted = _counts_memory(device)
    if counted:
        torch.accelerator.reset_peak_memory_stats(device.torch_device)
    start = anonymous_bytes()
    with Peaks(device) as peaks:
        drawn = [draw(number) for number in range(warmup, total)]
    if counted:
        peak: int | None = torch.accelerator.max_memory_allocated(device.torch_device)
    else:
        peak = _above(before, start, peaks.host_anonymous)
    return Measurement(
        machine=machine_name(device),
        arguments=drawn[-1].arguments,
        seconds=tuple(one.seconds for one in drawn),
        peak_bytes=peak,
        peak_of="device" if counted else "host_anonymous",
        pictures=pixels(drawn[-1]),
        status=pipeline_status(pipe),
    )


def pixels(drawn: Generated) -> Tensor:
    """Pictures, or frames, as uint8 ``[n, height, width, 3]``."""
    colours = [image.convert("RGB") for image in drawn.images]
    return torch.stack(
        [
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
            for image in colours
        ]
    )


def machine_name(device: Device) -> str:
    """The device by its product's name; of a CPU with the number of threads, on which durations depend as much."""
    if device.kind != "cpu":
        return device.label
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _counts_memory(device: Device) -> bool:
    """Whether torch counts what is allocated on the device."""
    return device.kind in ("cuda", "xpu")


def _above(before: int | None, start: int | None, more: int | None) -> int | None:
    if before is None or start is None or more is None:
        return None
    return max(start - before + more, 0)
