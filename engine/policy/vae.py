"""How a VAE encodes and decodes: at once, one picture at a time, or in tiles; what each takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slipcast.engine.policy.sizes import ImageSize

Choice = Literal["auto", "on", "off"]

_RESULT_BYTES = 4 * 3 * 3
"""For each pixel of the whole picture while tiles are put together: three channels in float32, of the picture, of the
rows that make it, and of the tile that joins them."""


@dataclass(frozen=True, slots=True)
class VaeWay:
    """One way to run a VAE.

    Attributes:
        tiling: in overlapping tiles, which differs near their seams from the whole.
        slicing: one picture of a batch after another, which is exact.
        activation_bytes: the peak of its activations.
    """

    tiling: bool
    slicing: bool
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class VaeCosts:
    """What a VAE takes.

    Attributes:
        bytes_per_pixel: peak of activations for each pixel that it works on at a time.
        tile_side: pixels of a tile along each side; 0 where the VAE can't tile.
    """

    bytes_per_pixel: float
    tile_side: int


def vae_ways(costs: VaeCosts, size: ImageSize, tiling: Choice, slicing: Choice) -> tuple[VaeWay, ...]:
    """The ways that the settings allow, the one that changes least first.

    Args:
        costs: of encoding or of decoding.
        size: what is encoded or decoded.
        tiling: the setting ``vae.tiling``.
        slicing: the setting ``vae.slicing``.
    """
    return tuple(_ways(costs, size, tiling, slicing))


def _ways(costs: VaeCosts, size: ImageSize, tiling: Choice, slicing: Choice) -> Iterator[VaeWay]:
    smaller = 0 < costs.tile_side < max(size.width, size.height)
    may_slice = {"auto": (False, True) if size.batch > 1 else (False,), "on": (True,), "off": (False,)}[slicing]
    may_tile = {"auto": (False, True) if smaller else (False,), "on": (costs.tile_side > 0,), "off": (False,)}[tiling]
    for tiled in may_tile:
        for sliced in may_slice:
            yield VaeWay(tiled, sliced, _activations(costs, size, tiled, sliced))


def _activations(costs: VaeCosts, size: ImageSize, tiled: bool, sliced: bool) -> int:
    batch = 1 if sliced else size.batch
    if not tiled:
        return round(costs.bytes_per_pixel * size.pixels * batch)
    tile = min(costs.tile_side, size.width) * min(costs.tile_side, size.height) * size.frames
    return round((costs.bytes_per_pixel * tile + _RESULT_BYTES * size.pixels) * batch)
