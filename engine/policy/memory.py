"""Where the parts of a pipeline lie while it runs: all on the device, or as much at a time as it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slipcast.engine.plan import Decision
from slipcast.engine.policy.snapshot import Snapshot
from slipcast.engine.policy.vae import VaeWay
from slipcast.registry.errors import DeviceError

Mode = Literal["auto", "fast", "balanced", "low"]
Kind = Literal["denoiser", "text_encoder", "vae", "other"]
Tier = Literal["resident", "in_turn", "streamed", "streamed_encoders", "whole_modules"]
Placement = Literal["resident", "in_turn", "streamed", "moved"]

_MIB = 2**20
_BLOCKS_AT_ONCE = 2
"""One block computes while the next one comes."""

TIERS: tuple[Tier, ...] = ("resident", "in_turn", "streamed", "streamed_encoders", "whole_modules")
"""From the fastest on. From ``streamed`` on each takes less memory than the one before."""

_SAYS: Mapping[Tier, str] = {
    "resident": "everything stays on the device",
    "in_turn": "text encoders, denoiser and VAE are on the device in turn",
    "streamed": "the denoiser's blocks come to the device one by one",
    "streamed_encoders": "the denoiser's blocks and the text encoders' layers come to the device one by one",
    "whole_modules": "blocks and layers come one by one, and what has none comes whole while it is used",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One model of a pipeline.

    Attributes:
        role: the pipeline's name for it.
        kind: what it is.
        weight_bytes: of its parameters and buffers.
        block_bytes: of each block that can be streamed by itself; empty where none can.
        activation_bytes: the peak of its activations at the size that is asked for; of a VAE its ways say more.
        table_bytes: of each streamed table from which the model looks up its input, before any other layer works.
        lookup_bytes: the peak of activations while it does.
        measured: whether somebody measured what its activations take; else they are put high.
    """

    role: str
    kind: Kind
    weight_bytes: int
    block_bytes: tuple[int, ...] = ()
    activation_bytes: int = 0
    measured: bool = True
    table_bytes: tuple[int, ...] = ()
    lookup_bytes: int = 0

    @property
    def streamed(self) -> tuple[tuple[int, int], ...]:
        """Bytes of weights on the device and of activations, in each phase while its blocks are streamed.

        What is in no block lies there throughout; blocks come in pairs. A table is gone before layers have much to
        keep, so that beside it lie what was looked up and, at most, the largest layer.
        """
        kept = self.weight_bytes - sum(self.block_bytes) - sum(self.table_bytes)
        blocks = kept + _pair(self.block_bytes), self.activation_bytes
        if not self.table_bytes:
            return (blocks,)
        return (kept + _pair((*self.table_bytes, *self.block_bytes)), self.lookup_bytes), blocks


def _pair(sizes: Sequence[int]) -> int:
    return sum(sorted(sizes)[-_BLOCKS_AT_ONCE:])


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """Where the parts lie.

    Attributes:
        tier: the way that was chosen.
        placements: role -> how the part is placed.
        vae: how the VAE runs; None where the pipeline has none.
        peak_bytes: predicted peak of the device's memory, of weights and activations.
        peaks: tier -> its predicted peak with that VAE.
        decision: requested, engaged, and why.
    """

    tier: Tier
    placements: Mapping[str, Placement]
    vae: VaeWay | None
    peak_bytes: int
    peaks: Mapping[Tier, int]
    decision: Decision


def decide_memory(
    snapshot: Snapshot,
    parts: Sequence[Part],
    mode: Mode = "auto",
    vae_ways: Sequence[VaeWay] = (),
    placed: Tier | None = None,
) -> MemoryDecision:
    """Choose where the parts of a pipeline lie, and how its VAE runs.

    ``auto`` and ``fast`` take the first tier that fits, so everything stays on the device wherever it can, and run the
    VAE in slices or tiles before they go down a tier. ``balanced`` streams the denoiser's blocks, and the encoders'
    layers where that is needed to fit. ``low`` takes the least memory.

    Args:
        snapshot: the device and its memory now.
        parts: the models of the pipeline.
        mode: the setting ``memory``.
        vae_ways: how the VAE can run, the one that changes least first.
        placed: where the parts lie already; only how the VAE runs is open then.

    Raises:
        DeviceError: nothing fits. Nothing was moved or allocated for it.
    """
    tiers = _tiers(snapshot, mode) if placed is None else (placed,)
    for tier in tiers:
        for way in vae_ways or (None,):
            peak = peak_of(tier, parts, way)
            if peak <= snapshot.budget:
                peaks = {each: peak_of(each, parts, way) for each in TIERS}
                reason = _reason(snapshot, tier, peaks, tiers) + _not_measured(parts)
                decision = Decision(requested=mode, engaged=tier, reason=reason)
                return MemoryDecision(tier, dict(_placements(tier, parts)), way, peak, peaks, decision)
    raise _too_large(snapshot, parts, mode, vae_ways, tiers)


def first_fitting(snapshot: Snapshot, parts: Sequence[Part], tier: Tier, vae_ways: Sequence[VaeWay]) -> VaeWay | None:
    """The first way to run the VAE that fits beside parts that are placed already; None where none does."""
    return next((way for way in vae_ways if peak_of(tier, parts, way) <= snapshot.budget), None)


def peak_of(tier: Tier, parts: Sequence[Part], vae: VaeWay | None = None) -> int:
    """The most bytes that lie on the device at a time: parts work one after another, each beside what stays."""
    placed = dict(_placements(tier, parts))
    staying = sum(part.weight_bytes for part in parts if placed[part.role] == "resident")
    working = 0
    for part in parts:
        working = max(working, *map(sum, _phases(part, placed[part.role], vae)))
    return staying + working


def _phases(part: Part, placement: Placement, vae: VaeWay | None) -> tuple[tuple[int, int], ...]:
    """Bytes of weights that come to the device for a part that works, and of its activations, one after another."""
    if placement == "streamed":
        return part.streamed
    activations = vae.activation_bytes if part.kind == "vae" and vae is not None else part.activation_bytes
    return ((0 if placement == "resident" else part.weight_bytes, activations),)


def _placements(tier: Tier, parts: Sequence[Part]) -> Iterator[tuple[str, Placement]]:
    for part in parts:
        yield part.role, _placement(tier, part)


def _placement(tier: Tier, part: Part) -> Placement:
    if tier in ("resident", "in_turn"):
        return tier
    streams = part.kind == "denoiser" or (part.kind == "text_encoder" and tier != "streamed")
    if streams and part.block_bytes:
        return "streamed"
    return "moved" if tier == "whole_modules" else "resident"


def _tiers(snapshot: Snapshot, mode: Mode) -> tuple[Tier, ...]:
    """The tiers that a mode may take. Where host and device share their memory, moving frees nothing."""
    if snapshot.unified:
        return ("resident",)
    if mode == "balanced":
        return ("streamed", "streamed_encoders", "whole_modules")
    if mode == "low":
        return ("whole_modules",)
    return TIERS


def _reason(snapshot: Snapshot, tier: Tier, peaks: Mapping[Tier, int], tiers: Sequence[Tier]) -> str:
    budget = f"{_mib(snapshot.budget)} ({_mib(snapshot.free)} are free, {_mib(snapshot.reserve)} are left alone)"
    reason = f"{_SAYS[tier]}: {_mib(peaks[tier])} of {budget}"
    first = tiers[0]
    return reason if tier == first else f"{reason}; {first} would take {_mib(peaks[first])}"


def _not_measured(parts: Sequence[Part]) -> str:
    names = ", ".join(part.role for part in parts if not part.measured)
    return f"; the activations of {names} are not measured, and put high" if names else ""


def _too_large(
    snapshot: Snapshot, parts: Sequence[Part], mode: Mode, vae_ways: Sequence[VaeWay], tiers: Sequence[Tier]
) -> DeviceError:
    """The refusal, with both numbers; who knows the whole pipeline names the settings that would make it fit."""
    needed, tier = min((peak_of(tier, parts, way), tier) for tier in tiers for way in vae_ways or (None,))
    return DeviceError(
        f"a pipeline that needs {_mib(needed)} at its peak with memory={mode} ({_SAYS[tier]})",
        expected=f"at most {_mib(snapshot.budget)}: {_mib(snapshot.free)} are free on {snapshot.device.label}, "
        f"{_mib(snapshot.reserve)} of them are left alone",
        hint="keep the weights in fewer bytes, ask for a smaller size, or take a device with more memory",
        items=(f"{part.role}: {_mib(part.weight_bytes)} of weights" for part in parts),
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB"
