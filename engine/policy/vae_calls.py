"""Encodes and decodes each in its own way: diffusers has one switch for both, so it is set around each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from slipcast.engine.policy.vae import VaeWay
from slipcast.engine.policy.visiting import Visitor

Call = Literal["encode", "decode"]
CALLS: tuple[Call, ...] = ("encode", "decode")
_SWITCHES = ("use_tiling", "use_slicing")
_RATIO = 8
"""Pixels along a side for each latent, where a VAE does not say."""
_QUARTERED = 4
"""Latents of which a tile must be a multiple, so that a quarter of it is whole."""
_WHOLE = 8
"""Latents of which a tile that is asked for is a multiple: steps are then even, and leave no tile of one latent, which
small models can't normalise."""


class VaeCalls:
    """How a VAE's calls run; installed on the VAE itself.

    Attributes:
        ways: call -> how it runs; what is None, or switched on by somebody else, stays as it is.
    """

    def __init__(self, vae: nn.Module, ways: dict[Call, VaeWay | None], visitor: Visitor | None) -> None:
        self.ways = ways
        self._vae: Any = vae
        self._visitor = visitor
        for name in CALLS:
            setattr(vae, name, self._around(name, getattr(vae, name)))

    def _around(self, name: Call, plain: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._switched(self.ways[name]):
                return plain(*arguments, **options)

        return call

    @contextmanager
    def _switched(self, way: VaeWay | None) -> Iterator[None]:
        before = {name: getattr(self._vae, name, None) for name in _SWITCHES}
        wanted = {} if way is None else {"use_tiling": way.tiling, "use_slicing": way.slicing}
        with ExitStack() as stack:
            if self._visitor is not None:
                stack.enter_context(self._visitor.visit(self._vae))
            try:
                for name, on in wanted.items():
                    if before[name] is not None:
                        setattr(self._vae, name, on or before[name])
                yield
            finally:
                for name, value in before.items():
                    if value is not None:
                        setattr(self._vae, name, value)


def tile_side(vae: Any) -> int:
    """Pixels of a VAE's tile along its longer side; 0 of one that can't tile."""
    if not hasattr(vae, "use_tiling"):
        return 0
    names = ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width")
    return max((_pixels(getattr(vae, name, None)) for name in names), default=0)


def _pixels(side: Any) -> int:
    """A side, of which some configurations give one for each direction."""
    return max((int(part) for part in (side if isinstance(side, (list, tuple)) else [side or 0])), default=0)


def can_slice(vae: Any) -> bool:
    """Whether a VAE takes the pictures of a batch one after another."""
    return hasattr(vae, "use_slicing")


def set_tile_side_(vae: Any, side: int) -> int:
    """Give a VAE tiles of so many pixels, rounded down to what works; the overlap keeps its share.

    diffusers cuts the steps from tile to tile, and what it blends, to whole latents and whole pixels each by itself:
    only where a quarter of a tile, which tiles overlap by, is whole do they agree, and has the result its right size.

    Args:
        vae: what is changed.
        side: pixels along each side; 0: as it has them, and changed only if diffusers could not work so.

    Returns:
        The pixels along each side that they have then, at least 8 latents; 0 where the VAE can't tile.
    """
    own = tile_side(vae)
    if not own:
        return 0
    if hasattr(vae, "tile_sample_min_size"):
        ratio = _pixels_per_latent(vae)
        if side or own != vae.tile_sample_min_size or own % (_QUARTERED * ratio):
            vae.tile_sample_min_size = _working_side(side or own, ratio)
            vae.tile_latent_min_size = vae.tile_sample_min_size // ratio
        return int(vae.tile_sample_min_size)
    if not side:
        return own
    ratio = _pixels_per_latent(vae)
    whole = _working_side(side, ratio)
    for across in ("height", "width"):
        if hasattr(vae, f"tile_sample_stride_{across}"):
            share = getattr(vae, f"tile_sample_stride_{across}") / getattr(vae, f"tile_sample_min_{across}")
            setattr(vae, f"tile_sample_stride_{across}", int(whole * share) // ratio * ratio)
        if hasattr(vae, f"tile_latent_min_{across}"):
            setattr(vae, f"tile_latent_min_{across}", whole // ratio)
        setattr(vae, f"tile_sample_min_{across}", whole)
    return whole


def _pixels_per_latent(vae: Any) -> int:
    if hasattr(vae, "tile_sample_min_size") and "block_out_channels" in vae.config:
        stated = vae.config.get("spatial_compression_ratio")
        return int(stated or 2 ** (len(vae.config.block_out_channels) - 1))
    return int(getattr(vae, "spatial_compression_ratio", _RATIO))


def _working_side(side: int, ratio: int) -> int:
    return max(side // (_WHOLE * ratio), 1) * _WHOLE * ratio
