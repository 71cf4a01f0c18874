"""How a VAE encodes and decodes: at once, one picture at a time, or in tiles; what each takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slipcast.engine.policy.sizes import ImageSize

Choice = Literal["auto", "on", "off"]

_RESULT_BYTES = 4 * 3 * 4
"""For each pixel of all pictures while tiles or slices are joined: three channels in float32, of the whole, of the
rows that make it, and nearly twice of the tiles, as they overlap."""


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
        frames_at_once: how many frames of a video it works on at a time; 0 where it takes all.
    """

    bytes_per_pixel: float
    tile_side: int
    frames_at_once: int = 0


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
    frames = min(size.frames, costs.frames_at_once or size.frames)
    side = costs.tile_side if tiled else max(size.width, size.height)
    at_once = min(side, size.width) * min(side, size.height) * frames * (1 if sliced else size.batch)
    joined = size.pixels * size.batch if tiled or sliced or frames < size.frames else 0
    return round(costs.bytes_per_pixel * at_once + _RESULT_BYTES * joined)
