"""The settings that each part of a pipeline is planned with."""

from __future__ import annotations

from slipcast.engine.devices import resolve_device
from slipcast.engine.plan import Plan
from slipcast.engine.policy.speed import compile_request
from slipcast.engine.policy.text_encoder import encoder_fp8
from slipcast.registry.companions import Companion
from slipcast.registry.settings import Settings


def denoiser_settings(settings: Settings, part: Companion) -> Settings:
    """The settings of a denoiser: those of the call, but of this one model.

    Args:
        settings: those of the call.
        part: a denoiser.
    """
    compile_ = compile_request(settings.speed, settings.compile, resolve_device(settings.device)[0])
    return settings.model_copy(update={"family": None, "component": part.component, "compile": compile_})


def companion_settings(settings: Settings, part: Companion, denoiser: Plan) -> Settings:
    """The settings of any other model: it computes as the denoiser does, and stays as quantised as its file has it.

    Of a text encoder the setting ``text_encoder`` says otherwise. A pipeline hands tensors from one part to the next,
    so that one dtype serves them all. As it runs once for a picture, it is not compiled.

    Args:
        settings: those of the call.
        part: the model.
        denoiser: the denoiser's plan.
    """
    own = encoder_fp8(settings.text_encoder if part.role.startswith("text_encoder") else "auto", settings.fp8)
    changes = {
        "family": None,
        "component": part.component,
        "dtype": denoiser.compute_dtype,
        "fp8": own,
        "compile": "off",
    }
    return settings.model_copy(update=changes)
