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
"""Pixels for each latent, where a VAE does not say."""


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
    return max((int(getattr(vae, name)) for name in names if getattr(vae, name, None)), default=0)


def can_slice(vae: Any) -> bool:
    """Whether a VAE takes the pictures of a batch one after another."""
    return hasattr(vae, "use_slicing")


def set_tile_side_(vae: Any, side: int) -> int:
    """Give a VAE tiles of so many pixels, rounded down to whole latents; the overlap keeps its share.

    Returns:
        The pixels along each side that they have then; 0 where the VAE can't tile.
    """
    if not tile_side(vae):
        return 0
    if hasattr(vae, "tile_sample_min_size"):
        ratio = round(vae.tile_sample_min_size / vae.tile_latent_min_size)
        vae.tile_latent_min_size = max(side // ratio, 1)
        vae.tile_sample_min_size = vae.tile_latent_min_size * ratio
        return int(vae.tile_sample_min_size)
    ratio = int(getattr(vae, "spatial_compression_ratio", _RATIO))
    whole = max(side // ratio, 1) * ratio
    for across in ("height", "width"):
        share = getattr(vae, f"tile_sample_stride_{across}") / getattr(vae, f"tile_sample_min_{across}")
        setattr(vae, f"tile_sample_min_{across}", whole)
        setattr(vae, f"tile_sample_stride_{across}", max(int(whole * share) // ratio, 1) * ratio)
    return whole
