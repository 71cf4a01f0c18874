"""What the weights of a pipeline's text encoders are kept in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from slipcast.engine.plan import Decision, Plan
from slipcast.registry.settings_model import Fp8Settings

Requested = Literal["auto", "bf16", "fp8", "nvfp4"]

_CHANGES: Mapping[Requested, Mapping[str, str]] = {
    "auto": {"mode": "auto", "remainder": "keep"},
    "bf16": {"mode": "off", "remainder": "keep"},
    "fp8": {"mode": "storage", "weights": "float8", "remainder": "quantise"},
    "nvfp4": {"mode": "storage", "weights": "nvfp4", "remainder": "quantise"},
}


def encoder_fp8(requested: Requested, fp8: Fp8Settings) -> Fp8Settings:
    """The settings ``fp8`` that a text encoder is planned with.

    Which layers stay as they are, its family says: embeddings and norms do. What the device can't do, its plan says.

    Args:
        requested: the setting ``text_encoder``.
        fp8: those of the call.
    """
    return fp8.model_copy(update=dict(_CHANGES[requested]))


def decide_text_encoder(requested: Requested, encoders: Mapping[str, Plan | None]) -> Decision:
    """What became of the setting.

    Args:
        requested: the setting ``text_encoder``.
        encoders: role -> plan; None of one that its own library loads.
    """
    kinds = dict.fromkeys(kind for plan in encoders.values() for kind in _kinds(plan))
    engaged = " and ".join(kinds) or "none"
    reason = "; ".join(_reason(requested, role, plan) for role, plan in encoders.items()) or "the pipeline has none"
    return Decision(requested=requested, engaged=engaged, reason=reason)


def _kinds(plan: Plan | None) -> Iterator[str]:
    """The precisions of quantised layers; of a model without any its compute dtype."""
    if plan is None:
        yield "as its library loads it"
        return
    found = dict.fromkeys(module.precision for module in plan.modules if module.codec is not None)
    yield from found or (plan.compute_dtype,)


def _reason(requested: Requested, role: str, plan: Plan | None) -> str:
    if plan is None:
        return f"{role}: no family describes it, so that its own library loads it"
    layers = sum(module.codec is not None for module in plan.modules)
    decision = plan.settings["fp8"]
    if not layers:
        return f"{role}: {decision.reason}" if requested in ("fp8", "nvfp4") else f"{role}: in {plan.compute_dtype}"
    return f"{role}: {layers} layers; {decision.reason}"
