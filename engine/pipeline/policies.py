"""Brings a pipeline's parts before the policies, and what they decide into the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slipcast.engine.build import build_on_meta
from slipcast.engine.plan import Decision, Plan
from slipcast.engine.policy.activations import vae_bytes_per_pixel
from slipcast.engine.policy.apply import Applied, apply_speed_, apply_vae_, place_
from slipcast.engine.policy.memory import MemoryDecision, Part, decide_memory, first_fitting
from slipcast.engine.policy.parts import denoises, part_of_plan
from slipcast.engine.policy.sizes import ImageSize
from slipcast.engine.policy.snapshot import Snapshot, take_snapshot
from slipcast.engine.policy.speed import SpeedDecision, decide_speed, is_gguf, without_compile
from slipcast.engine.policy.text_encoder import decide_text_encoder
from slipcast.engine.policy.vae import VaeCosts, VaeWay, vae_ways
from slipcast.engine.policy.vae_calls import can_slice, set_tile_side_
from slipcast.registry.errors import DeviceError
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.runtime import Runtime, Sampling
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.pipeline_plan import PipelinePlan, PlannedPart

_VAE = "vae"
_ON_GPU = "weights are GGUF: with speed={speed} only the VAE's decode is compiled"


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
        memory: where the models lie, and how the VAE decodes.
        encode: how the VAE encodes; None where it has none, or where no way fits.
        vae: the VAE's facts; None where the pipeline has none.
        speed: what is done for speed.
        decisions: setting -> what becomes of it.
    """

    settings: Settings
    size: ImageSize
    snapshot: Snapshot
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
    parts = dict(_compiling(parts, settings))
    known = policy_parts(parts, sampling, size)
    facts = _vae_facts(parts[_VAE], settings) if _VAE in parts else None
    ways = _ways(facts, "decode", size, settings)
    memory = decide_memory(snapshot, known, settings.memory, ways)
    encode = first_fitting(snapshot, known, memory.tier, _ways(facts, "encode", size, settings))
    speed = decide_speed(
        settings.speed,
        snapshot.device,
        {role: part.plan for role, part in parts.items() if part.plan is not None and denoises(role, sampling)},
        parts[_VAE].plan if facts is not None else None,
        room=snapshot.budget - memory.peak_bytes,
        resident=memory.tier == "resident",
    )
    decisions: dict[str, Decision] = {"memory": memory.decision}
    decisions |= vae_decisions(settings, facts, memory.vae, encode)
    encoders = {role: part.plan for role, part in parts.items() if _encodes(role)}
    decisions["text_encoder"] = decide_text_encoder(settings.text_encoder, encoders)
    decisions["speed"] = speed.decision
    policies = Policies(settings, size, snapshot, memory, encode, facts, speed, FrozenMapping(decisions))
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
    known = policy_parts(parts, sampling, size)
    ways = _ways(policies.vae, "decode", size, settings)
    memory = decide_memory(snapshot, known, settings.memory, ways, placed=policies.memory.tier)
    encode_ways = _ways(policies.vae, "encode", size, settings)
    encode = first_fitting(snapshot, known, memory.tier, encode_ways)
    if encodes and encode is None and encode_ways:
        decide_memory(snapshot, known, settings.memory, encode_ways, placed=policies.memory.tier)
    decisions = {**policies.decisions, **vae_decisions(settings, policies.vae, memory.vae, encode)}
    return replace(
        policies, size=size, snapshot=snapshot, memory=memory, encode=encode, decisions=FrozenMapping(decisions)
    )


def with_lighter_weights(
    refusal: DeviceError, settings: Settings, planned: Callable[[Settings], MemoryDecision]
) -> DeviceError:
    """A refusal that names the settings with which the pipeline fits all the same, where there are such.

    Args:
        refusal: what was said of these settings.
        settings: those that do not fit.
        planned: decides on the memory with other settings, or raises DeviceError.
    """
    now = {"memory": settings.memory, "text_encoder": settings.text_encoder, "fp8": settings.fp8.mode}
    for names in _LIGHTER:
        changed = {name: value for name, value in names.items() if value != now[name]}
        fp8 = settings.fp8.model_copy(update={"mode": changed.get("fp8", settings.fp8.mode)})
        try:
            memory = planned(settings.model_copy(update={**changed, "fp8": fp8}))
        except DeviceError:
            continue
        given = " ".join(f"{name}={value}" for name, value in changed.items())
        hint = f"set {given}, which takes {memory.peak_bytes / 2**20:,.0f} MiB"
        return DeviceError(refusal.found, expected=refusal.expected, hint=hint, path=refusal.path, items=refusal.items)
    return refusal


_LIGHTER: tuple[dict[str, Any], ...] = (
    {"memory": "auto"},
    {"text_encoder": "fp8"},
    {"memory": "auto", "text_encoder": "fp8"},
    {"memory": "auto", "text_encoder": "fp8", "fp8": "storage"},
    {"memory": "auto", "text_encoder": "nvfp4", "fp8": "storage"},
)
"""What makes a pipeline lighter, what changes least first."""


def apply_policies_(pipe: Any, plan: PipelinePlan) -> Applied:
    """Do to a pipeline what its plan decided.

    Should it fail, global flags are restored.

    Args:
        pipe: just put together, its models where the plan had them loaded.
        plan: of the pipeline.

    """
    policies, sampling = plan.policies, plan.found.sampling
    tf32, decoder = apply_speed_(pipe, policies.speed)
    try:
        visitors = place_(pipe, policies.memory, torch.device(plan.device), dict(_runtimes(plan.parts)), sampling)
        calls = None
        if policies.vae is not None:
            tile_size = policies.settings.vae.tile_size
            way = policies.memory.vae
            calls = apply_vae_(pipe.components[_VAE], policies.encode, way, tile_size, visitors.get(_VAE))
    except BaseException:
        if tf32 is not None:
            tf32.release()
        raise
    if tf32 is not None:
        tf32.until_gone(pipe.components[sampling.denoiser])
    return Applied(calls, tf32, decoder)


def refit_(pipe: Any, size: ImageSize, *, encodes: bool = False, snapshot: Snapshot | None = None) -> None:
    """Let a pipeline draw another size than it was planned for, if that fits: its VAE may have to tile for it.

    Args:
        pipe: what ``assemble`` returned.
        size: what is drawn next.
        encodes: whether a picture is encoded as well.
        snapshot: the device's memory with nothing of the pipeline on it; None: as it is now.

    Raises:
        DeviceError: it does not fit, with both numbers. Nothing was changed or allocated for it.
        CompanionError: slipcast did not make the pipeline.
    """
    from slipcast.engine.pipeline.assemble import pipeline_record

    record = pipeline_record(pipe)
    plan, policies = record.plan, record.policies
    if snapshot is None:
        snapshot = _without_own(
            take_snapshot(policies.snapshot.device, policies.settings.device_reserve_mib), plan, pipe
        )
    policies = refit(policies, plan.parts, plan.found.sampling, size, snapshot, encodes=encodes)
    record.policies = policies
    record.status.update(policies.decisions)
    if record.applied.vae_calls is not None:
        record.applied.vae_calls.ways = {"encode": policies.encode, "decode": policies.memory.vae}


def adjust_(pipe: Any, plan: PipelinePlan) -> None:
    """Lay the settings of its VAE on a pipeline that is there, by another plan of the same parts.

    Args:
        pipe: what ``assemble`` returned.
        plan: made with the settings that it shall have.

    Raises:
        DeviceError: with the models where they lie, that does not fit at the plan's size.
        CompanionError: slipcast did not make the pipeline.
    """
    from slipcast.engine.pipeline.assemble import pipeline_record

    record, wanted = pipeline_record(pipe), plan.policies
    part = plan.parts.get(_VAE)
    if part is not None and part.plan is not None:
        like = build_on_meta(part.plan.origin.model, part.plan.origin.config)
        set_tile_side_(like, wanted.settings.vae.tile_size)
        for name, value in vars(like).items():
            if name.startswith("tile_"):
                setattr(pipe.components[_VAE], name, value)
    record.policies = replace(record.policies, settings=wanted.settings, vae=wanted.vae)
    refit_(pipe, wanted.size)


def _without_own(snapshot: Snapshot, plan: PipelinePlan, pipe: Any) -> Snapshot:
    """The device as it would be without the pipeline's own weights on it."""
    models = [pipe.components[role] for role in plan.policies.memory.placements]
    held = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device == torch.device(plan.device)
    }
    if snapshot.unified:  # a view of the mapped file is no memory of the pipeline's own
        return replace(
            snapshot,
            free=snapshot.free
            + sum(part.weight_bytes for part in policy_parts(plan.parts, plan.found.sampling, ImageSize())),
        )
    return replace(snapshot, free=min(snapshot.free + sum(held.values()), snapshot.total))


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
            kind = "text_encoder" if _encodes(role) else "vae" if role == _VAE else "other"
            yield Part(role, kind, part.nbytes, measured=kind == "other")  # type: ignore[arg-type]


def _runtimes(parts: Mapping[str, PlannedPart]) -> Iterator[tuple[str, Runtime]]:
    for role, part in parts.items():
        if part.companion.match is not None:
            yield role, part.companion.match.family.runtime


def _encodes(role: str) -> bool:
    return role.startswith("text_encoder")


def _compiling(parts: Mapping[str, PlannedPart], settings: Settings) -> Iterator[tuple[str, PlannedPart]]:
    """The parts, without the compilation that speed asked for where the weights turned out to be GGUF."""
    for role, part in parts.items():
        asked = settings.speed != "off" and settings.compile == "off"
        if asked and part.plan is not None and part.plan.compiled and is_gguf(part.plan):
            yield role, replace(part, plan=without_compile(part.plan, _ON_GPU.format(speed=settings.speed)))
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
