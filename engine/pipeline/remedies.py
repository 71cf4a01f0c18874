"""What would make a pipeline fit that does not: every setting that does by itself, else the least that do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipcast.engine.policy.memory import MemoryDecision
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.errors import DeviceError
from slipcast.registry.settings import Settings
from slipcast.registry.settings_layers import read_defaults

Decide = Callable[[Settings, ImageSize], MemoryDecision]
"""The plan's own decision on the memory with other settings or of another size; raises DeviceError where it refuses."""

_TILE_SIDES = (512, 256, 128, 64)
_SIZE_PARTS = 32
"""A smaller picture is looked for in so many steps."""
_RESERVE = "device_reserve_mib"
_NVFP4 = {"fp8": "storage", "fp8.weights": "nvfp4"}
_SINGLE: tuple[Mapping[str, Any], ...] = (
    {"memory": "auto"},
    {"memory": "balanced"},
    {"memory": "low"},
    {"vae.slicing": "auto"},
    {"vae.tiling": "auto"},
    *({"vae.tile_size": side} for side in _TILE_SIDES),
    {"text_encoder": "fp8"},
    {"fp8": "storage"},
    {"text_encoder": "nvfp4"},
    _NVFP4,
)
"""What makes a pipeline lighter, what changes the picture least first."""
_FREE = {"memory": "auto", "vae.slicing": "auto", "vae.tiling": "auto"}
_TOGETHER: tuple[Mapping[str, Any], ...] = (
    _FREE,
    {**_FREE, "text_encoder": "fp8"},
    {**_FREE, "fp8": "storage"},
    {**_FREE, "text_encoder": "fp8", "fp8": "storage"},
    {**_FREE, "text_encoder": "nvfp4", "fp8": "storage"},
    {**_FREE, "text_encoder": "nvfp4", **_NVFP4},
)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a pipeline fits.

    Attributes:
        given: setting -> value.
        size: what is drawn then.
        peak_bytes: the predicted peak.
    """

    given: Mapping[str, Any]
    size: ImageSize
    peak_bytes: int


def with_remedies(
    refusal: DeviceError,
    settings: Settings,
    size: ImageSize,
    multiple: int | None,
    decide: Decide,
    *,
    loaded: bool = False,
) -> DeviceError:
    """A refusal that names what would make the pipeline fit, best first, with the peak of each.

    Args:
        refusal: what was said of these settings.
        settings: those that do not fit.
        size: what does not fit.
        multiple: pixels of which the family's widths and heights are multiples.
        decide: what refused, with other settings or of another size.
        loaded: whether the pipeline is there. It may be that it only has to be loaded anew for that size.
    """
    again = _tried(settings, {}, size, decide) if loaded else None
    found = (*([again] if again is not None else []), *find_remedies(settings, size, multiple, decide))
    hint = "; or ".join(_shown(remedy, size) for remedy in found) or _NOTHING
    return DeviceError(refusal.found, expected=refusal.expected, hint=hint, path=refusal.path, items=refusal.items)


_NOTHING = "no setting and no smaller size makes it fit: take a smaller model, or a device with more memory"


def find_remedies(settings: Settings, size: ImageSize, multiple: int | None, decide: Decide) -> tuple[Remedy, ...]:
    """Every setting that makes a pipeline fit by itself, and the largest size that does.

    Where nothing does by itself: the first of some settings that do together, with a smaller size where it needs that.
    """
    usual = _usual_reserve(settings)
    found = [
        remedy
        for given in (*([usual] if usual else []), *_SINGLE)
        if (remedy := _tried(settings, given, size, decide)) is not None
    ]
    sides = [remedy for remedy in found if "vae.tile_size" in remedy.given]
    found = [remedy for remedy in found if remedy not in sides[1:]]  # the largest tiles that fit
    smaller = _smaller(settings, {}, size, multiple, decide)
    if found or smaller is not None:
        return (*found, *([smaller] if smaller is not None else []))
    together = [{**usual, **given} for given in _TOGETHER]
    for given in together:
        if (remedy := _tried(settings, given, size, decide)) is not None:
            return (remedy,)
    last = _smaller(settings, together[-1], size, multiple, decide)
    return () if last is None else (last,)


def _usual_reserve(settings: Settings) -> dict[str, Any]:
    """The memory that is left alone by default, where more of it is: less would only hide that it is short."""
    usual = read_defaults().values[_RESERVE]
    return {_RESERVE: usual} if settings.device_reserve_mib > usual else {}


def changed(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Settings with some of them given otherwise, by their dotted names; a bare ``fp8`` is its mode."""
    fp8, vae = {}, {}
    own = {}
    for name, value in given.items():
        section, _, key = name.partition(".")
        if section == "fp8":
            fp8[key or "mode"] = value
        elif section == "vae":
            vae[key] = value
        else:
            own[name] = value
    return settings.model_copy(
        update={**own, "fp8": settings.fp8.model_copy(update=fp8), "vae": settings.vae.model_copy(update=vae)}
    )


def _tried(settings: Settings, given: Mapping[str, Any], size: ImageSize, decide: Decide) -> Remedy | None:
    """What settings do that change something; None where they change nothing, or do not fit."""
    needed = _needed(settings, given)
    if (given and not needed) or not _smaller_tiles(settings, needed):
        return None
    try:
        return Remedy(needed, size, decide(changed(settings, needed), size).peak_bytes)
    except DeviceError:
        return None


def _needed(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that change something."""
    return {name: value for name, value in given.items() if changed(settings, {name: value}) != settings}


def _smaller_tiles(settings: Settings, given: Mapping[str, Any]) -> bool:
    side = given.get("vae.tile_size")
    return side is None or (
        settings.vae.tiling != "off" and (not settings.vae.tile_size or side < settings.vae.tile_size)
    )


def _smaller(
    settings: Settings, given: Mapping[str, Any], size: ImageSize, multiple: int | None, decide: Decide
) -> Remedy | None:
    """The largest smaller size that fits: memory grows with the size, so that halving finds it."""
    sizes = list(dict.fromkeys(_sizes(size, multiple or 1)))
    asked = changed(settings, given)
    best: Remedy | None = None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        try:
            peak = decide(asked, sizes[middle]).peak_bytes
        except DeviceError:
            low = middle + 1
        else:
            best, high = Remedy(_needed(settings, given), sizes[middle], peak), middle
    return best


def _sizes(size: ImageSize, multiple: int) -> Iterator[ImageSize]:
    """Smaller ones of the same shape, from the largest on: in even steps, and below the last of these by halves."""
    longest = max(size.width, size.height)
    halves = (2**power * _SIZE_PARTS for power in range(1, longest.bit_length()))
    shares = [(part, _SIZE_PARTS) for part in range(_SIZE_PARTS - 1, 0, -1)] + [(1, half) for half in halves]
    for part, whole in shares:
        width, height = (max(side * part // whole // multiple, 1) * multiple for side in (size.width, size.height))
        if (width, height) != (size.width, size.height) and width <= size.width and height <= size.height:
            yield replace(size, width=width, height=height)


def _shown(remedy: Remedy, size: ImageSize) -> str:
    settings = " ".join(f"{name}={value}" for name, value in remedy.given.items())
    what = [f"set {settings}"] if settings else []
    if not settings and remedy.size == size:
        what = ["load the pipeline again for this size"]
    if remedy.size != size:
        what.append(f"ask for {remedy.size.width} x {remedy.size.height} pixels")
    return f"{' and '.join(what)}, which takes {remedy.peak_bytes / 2**20:,.0f} MiB"
