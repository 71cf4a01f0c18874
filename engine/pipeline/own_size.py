"""What a pipeline draws where nobody says: its class's own width, height and frames. Loads and builds no model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from slipcast.engine.pipeline.classes import is_modular, own_arguments
from slipcast.engine.policy.sizes import DEFAULT_SIDE, ImageSize

_PIXELS_PER_LATENT = 8


def own_size(kind: Any, config: Mapping[str, Any]) -> ImageSize:
    """The size that diffusers' pipeline takes by itself.

    It is the default of the call; else so many latents as the denoiser's configuration says, or as the class has as its
    ``default_sample_size``. Where neither says it, the call has it inside: 1024 pixels of all known classes.

    Args:
        kind: the pipeline's class.
        config: the denoiser's arguments.
    """
    call = {} if is_modular(kind) else inspect.signature(kind.__call__).parameters
    defaults = {name: call[name].default for name in ("width", "height", "num_frames") if name in call}
    empty = None if all(isinstance(defaults.get(name), int) for name in ("width", "height")) else _empty(kind)
    down, across = _sides(config.get("sample_size"))

    def side(name: str, latents: int | None) -> int:
        own = getattr(empty, f"default_{name}", None)
        latents = latents or getattr(empty, "default_sample_size", None)
        scale = getattr(empty, "vae_scale_factor", _PIXELS_PER_LATENT)
        for pixels in (defaults.get(name), latents and latents * scale, own):
            if isinstance(pixels, int) and pixels > 0:
                return pixels
        return DEFAULT_SIDE

    frames = defaults.get("num_frames")
    return ImageSize(side("width", across), side("height", down), frames if isinstance(frames, int) else 1)


def _sides(sample_size: Any) -> tuple[int | None, int | None]:
    """Latents down and across; some configurations give one number for both."""
    if isinstance(sample_size, int):
        return sample_size, sample_size
    if isinstance(sample_size, list | tuple) and len(sample_size) == 2:
        return sample_size[0], sample_size[1]
    return None, None


def _empty(kind: Any) -> Any:
    """A pipeline without parts, for what its constructor sets; None of a class that can't be made without them."""
    try:
        if is_modular(kind):
            return kind()
        needed = (name for name, argument in own_arguments(kind).items() if argument.default is argument.empty)
        return kind(**dict.fromkeys(needed))
    except Exception:  # a constructor may look into its parts
        return None
