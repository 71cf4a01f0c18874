"""Brings a pipeline's parts before the policies, and what they decide into the plan. Pure: nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slipcast.engine.build import build_on_meta
from slipcast.engine.plan import Decision, Plan
from slipcast.engine.policy.activations import vae_bytes_per_pixel
from slipcast.engine.policy.memory import MemoryDecision, Part, decide_memory, first_fitting
from slipcast.engine.policy.parts import denoises, part_of_plan
from slipcast.engine.policy.sizes import ImageSize
from slipcast.engine.policy.snapshot import Snapshot
from slipcast.engine.policy.speed import SpeedDecision, compiled_by_speed, decide_speed
from slipcast.engine.policy.text_encoder import decide_text_encoder
from slipcast.engine.policy.vae import VaeCosts, VaeWay, vae_ways
from slipcast.engine.policy.vae_calls import can_slice, set_tile_side_
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.runtime import Sampling
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.pipeline_plan import PlannedPart

VAE_ROLE = "vae"
"""Every pipeline's name of its VAE."""


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """What a VAE takes, and what it can do.

    Attributes:
        decode: costs of decoding.
        encode: costs of encoding.
        slices: whether it can take the pictures of a batch one after another.
        measured: whether the costs were measured.
    """

    decode: VaeCosts
    encode: VaeCosts
    slices: bool
    measured: bool


@dataclass(frozen=True, slots=True)
class Policies:
    """What was decided about a pipeline as a whole.

    Attributes:
        settings: those of the call.
        size: what it was decided for.
        snapshot: the device as it was.
        parts: the models as the memory policy saw them, at that size.
        memory: where the models lie, and how the VAE decodes.
        encode: how the VAE encodes; None where it has none, or where no way fits.
        vae: the VAE's facts; None where the pipeline has none.
        speed: what is done for speed.
        decisions: setting -> what becomes of it.
    """

    settings: Settings
    size: ImageSize
    snapshot: Snapshot
    parts: tuple[Part, ...]
    memory: MemoryDecision
    encode: VaeWay | None
    vae: VaeFacts | None
    speed: SpeedDecision
    decisions: Mapping[str, Decision]


def decide_policies(
    parts: Mapping[str, PlannedPart], sampling: Sampling, settings: Settings, size: ImageSize, snapshot: Snapshot
) -> tuple[dict[str, PlannedPart], Policies]:
    """Decide where the models lie, how the VAE runs and what is done for speed.

    Args:
        parts: role -> planned part, on the device that the pipeline computes on.
        sampling: the family's facts.
        settings: those of the call.
        size: what is drawn.
        snapshot: the device and its memory now.

    Returns:
        The parts as they are loaded: to the host what does not stay on the device. And the decisions.

    Raises:
        DeviceError: nothing fits. Nothing was loaded, moved or allocated for it.
    """
    parts = dict(_compiling(parts, sampling, settings))
    known = policy_parts(parts, sampling, size)
    facts = _vae_facts(parts[VAE_ROLE], settings) if VAE_ROLE in parts else None
    ways = _ways(facts, "decode", size, settings)
    memory = decide_memory(snapshot, known, settings.memory, ways)
    encode = first_fitting(snapshot, known, memory.tier, _ways(facts, "encode", size, settings))
    speed = decide_speed(
        settings.speed,
        snapshot.device,
        {role: part.plan for role, part in parts.items() if part.plan is not None and denoises(role, sampling)},
        parts[VAE_ROLE].plan if facts is not None else None,
        compile_=settings.compile,
        room=snapshot.budget - memory.peak_bytes,
        resident=memory.tier == "resident",
    )
    decisions: dict[str, Decision] = {"memory": memory.decision}
    decisions |= vae_decisions(settings, facts, memory.vae, encode)
    encoders = {role: part.plan for role, part in parts.items() if _encodes(role)}
    decisions["text_encoder"] = decide_text_encoder(settings.text_encoder, encoders)
    decisions["speed"] = speed.decision
    policies = Policies(settings, size, snapshot, known, memory, encode, facts, speed, FrozenMapping(decisions))
    return {role: _where_loaded(part, memory) for role, part in parts.items()}, policies


def refit(
    policies: Policies,
    parts: Mapping[str, PlannedPart],
    sampling: Sampling,
    size: ImageSize,
    snapshot: Snapshot,
    *,
    encodes: bool,
) -> Policies:
    """Decide anew how the VAE runs for another size, with the models where they lie.

    Args:
        policies: those that the pipeline was put together by.
        parts: its parts.
        sampling: the family's facts.
        size: what is drawn now.
        snapshot: the device now, what the pipeline's own weights take of it counted as free.
        encodes: whether a picture is encoded as well.

    Raises:
        DeviceError: it does not fit. Nothing was allocated for it.
    """
    settings = policies.settings
    known = policies.parts if size == policies.size else policy_parts(parts, sampling, size)
    ways = _ways(policies.vae, "decode", size, settings)
    memory = decide_memory(snapshot, known, settings.memory, ways, placed=policies.memory.tier)
    encode_ways = _ways(policies.vae, "encode", size, settings)
    encode = first_fitting(snapshot, known, memory.tier, encode_ways)
    if encodes and encode is None and encode_ways:
        decide_memory(snapshot, known, settings.memory, encode_ways, placed=policies.memory.tier)
    decisions = {**policies.decisions, **vae_decisions(settings, policies.vae, memory.vae, encode)}
    return replace(
        policies,
        size=size,
        snapshot=snapshot,
        parts=known,
        memory=memory,
        encode=encode,
        decisions=FrozenMapping(decisions),
    )


def is_hindered(policies: Policies) -> bool:
    """Whether the VAE would run otherwise if more memory were free."""
    return any(
        ways and ways[0] != chosen
        for call, chosen in (("decode", policies.memory.vae), ("encode", policies.encode))
        if (ways := _ways(policies.vae, call, policies.size, policies.settings))
    )


def policy_parts(parts: Mapping[str, PlannedPart], sampling: Sampling, size: ImageSize) -> tuple[Part, ...]:
    """The models of a pipeline as the memory policy sees them."""
    return tuple(_policy_parts(parts, sampling, size))


def _policy_parts(parts: Mapping[str, PlannedPart], sampling: Sampling, size: ImageSize) -> Iterator[Part]:
    for role, part in parts.items():
        if part.companion.kind != "model":
            continue
        if part.plan is not None and part.companion.match is not None:
            runtime = part.companion.match.family.runtime
            known = part_of_plan(role, part.plan, runtime, sampling, size)
            around = part.nbytes - part.plan.bytes.resident
            yield replace(known, weight_bytes=known.weight_bytes + around)
        else:
            kind = "text_encoder" if _encodes(role) else "vae" if role == VAE_ROLE else "other"
            yield Part(role, kind, part.nbytes, measured=kind == "other")  # type: ignore[arg-type]


def _encodes(role: str) -> bool:
    return role.startswith("text_encoder")


def _compiling(
    parts: Mapping[str, PlannedPart], sampling: Sampling, settings: Settings
) -> Iterator[tuple[str, PlannedPart]]:
    """The parts, of which the denoisers say so where the speed decides what is compiled."""
    by_speed = settings.speed != "off" and settings.compile == "auto"
    for role, part in parts.items():
        if by_speed and part.plan is not None and denoises(role, sampling):
            yield role, replace(part, plan=compiled_by_speed(part.plan, settings.speed))
        else:
            yield role, part


def _where_loaded(part: PlannedPart, memory: MemoryDecision) -> PlannedPart:
    """To the host what comes to the device only while it works."""
    if part.plan is None or memory.placements.get(part.role, "resident") == "resident":
        return part
    return replace(part, plan=part.plan.model_copy(update={"device": "cpu"}))


def _vae_facts(part: PlannedPart, settings: Settings) -> VaeFacts:
    plan = part.plan
    runtime = part.companion.match.family.runtime if part.companion.match is not None else None
    decode, encode, measured = vae_bytes_per_pixel(runtime, _item_size(plan))
    frames = (runtime.frames_at_once or 0) if runtime is not None else 0
    side, slices = 0, False
    if plan is not None:
        vae = build_on_meta(plan.origin.model, plan.origin.config)
        side, slices = set_tile_side_(vae, settings.vae.tile_size), can_slice(vae)
    return VaeFacts(VaeCosts(decode, side, frames), VaeCosts(encode, side, frames), slices, measured)


def _item_size(plan: Plan | None) -> int:
    size: int = getattr(torch, plan.compute_dtype if plan is not None else "float32").itemsize
    return size


def _ways(facts: VaeFacts | None, call: str, size: ImageSize, settings: Settings) -> tuple[VaeWay, ...]:
    if facts is None:
        return ()
    costs = facts.decode if call == "decode" else facts.encode
    return vae_ways(costs, size, settings.vae.tiling, settings.vae.slicing if facts.slices else "off")


def vae_decisions(
    settings: Settings, facts: VaeFacts | None, decode: VaeWay | None, encode: VaeWay | None
) -> dict[str, Decision]:
    """What became of the settings of the VAE."""
    asked = settings.vae
    if facts is None:
        none = "the pipeline has no VAE"
        values = {"tiling": asked.tiling, "slicing": asked.slicing, "tile_size": str(asked.tile_size)}
        return {f"vae.{name}": Decision(requested=value, engaged="off", reason=none) for name, value in values.items()}
    ways = {"encode": encode, "decode": decode}
    tiled = " and ".join(call for call, way in ways.items() if way is not None and way.tiling)
    sliced = " and ".join(call for call, way in ways.items() if way is not None and way.slicing)
    takes = ", ".join(
        f"to {call} takes {way.activation_bytes / 2**20:,.0f} MiB" if way is not None else f"to {call} does not fit"
        for call, way in ways.items()
    )
    takes += "" if facts.measured else ", not measured and put high"
    side = facts.decode.tile_side
    tile_size = Decision(
        requested=str(asked.tile_size),
        engaged=str(side),
        reason="the VAE has no tiles"
        if not side
        else "as requested"
        if asked.tile_size == side
        else _TILES[bool(asked.tile_size)],
    )
    return {
        "vae.tiling": Decision(
            requested=asked.tiling, engaged=tiled or "off", reason=takes if side else "the VAE can't tile"
        ),
        "vae.slicing": Decision(
            requested=asked.slicing, engaged=sliced or "off", reason=takes if facts.slices else "the VAE can't slice"
        ),
        "vae.tile_size": tile_size,
    }


_TILES = {False: "the VAE's own", True: "rounded to a multiple of 8 latents, of which it has at least 8"}
