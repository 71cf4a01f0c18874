"""What latents a VAE makes, and what its layers take meanwhile: of one that encodes and decodes on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipcast.engine.build import build_on_meta
from slipcast.engine.check.records import Records
from slipcast.engine.check.subject import identify_alone
from slipcast.registry.catalogue import Catalogue
from slipcast.registry.companions import is_class
from slipcast.registry.errors import SlipcastError
from slipcast.registry.family import Family
from slipcast.registry.identify import Match

_SIDE, _FRAMES = 256, (25, 17)
_KEPT_BYTES = 2
_SHAPES = [
    (channels, *middle, _SIDE, _SIDE)
    for channels in (3, 4)
    for middle in (*((frames,) for frames in _FRAMES), (), (1,))
]


@dataclass(frozen=True)
class VaeShapes:
    """What a VAE makes of a picture or a video.

    Attributes:
        channels: of its latents.
        scale: pixels for each latent, along a side.
        frames: frames for each frame of latents, after the first; 1 of a VAE of pictures.
        frames_at_once: the most frames that its encoder takes at a time.
        encoding: bytes, in 16 bits, that its widest layer takes and gives for each pixel as it encodes.
        decoding: the same as it decodes.
    """

    channels: int
    scale: int
    frames: int
    frames_at_once: int
    encoding: float
    decoding: float


def vae_of(companion: str, catalogue: Catalogue, records: Records | None) -> tuple[VaeShapes | None, bool]:
    """What a companion's latents are, and whether a recorded header shows it: else its class's defaults do."""
    if is_class(companion):
        return _measured(companion, {}), False
    id_, _, variant = companion.partition("/")
    match = recorded_match(catalogue[id_], variant or None, records) if id_ in catalogue else None
    return (None, False) if match is None else (shapes_of_match(match), True)


def recorded_match(family: Family, variant: str | None, records: Records | None) -> Match | None:
    """A recorded header of a family, as one of it; of the variant, where one is asked for."""
    for example in family.examples if records is not None else ():
        if variant in (None, example.expect.variant):
            try:
                assert records is not None
                return identify_alone(family, records.header(example.header))
            except SlipcastError:
                continue
    return None


def shapes_of_match(match: Match) -> VaeShapes | None:
    """What a recognised VAE makes; None where it does not encode on the meta device."""
    return _measured(match.model, dict(match.config))


_KNOWN: dict[str, VaeShapes | None] = {}


def _measured(model: str, config: Mapping[str, Any]) -> VaeShapes | None:
    key = f"{model} {sorted(config.items())}"
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _encode(build_on_meta(model, config).to("meta"))
        except SlipcastError:
            _KNOWN[key] = None
    return _KNOWN[key]


def _encode(vae: Any) -> VaeShapes | None:
    for shape in _SHAPES:
        try:
            with torch.no_grad(), torch.device("meta"), _watched(vae) as widest, _frames(vae) as frames:
                latents = _latents(vae.encode(torch.empty(1, *shape)))
                pixels = _SIDE * _SIDE * max(frames, default=1)
                encoding = max(widest, default=0) / pixels
                widest.clear()
                vae.decode(latents)
        except Exception:
            continue
        made = latents.shape[2] if latents.ndim == 5 else 1
        of = shape[1] if len(shape) == 4 else 1
        each = (of - 1) // (made - 1) if made > 1 else 1
        decoding = max(widest, default=0) / (_SIDE * _SIDE * max(frames, default=1))
        return VaeShapes(latents.shape[1], _SIDE // latents.shape[-1], each, max(frames, default=1), encoding, decoding)
    return None


def _latents(given: Any) -> torch.Tensor:
    distribution = getattr(given, "latent_dist", None)
    found: torch.Tensor = distribution.mode() if distribution is not None else given[0]
    return found


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[int]]:
    """The elements, as 16 bits, that each layer without parts takes and gives."""
    seen: list[int] = []

    def look(_module: nn.Module, taken: Any, given: Any) -> None:
        tensors = [value for value in (*taken, given) if isinstance(value, torch.Tensor)]
        seen.append(sum(tensor.numel() for tensor in tensors) * _KEPT_BYTES)

    handles = [module.register_forward_hook(look) for module in model.modules() if not any(module.children())]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _frames(vae: Any) -> Iterator[list[int]]:
    """The frames that the encoder is given, call by call."""
    seen: list[int] = []

    def look(_module: nn.Module, taken: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        for value in (*taken, *named.values()):
            if isinstance(value, torch.Tensor) and value.ndim == 5:
                seen.append(value.shape[2])

    handle = vae.encoder.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
