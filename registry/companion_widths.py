"""Whether what a pipeline's parts hand on is as wide as what its denoiser takes, as headers show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError
from slipcast.registry.identify import Match
from slipcast.registry.runtime import Sampling

_WIDTHS = {"text_encoder": ("hidden_size", "d_model"), "vae": ("latent_channels", "z_dim")}
"""What classes of a kind call the width of what they hand on."""
_OUTPUT = {"text_encoder": "hidden states {} wide", "vae": "latents of {} channels"}


def refuse_other_widths(denoiser: Match, parts: Iterable[Companion], sampling: Sampling) -> None:
    """Refuse parts whose output the denoiser can't take. What is not stated or not shown is not judged.

    Args:
        denoiser: the model that takes it.
        parts: of the pipeline.
        sampling: for which of the denoiser's arguments say what it takes.

    Raises:
        CompanionError: it names each such part, with both widths.
    """
    wrong = list(_wrong(denoiser.config, parts, sampling))
    if wrong:
        raise CompanionError(
            "; ".join(f"the {part.role}, {_title(part)}, gives {_said(part, given)}" for part, given, _ in wrong),
            expected="; ".join(f"{_said(part, taken)}, which the denoiser takes" for part, _, taken in wrong),
            hint="give the denoiser's own by "
            + ", ".join(f"the setting companions.{part.role}" for part, _, _ in wrong),
            path=denoiser.header.path,
            roles=tuple(part.role for part, _, _ in wrong),
        )


def _wrong(
    config: Mapping[str, Any], parts: Iterable[Companion], sampling: Sampling
) -> Iterator[tuple[Companion, int, int]]:
    """Each part that does not suit, what it gives, and what is taken."""
    for part in parts:
        taken = config.get(sampling.takes.get(part.role, ""))
        given = output_width(part.match) if part.match is not None else None
        if isinstance(taken, int) and given is not None and given != taken:
            yield part, given, taken


def output_width(match: Match) -> int | None:
    """How wide a text encoder's hidden states are, or a VAE's latents; None where its arguments do not say it."""
    config = match.config
    inner = config.get("text_config")
    for name in _WIDTHS.get(match.family.kind, ()):
        value = config.get(name) or (inner.get(name) if isinstance(inner, Mapping) else None)
        if isinstance(value, int):
            return value
    return None


def _said(part: Companion, width: int) -> str:
    assert part.match is not None
    return _OUTPUT[part.match.family.kind].format(width)


def _title(part: Companion) -> str:
    return part.match.family.title if part.match is not None else part.class_name
