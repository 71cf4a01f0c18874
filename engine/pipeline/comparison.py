"""Compares a measurement of a pipeline with a reference, and says which bounds it passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from slipcast.engine.pipeline.measurement import Measurement
from slipcast.engine.pipeline.reference import Reference
from slipcast.registry.errors import SettingsError, UnsupportedFileError

_BRIGHTEST = 255


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much worse than a reference a measurement may be; None is without a bound.

    Attributes:
        latency: growth of the median duration in percent.
        memory: growth of the peak in percent.
        psnr: least PSNR in decibels.

    Raises:
        SettingsError: one of them is NaN.
    """

    latency: float | None = None
    memory: float | None = None
    psnr: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "memory", "psnr"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise SettingsError(
                    f"the bound of the {name} is no number",
                    expected="a number, which a measurement can be compared with",
                    hint="give a number, or leave the bound out",
                    field=name,
                )


@dataclass(frozen=True, slots=True)
class Compared:
    """A measurement beside a reference.

    Attributes:
        latency: median duration over the reference's.
        memory: peak over the reference's; None where one of them is not known, or is zero.
        psnr: of the pictures in decibels, of a peak of 255; infinite where they are equal.
        regressions: bounds that are passed, as sentences.
    """

    latency: float
    memory: float | None
    psnr: float
    regressions: tuple[str, ...]


def compare(reference: Reference, expected: Tensor, measured: Measurement, bounds: Bounds) -> Compared:
    """Compare a measurement with a reference.

    Args:
        reference: what was measured before.
        expected: its pictures.
        measured: what was measured now.
        bounds: how much worse it may be.

    Raises:
        UnsupportedFileError: the pictures are of another size, or memory of another kind was measured.
    """
    if expected.shape != measured.pictures.shape or reference.peak_of != measured.peak_of:
        raise UnsupportedFileError(
            f"a reference of pictures {list(expected.shape)} and memory of the {reference.peak_of}",
            expected=f"{list(measured.pictures.shape)}, and the {measured.peak_of}",
            hint="measure and save the reference again",
        )
    latency = measured.median_seconds / reference.median_seconds
    memory = None
    if reference.peak_bytes and measured.peak_bytes is not None:
        memory = measured.peak_bytes / reference.peak_bytes
    psnr = pictures_psnr(measured.pictures, expected)
    return Compared(latency, memory, psnr, tuple(_passed(latency, memory, psnr, bounds)))


def pictures_psnr(pictures: Tensor, expected: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels between uint8 pictures of one shape, of a peak of 255."""
    error = (pictures.double() - expected.double()).square().mean().item()
    return 10 * math.log10(_BRIGHTEST**2 / error) if error else math.inf


def _passed(latency: float, memory: float | None, psnr: float, bounds: Bounds) -> list[str]:
    found = []
    if bounds.latency is not None and 100 * (latency - 1) > bounds.latency:
        found.append(f"latency grew by {100 * (latency - 1):.1f} %, more than {bounds.latency:g} %")
    if bounds.memory is not None and memory is None:
        found.append("the growth of the peak memory is not known")
    elif bounds.memory is not None and memory is not None and 100 * (memory - 1) > bounds.memory:
        found.append(f"peak memory grew by {100 * (memory - 1):.1f} %, more than {bounds.memory:g} %")
    if bounds.psnr is not None and psnr < bounds.psnr:
        found.append(f"the PSNR is {psnr:.1f} dB, less than {bounds.psnr:g} dB")
    return found
