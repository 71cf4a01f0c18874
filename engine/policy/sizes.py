"""The size of what is drawn, and how many tokens and pixels that is to a denoiser and a VAE."""

from __future__ import annotations

from dataclasses import dataclass

from slipcast.registry.runtime import Sampling

DEFAULT_SIDE = 1024
_MULTIPLE = 16
"""Pixels that one token covers along each side, where the family does not say."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What is drawn.

    Attributes:
        width: in pixels.
        height: in pixels.
        frames: of a video; 1 of a picture.
        batch: how many at a time.
    """

    width: int = DEFAULT_SIDE
    height: int = DEFAULT_SIDE
    frames: int = 1
    batch: int = 1

    @classmethod
    def of(
        cls, width: int | None, height: int | None, frames: int | None = None, batch: int | None = None
    ) -> ImageSize:
        """The size of a request. What is not given, or not positive, is the default."""

        def given(value: int | None, default: int) -> int:
            return value if value is not None and value > 0 else default

        return cls(given(width, DEFAULT_SIDE), given(height, DEFAULT_SIDE), given(frames, 1), given(batch, 1))

    @property
    def pixels(self) -> int:
        """Pixels of one picture or of one video, all frames together."""
        return self.width * self.height * self.frames


def tokens(size: ImageSize, sampling: Sampling) -> int:
    """Tokens of the pictures, over the batch, without what guidance adds: what a denoiser's activations grow with."""
    multiple = sampling.size_multiple or _MULTIPLE
    frames = 1 + (size.frames - 1) // (sampling.latent_frames or 1)
    across, down = -(-size.width // multiple), -(-size.height // multiple)
    return across * down * frames * size.batch
