"""Predicts the bytes of a load from its targets, and says whether the weights fit a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from slipcast.engine.chunks import chunk_bytes, multiplies, piece_rows, share, side_bytes, slab_bytes
from slipcast.engine.codecs.base import CODES
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.devices import Device
from slipcast.engine.file_codec import part_tensors
from slipcast.engine.plan import Bytes, Decision, Remedy, Target, Verdict
from slipcast.engine.policy.snapshot import reserve_of
from slipcast.engine.precision import family_obstacle
from slipcast.engine.prefetch import HOST_BYTES
from slipcast.engine.reading import Reading
from slipcast.engine.steps import spans, steps
from slipcast.engine.windows import left_out, most_under_way, windows
from slipcast.registry.family import Family
from slipcast.registry.identify import Match
from slipcast.registry.settings import Fp8Settings, Settings
from slipcast.registry.validation import counted

_MIB = 2**20
_LITTLE = 1024
"""MiB that activations of a picture of common size can exceed."""

_NUMBERS = 2**20
"""What looks for codes that are no numbers, and other results of a few bytes each."""
_PRODUCTS = 33 * 2**20
"""CUDA's workspace for products of matrices, of one thread: torch sets aside 32 MiB on Hopper, and less before."""


def predict_bytes(targets: Sequence[Target], match: Match, device: Device, reading: Reading) -> Bytes:
    """Bytes that a load will take.

    Resident is exact. The peaks count tensors: what the loader allocates for results, for chunks while they are cast,
    and, towards a GPU, for the windows that are under way. The interpreter's own objects come on top.
    """
    weights = match.everything.weights
    resident = sum(stored.nbytes for target in targets for stored in target.stored)
    kind = torch.device(device.kind)
    scratch = max((chunk_bytes(target, weights, reading.chunk_mib, kind) for target in targets), default=0)
    read = _read(targets, match)
    if device.kind == "cpu":
        mapped = sum(target.stored[0].nbytes for target in targets if target.mapped)
        slab = max((slab_bytes(target, weights, reading.chunk_mib) for target in targets), default=0)
        scratch *= reading.threads
        anonymous = resident - mapped + scratch + (0 if reading.mapped else reading.threads * slab)
        return Bytes(resident=resident, device_peak=resident + scratch, host_peak_anonymous=anonymous, read=read)
    on_its_way, here = _way_to_a_device(targets, match, reading)
    products = _PRODUCTS if any(map(multiplies, targets)) else 0
    computed = sum(stored.nbytes for target in targets if target.how == "computed" for stored in target.stored)
    return Bytes(
        resident=resident,
        device_peak=resident + on_its_way + scratch + products + _NUMBERS,
        host_peak_anonymous=here + computed,
        read=read,
    )


def _way_to_a_device(targets: Sequence[Target], match: Match, reading: Reading) -> tuple[int, int]:
    """Bytes of what is on its way, on the device and in page-locked memory."""
    weights = match.everything.weights
    taken = list(steps(targets, weights, reading.chunk_mib))
    cut = list(windows(taken, weights, reading.window_bytes, prefetch=reading.prefetch))
    sides = (side_bytes(target, weights) for target in targets)
    size = reading.window_bytes
    left = (span for step in taken for span in spans(step, weights))
    odd = (span.nbytes for span in left if left_out(span, weights, size, prefetch=reading.prefetch))
    alone = max((*sides, *odd), default=0)
    if reading.prefetch:
        return most_under_way(cut, reading.windows) + alone, HOST_BYTES + alone
    slabs = min(reading.windows, len(cut)) * max((window.nbytes for window in cut), default=0)
    return slabs + alone, slabs + alone


def _read(targets: Sequence[Target], match: Match) -> int:
    """Bytes of the file that are read: each piece's rows, and once the scale of each weight whose codes are taken."""
    total = 0
    scales: dict[str, int] = {}
    for target in targets:
        for piece in target.pieces:
            bundle = match.everything.weights[piece.source]
            total += share(bundle, piece, piece_rows(piece))
            if piece.codec is not None:
                tensors = part_tensors(bundle, codec_named(piece.codec))
                scales[bundle.name] = sum(tensor.nbytes for name, tensor in tensors.items() if name != CODES)
    return total + sum(scales.values())


def growth_notes(targets: Sequence[Target], match: Match, fp8: Decision) -> tuple[str, ...]:
    """A sentence on the weights in codes that are dequantised though nobody asked for it, and on their bytes."""
    decoded = [target for target in targets if target.how == "decode"]
    if fp8.requested == "off" or not decoded:
        return ()
    weights = match.everything.weights
    taken = sum(share(weights[piece.source], piece, piece_rows(piece)) for each in decoded for piece in each.pieces)
    more = sum(stored.nbytes for target in decoded for stored in target.stored) - taken
    sources = {piece.source for target in decoded for piece in target.pieces}
    what = counted(len(sources), "tensor")
    return (
        f"{what} in the file's codes can't stay in them, and take {more / _MIB:,.0f} MiB more dequantised: see what is "
        "folded, and why",
    )


def weigh_verdict(
    bytes_: Bytes,
    device: Device,
    settings: Settings,
    fp8: Decision,
    family: Family,
    with_fp8: Callable[[Fp8Settings], Bytes],
) -> Verdict | None:
    """Whether the weights fit a device whose memory is known, or what would make them fit. Activations come on top.

    Args:
        bytes_: the plan's bytes.
        device: where the model goes.
        settings: for the memory that is left alone.
        fp8: the engaged fp8 mode.
        family: for whether fp8 suits it.
        with_fp8: the bytes of the same plan with other settings of fp8, asked only where they could help.
    """
    if device.memory is None:
        return None
    available = max(0, device.memory - reserve_of(device.memory, settings.device_reserve_mib))
    needed = bytes_.device_peak
    if needed <= available:
        left = (available - needed) / _MIB
        advice = f"{left:,.0f} MiB are left for activations, which are not counted"
        if left < _LITTLE:
            advice += ": they may not fit; a smaller picture, or weights offloaded to the host, would need less"
        return Verdict(fits=True, needed=needed, available=available, advice=advice)
    if obstacle := family_obstacle(family):
        advice = f"no setting makes them fit: fp8 is not for this family ({obstacle})"
        return Verdict(fits=False, needed=needed, available=available, advice=advice)
    tried = [
        Remedy(settings=given, device_peak=with_fp8(changed).device_peak)
        for given in _LIGHTER
        if (changed := _changed(settings.fp8, given)) != settings.fp8
    ]
    fitting = tuple(_without_rest([remedy for remedy in tried if remedy.device_peak <= available]))
    advice = "; ".join(f"{_needs(remedy)}, which fits" for remedy in fitting) or _hopeless(tried, needed, fp8)
    return Verdict(fits=False, needed=needed, available=available, advice=advice, remedies=fitting)


_STORAGE = {"fp8": "storage"}
_NVFP4 = {"fp8": "storage", "fp8.weights": "nvfp4"}
_REST = {"fp8.remainder": "quantise"}
_LIGHTER = (_STORAGE, {**_STORAGE, **_REST}, _NVFP4, {**_NVFP4, **_REST})
"""Settings with which weights take fewer bytes, what rounds least first."""


def _changed(fp8: Fp8Settings, given: Mapping[str, str]) -> Fp8Settings:
    return fp8.model_copy(update={name.partition(".")[2] or "mode": value for name, value in given.items()})


def _without_rest(fitting: Sequence[Remedy]) -> Iterator[Remedy]:
    """What fits, but for what also quantises the rest where leaving that as it is fits as well."""
    plain = [remedy.settings for remedy in fitting]
    for remedy in fitting:
        less = {name: value for name, value in remedy.settings.items() if name not in _REST}
        if less == remedy.settings or less not in plain:
            yield remedy


def _needs(remedy: Remedy) -> str:
    given = " ".join(f"{name}={value}" for name, value in remedy.settings.items())
    return f"{given} needs {remedy.device_peak / _MIB:,.0f} MiB"


def _hopeless(tried: Sequence[Remedy], needed: int, fp8: Decision) -> str:
    """What is said where no setting helps: the one that comes nearest."""
    least = min(tried, key=lambda remedy: remedy.device_peak, default=None)
    if least is None or least.device_peak >= needed:
        quantised = "the weights are quantised already: " if fp8.engaged != "off" else ""
        return f"{quantised}this device can't hold them whole"
    return f"no setting makes them fit: {_needs(least)}, which does not fit either"
