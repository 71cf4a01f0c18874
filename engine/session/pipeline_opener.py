"""Opens the pipelines of checkpoints for a session: planned, put together and drawn with as everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipcast.engine.described_device import refuse_described
from slipcast.engine.devices import Device, resolve_device
from slipcast.engine.pipeline.apply_policies import adjust_
from slipcast.engine.pipeline.assemble import assemble, pipeline_record, pipeline_status
from slipcast.engine.pipeline.generate import Generated, StepProgress, check_request, generate
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan, PlannedPart, make_pipeline_plan
from slipcast.engine.pipeline.request import GenerationRequest, refuse_no_multiples
from slipcast.engine.plan import Decision
from slipcast.engine.policy.sizes import AskedSize
from slipcast.engine.policy.snapshot import Snapshot, take_snapshot
from slipcast.engine.session.opener import Validated
from slipcast.registry.errors import DeviceError
from slipcast.registry.settings import Settings


class PipelineOpener:
    """Makes, runs and ends the pipelines of checkpoints; see ``Opener``."""

    def __init__(self) -> None:
        self._allocated_before = 0
        """Bytes that torch had allocated on the device when the load of the present pipeline began."""

    def validate(self, path: Path, settings: Settings, size: AskedSize | None, loaded: Validated | None) -> Validated:
        """Plan the pipeline, every part of it, for the device as it is without the present one."""
        refuse_described(settings.device)
        device = resolve_device(settings.device)[0]
        snapshot = take_snapshot(device, settings.device_reserve_mib)
        if loaded is not None and loaded.device == device.name:
            snapshot = self._without(loaded.plan, device, snapshot)
        plan = make_pipeline_plan(path, settings, size, snapshot)
        if size is not None:
            refuse_no_multiples(size, plan.found.sampling.size_multiple)
        content = (*_described(plan), *(state for part in plan.parts.values() for state in _states(part)))
        return Validated(path, settings, plan, plan.found.family.id, plan.pipeline, plan.device, content)

    def open(self, validated: Validated, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> Any:
        """Load the parts and put them together."""
        self._allocated_before = _allocated(resolve_device(validated.device)[0]) or 0
        return assemble(validated.plan, progress=progress, cancelled=cancelled)

    def adjust(self, pipe: Any, validated: Validated) -> bool:
        """Let the VAE run as the settings say, if that fits with the models where they lie."""
        try:
            adjust_(pipe, validated.plan)
        except DeviceError:
            return False
        return True

    def decisions(self, pipe: Any) -> Mapping[str, Decision]:
        """What became of each setting."""
        return pipeline_status(pipe)

    def check(self, validated: Validated, request: GenerationRequest) -> None:
        """Refuse what the pipeline can't draw."""
        plan: PipelinePlan = validated.plan
        check_request(plan, request)

    def draw(
        self, pipe: Any, request: GenerationRequest, progress: StepProgress, cancelled: Callable[[], bool]
    ) -> Generated:
        """Draw."""
        return generate(pipe, request, progress, cancelled)

    def recover(self, pipe: Any) -> None:
        """Forget what models keep from step to step, which a call does at its end."""
        if hasattr(pipe, "maybe_free_model_hooks"):
            pipe.maybe_free_model_hooks()

    def close(self, pipe: Any) -> None:
        """Restore what is global."""
        pipeline_record(pipe).applied.release()

    def _without(self, plan: PipelinePlan, device: Device, snapshot: Snapshot) -> Snapshot:
        """The device as it will be once a pipeline and its activations are gone. The pipeline itself is not touched."""
        allocated = _allocated(device)
        held = plan.nbytes if allocated is None else max(allocated - self._allocated_before, 0)
        return replace(snapshot, free=min(snapshot.free + held, snapshot.total))


def _allocated(device: Device) -> int | None:
    """Bytes of tensors on a device, of this process; None where torch does not count them apart."""
    if device.kind == "cuda":
        return torch.cuda.memory_allocated(device.torch_device)
    return torch.xpu.memory_allocated(device.torch_device) if device.kind == "xpu" else None


def _described(plan: PipelinePlan) -> Iterator[Hashable]:
    """What a folder's index and the family file say of the pipeline around its parts."""
    found = plan.found
    yield plan.pipeline, found.family.id, found.family.digest, found.variant, repr(dict(found.arguments))


def _states(part: PlannedPart) -> Iterator[Hashable]:
    """What changes when a part's files, their configuration or the family that describes them do."""
    companion = part.companion
    yield companion.role, companion.class_name, companion.component, repr(dict(companion.arguments))
    files: tuple[Path, ...] = ()
    if companion.match is not None:
        config = companion.match.header.config
        yield companion.match.family.digest, None if config is None else repr(dict(config))
        files = companion.match.header.files
    elif companion.path is not None:
        files = tuple(sorted(file for file in companion.path.rglob("*") if file.is_file()))
    for file in files:
        state = file.stat()
        yield str(file), state.st_size, state.st_mtime_ns
