"""Brings what the policies decided to a pipeline: as it is put together, and as another size or setting is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from slipcast.engine.build import build_on_meta
from slipcast.engine.pipeline.policies import VAE_ROLE, Policies, is_hindered, refit
from slipcast.engine.pipeline.remedies import with_remedies
from slipcast.engine.policy.apply import Applied, apply_speed_, apply_vae_, place_
from slipcast.engine.policy.memory import MemoryDecision, Part
from slipcast.engine.policy.sizes import ImageSize
from slipcast.engine.policy.snapshot import Snapshot, take_snapshot
from slipcast.engine.policy.vae_calls import set_tile_side_
from slipcast.registry.errors import DeviceError
from slipcast.registry.runtime import Runtime
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.pipeline_plan import PipelinePlan, PlannedPart


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
            calls = apply_vae_(pipe.components[VAE_ROLE], policies.encode, way, tile_size, visitors.get(VAE_ROLE))
    except BaseException:
        if tf32 is not None:
            tf32.release()
        raise
    if tf32 is not None:
        tf32.until_gone(pipe.components[sampling.denoiser])
    return Applied(calls, tf32, decoder)


def _runtimes(parts: Mapping[str, PlannedPart]) -> Iterator[tuple[str, Runtime]]:
    for role, part in parts.items():
        if part.companion.match is not None:
            yield role, part.companion.match.family.runtime


def refit_(pipe: Any, size: ImageSize, *, encodes: bool = False, snapshot: Snapshot | None = None) -> None:
    """Let a pipeline draw another size than it was planned for, if that fits: its VAE may have to tile for it.

    Args:
        pipe: what ``assemble`` returned.
        size: what is drawn next.
        encodes: whether a picture is encoded as well.
        snapshot: the device's memory with nothing of the pipeline on it; None: as it is now.

    Raises:
        DeviceError: it does not fit, with both numbers and with what would. Nothing was changed or allocated for it.
        CompanionError: slipcast did not make the pipeline.
    """
    from slipcast.engine.pipeline.assemble import pipeline_record

    record = pipeline_record(pipe)
    plan, policies = record.plan, record.policies

    def look(collect: bool) -> Snapshot:
        device, reserve = policies.snapshot.device, policies.settings.device_reserve_mib
        return _without_own(take_snapshot(device, reserve, collect=collect), plan, policies.parts, pipe)

    def decide(seen: Snapshot) -> Policies:
        return refit(policies, plan.parts, plan.found.sampling, size, seen, encodes=encodes)

    try:
        decided = decide(snapshot) if snapshot is not None else _decide_with_care(policies, size, look, decide)
    except DeviceError as refusal:
        seen = snapshot or look(True)
        raise _with_remedies(refusal, plan, policies, size, seen, encodes=encodes) from None
    record.policies = policies = decided
    record.status.update(policies.decisions)
    if record.applied.vae_calls is not None:
        record.applied.vae_calls.ways = {"encode": policies.encode, "decode": policies.memory.vae}


def _decide_with_care(
    policies: Policies, size: ImageSize, look: Callable[[bool], Snapshot], decide: Callable[[Snapshot], Policies]
) -> Policies:
    """Decide, and collect garbage only where that could change what is decided.

    What is decided beside garbage is right where more memory would change nothing. Where the VAE tiles for want of
    it, or nothing fits, garbage is collected and the device looked at again, unless the same was decided before with
    no more memory than there is now.
    """
    seen = look(False)
    try:
        decided = decide(seen)
    except DeviceError:
        return decide(look(True))
    same = size == policies.size and decided.memory.vae == policies.memory.vae and decided.encode == policies.encode
    if not is_hindered(decided) or (same and policies.snapshot.free <= seen.free):
        return decided
    return decide(look(True))


def _with_remedies(
    refusal: DeviceError, plan: PipelinePlan, policies: Policies, size: ImageSize, snapshot: Snapshot, *, encodes: bool
) -> DeviceError:
    """A refusal that names what would fit: with the models where they lie, or with the pipeline loaded again."""
    from slipcast.engine.pipeline.pipeline_plan import other_decisions

    anew = other_decisions(plan.found, policies.settings, snapshot, encodes=encodes)

    def decide(settings: Settings, other: ImageSize) -> MemoryDecision:
        if settings != policies.settings or other == size:
            return anew(settings, other)
        return refit(policies, plan.parts, plan.found.sampling, other, snapshot, encodes=encodes).memory

    return with_remedies(refusal, policies.settings, size, plan.found.sampling.size_multiple, decide, loaded=True)


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
    part = plan.parts.get(VAE_ROLE)
    if part is not None and part.plan is not None:
        like = build_on_meta(part.plan.origin.model, part.plan.origin.config)
        set_tile_side_(like, wanted.settings.vae.tile_size)
        for name, value in vars(like).items():
            if name.startswith("tile_"):
                setattr(pipe.components[VAE_ROLE], name, value)
    record.policies = replace(record.policies, settings=wanted.settings, vae=wanted.vae)
    refit_(pipe, wanted.size)


def _without_own(snapshot: Snapshot, plan: PipelinePlan, parts: Sequence[Part], pipe: Any) -> Snapshot:
    """The device as it would be without the pipeline's own weights on it."""
    if snapshot.unified:  # a view of the mapped file is no memory of the pipeline's own
        return replace(snapshot, free=snapshot.free + sum(part.weight_bytes for part in parts))
    models = [pipe.components[role] for role in plan.policies.memory.placements]
    device = torch.device(plan.device)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device == device
    }
    return replace(snapshot, free=min(snapshot.free + sum(held.values()), snapshot.total))
