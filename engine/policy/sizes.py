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

    @property
    def pixels(self) -> int:
        """Pixels of one picture or of one video, all frames together."""
        return self.width * self.height * self.frames


@dataclass(frozen=True, slots=True)
class AskedSize:
    """What somebody asks for; what is None, or not positive, is left to the picture to start from, then the pipeline.

    Attributes:
        width: in pixels.
        height: in pixels.
        frames: of a video.
        picture: width and height of a picture to start from.
    """

    width: int | None = None
    height: int | None = None
    frames: int | None = None
    picture: tuple[int, int] | None = None

    def of(self, own: ImageSize, multiple: int | None) -> ImageSize:
        """What is drawn. A plan and a generation both ask here, so that the one counts what the other draws.

        Args:
            own: what the pipeline draws by itself.
            multiple: pixels of which the family's widths and heights are multiples; the picture is rounded down to it.
        """
        width, height = self.picture or (None, None)
        return ImageSize(
            _positive(self.width) or _rounded(width, multiple or 1) or own.width,
            _positive(self.height) or _rounded(height, multiple or 1) or own.height,
            _positive(self.frames) or own.frames,
            own.batch,
        )


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


def _rounded(pixels: int | None, multiple: int) -> int | None:
    return None if pixels is None else max(pixels // multiple, 1) * multiple


def tokens(size: ImageSize, sampling: Sampling) -> int:
    """Tokens of the pictures, over the batch, without what guidance adds: what a denoiser's activations grow with."""
    multiple = sampling.size_multiple or _MULTIPLE
    frames = 1 + (size.frames - 1) // (sampling.latent_frames or 1)
    across, down = -(-size.width // multiple), -(-size.height // multiple)
    return across * down * frames * size.batch
