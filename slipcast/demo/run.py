"""The comparison that the demonstration makes: one checkpoint loaded twice, unquantised and in fp8 storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipcast import api
from slipcast.demo.recognise import DIGITS, count_recognised, train_recogniser
from slipcast.demo.sampling import STEPS, load_captions, sample
from slipcast.registry.errors import SettingsError, SlipcastError

if TYPE_CHECKING:
    from sklearn.svm import SVC

    from slipcast.engine.plan import Plan
    from slipcast.engine.report import Report
    from slipcast.registry.inspection import Inspection

CHECKPOINT = Path(__file__).with_name("digits.safetensors")
CAPTIONS_FILE = Path(__file__).with_name("captions.safetensors")
SAMPLES = 200

_RANGE = 2.0
"""Of an image's values, from -1 to 1."""
_ENOUGH = 0.95
_APART = 1
_EXTRAS = {"sklearn": "scikit-learn", "PIL": "pillow", "transformers": "transformers"}


@dataclass(frozen=True)
class Drawn:
    """What one way of storing the weights came to.

    Attributes:
        storage: the dtype of the weights, for people.
        plan: made before the load.
        report: of the load.
        images: ``[samples, 1, 16, 16]``, float32 in [-1, 1], on the CPU.
        recognised: how many of them show the digit that they should.
        seconds: that sampling took.
    """

    storage: str
    plan: Plan = field(repr=False)
    report: Report = field(repr=False)
    images: Tensor = field(repr=False)
    recognised: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "storage": self.storage,
            "compute_dtype": self.plan.compute_dtype,
            "settings": {name: decision.model_dump() for name, decision in self.plan.settings.items()},
            "predicted_bytes": self.plan.bytes.resident,
            "resident_bytes": self.report.resident,
            "recognised": self.recognised,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Comparison:
    """What the demonstration found.

    Attributes:
        inspection: of the checkpoint.
        digits: what was drawn.
        seed: of the noise, the same for both.
        steps: from noise to image.
        unquantised: with the weights in the compute dtype.
        fp8: with the weights in fp8 storage.
    """

    inspection: Inspection
    digits: tuple[int, ...]
    seed: int
    steps: int
    unquantised: Drawn
    fp8: Drawn

    @property
    def relative_l2(self) -> float:
        """Norm of the difference between both sets of images, over the norm of the unquantised model's."""
        return (self._difference.norm() / self.unquantised.images.norm()).item()

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio between both in decibels, of a peak of 2; infinite if they are equal."""
        return (10 * torch.log10(_RANGE**2 / self._difference.square().mean())).item()

    @property
    def _difference(self) -> Tensor:
        return self.fp8.images - self.unquantised.images

    @property
    def problems(self) -> tuple[str, ...]:
        """What did not come out as it should, as sentences; empty where all did."""
        found = [f"{drawn.storage}: {line}" for drawn in self.both for line in drawn.report.differences]
        samples, recognised = len(self.digits), self.unquantised.recognised
        if recognised < _ENOUGH * samples:
            found.append(f"{recognised} of the unquantised model's {samples} digits are recognised, not {_ENOUGH:.0%}")
        apart = abs(self.fp8.recognised - recognised)
        if apart > _APART:
            found.append(f"fp8 storage changes by {apart} how many of {samples} digits are recognised")
        return tuple(found)

    @property
    def both(self) -> tuple[Drawn, Drawn]:
        """The unquantised model, then fp8 storage."""
        return self.unquantised, self.fp8

    def to_dict(self) -> dict[str, Any]:
        """The contract of ``slipcast demo --json``, less the picture's path."""
        return {
            "checkpoint": self.inspection.to_dict(),
            "device": self.unquantised.plan.device,
            "seed": self.seed,
            "steps": self.steps,
            "samples": len(self.digits),
            "unquantised": self.unquantised.to_dict(),
            "fp8": self.fp8.to_dict(),
            "relative_l2": self.relative_l2,
            "psnr_db": self.psnr if self.psnr < float("inf") else None,
            "problems": list(self.problems),
        }


def require_extras() -> None:
    """Refuse to begin where a package of the extra ``demo`` is missing.

    Raises:
        SlipcastError: one can't be imported.
    """
    missing = []
    for module, package in _EXTRAS.items():
        try:
            import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        raise SlipcastError(
            "the demonstration without " + " and ".join(missing),
            expected="the packages of the extra 'demo': " + ", ".join(_EXTRAS.values()),
            hint="install them with: python -m pip install 'slipcast[demo]'",
        )


def compare(
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    samples: int = SAMPLES,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Load the shipped checkpoint unquantised and in fp8 storage, and draw digits with both from the same noise.

    Args:
        settings: those of configs/defaults.yaml, by dotted names, but for ``fp8``, which is what is compared.
        seed: of the noise.
        samples: how many digits are drawn by each, 0 to 9 again and again.
        progress: called with the images drawn so far and in all.

    Raises:
        SettingsError: the settings choose fp8.
        SlipcastError: as ``slipcast.load`` does.
    """
    _refuse_fp8(settings)
    digits = tuple(index % DIGITS for index in range(samples))
    recogniser = train_recogniser()
    inspection = api.inspect(CHECKPOINT, **settings)

    def draw(fp8: str, before: int) -> Drawn:
        def shifted(done: int, total: int) -> None:
            if progress is not None:
                progress(before + done, 2 * total)

        return _draw({**settings, "fp8": fp8}, digits, seed, recogniser, shifted)

    return Comparison(inspection, digits, seed, STEPS, draw("off", 0), draw("storage", samples))


def _draw(
    settings: Mapping[str, Any],
    digits: Sequence[int],
    seed: int,
    recogniser: SVC,
    progress: Callable[[int, int], None],
) -> Drawn:
    plan = api.plan(CHECKPOINT, **settings)
    loaded = api.load(CHECKPOINT, **settings)
    began = perf_counter()
    images = sample(
        loaded.model,
        load_captions(CAPTIONS_FILE),
        digits,
        seed=seed,
        steps=STEPS,
        compute_dtype=api.compute_dtype(loaded.model),
        progress=progress,
    )
    seconds = perf_counter() - began
    storage = "fp8 storage" if plan.settings["fp8"].engaged == "storage" else plan.compute_dtype
    return Drawn(storage, plan, loaded.report, images, count_recognised(recogniser, images, digits), seconds)


def _refuse_fp8(settings: Collection[str]) -> None:
    chosen = [name for name in settings if name in ("fp8", "fp8.mode")]
    if chosen:
        raise SettingsError(
            f"the setting {chosen[0]}",
            expected="settings other than fp8: the demonstration compares fp8=off with fp8=storage",
            hint="leave it out; 'slipcast load' takes it",
            field=chosen[0],
        )
