"""The settings that each part of a pipeline is planned with."""

from __future__ import annotations

from slipcast.engine.plan import Plan
from slipcast.registry.companions import Companion
from slipcast.registry.settings import Settings


def denoiser_settings(settings: Settings, part: Companion) -> Settings:
    """The settings of a denoiser: those of the call, but of this one model.

    Args:
        settings: those of the call.
        part: a denoiser.
    """
    return settings.model_copy(update={"family": None, "component": part.component})


def companion_settings(settings: Settings, part: Companion, denoiser: Plan) -> Settings:
    """The settings of any other model: it computes as the denoiser does, and stays as quantised as its file has it.

    A pipeline hands tensors from one part to the next, so that one dtype serves them all. As it runs once for a
    picture, it is not compiled.

    Args:
        settings: those of the call.
        part: the model.
        denoiser: the denoiser's plan.
    """
    own = settings.fp8.model_copy(update={"mode": "auto", "remainder": "keep"})
    changes = {
        "family": None,
        "component": part.component,
        "dtype": denoiser.compute_dtype,
        "fp8": own,
        "compile": "off",
    }
    return settings.model_copy(update=changes)
