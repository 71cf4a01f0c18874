"""The plan of a pipeline: each of its parts, from where, in which precision, and how many bytes. Reads no weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipcast.engine.devices import resolve_device
from slipcast.engine.pipeline.classes import (
    is_modular,
    own_arguments,
    part_names,
    pipeline_class,
    processor_class,
    takes_value,
)
from slipcast.engine.pipeline.inside import bytes_around
from slipcast.engine.pipeline.own_size import own_size
from slipcast.engine.pipeline.part_settings import companion_settings, denoiser_settings
from slipcast.engine.pipeline.policies import Policies, decide_policies, refit
from slipcast.engine.pipeline.remedies import Decide, with_remedies
from slipcast.engine.pipeline.schedulers import check_scheduler
from slipcast.engine.plan import Decision, Plan
from slipcast.engine.planner import make_plan
from slipcast.engine.policy.memory import MemoryDecision
from slipcast.engine.policy.sizes import AskedSize, ImageSize
from slipcast.engine.policy.snapshot import Snapshot, reserve_of, take_snapshot
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError, DeviceError
from slipcast.registry.found_pipeline import FoundPipeline, find_pipeline
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.header import Header
from slipcast.registry.processor_files import check_processor_files
from slipcast.registry.settings import Settings

_SETTINGS = ("device", "dtype", "fp8", "compile")
"""Settings whose decisions for the denoiser are those of the pipeline."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One part of a pipeline, and how it is loaded.

    Attributes:
        companion: what it is, and where it was found.
        plan: of a model that slipcast loads; None of one without a family, of a tokenizer and of a scheduler, which
            their own library reads.
        nbytes: bytes of its parameters and buffers once it is loaded; of a model without a plan an estimate.
    """

    companion: Companion
    plan: Plan | None
    nbytes: int

    @property
    def role(self) -> str:
        """The pipeline's own name of it."""
        return self.companion.role

    @property
    def loaded_by(self) -> str:
        """Who reads it: slipcast, diffusers or transformers."""
        return "slipcast" if self.plan is not None else self.companion.class_name.partition(".")[0]

    @property
    def header(self) -> Header:
        """The header of a model that has a plan."""
        assert self.companion.match is not None
        return self.companion.match.header

    def to_json(self) -> dict[str, Any]:
        """As plain data; of the plan only what concerns the whole model, as 'slipcast plan' gives the rest."""
        part, plan = self.companion, self.plan
        data: dict[str, Any] = {
            "kind": part.kind,
            "class": part.class_name,
            "family": part.family,
            "variant": part.match.variant if part.match is not None else None,
            "path": None if part.path is None else str(part.path),
            "component": part.component,
            "found": part.found,
            "loaded_by": self.loaded_by,
            "bytes": self.nbytes,
        }
        if part.kind == "scheduler":
            data["arguments"] = dict(part.arguments)
        if plan is not None:
            data["device"], data["compute_dtype"], data["precisions"] = plan.device, plan.compute_dtype, plan.precisions
            data["settings"] = {name: decision.model_dump() for name, decision in plan.settings.items()}
            data["notes"] = list(plan.notes)
        return data


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Everything that putting a pipeline together does.

    Attributes:
        found: the path, the family's facts and the parts.
        pipeline: name of the diffusers class.
        arguments: of its constructor, those that are no parts.
        parts: role -> part, the denoiser first.
        absent: roles that stay empty, with the reason.
        settings: what becomes of each setting that bears on the pipeline.
        device: torch's name of the device that it computes on.
        compute_dtype: torch's name of the dtype that the denoiser computes in.
        policies: where its models lie, how its VAE runs, and what is done for speed; and for what size.
        own_size: what it draws where nobody says.
    """

    found: FoundPipeline
    pipeline: str
    arguments: Mapping[str, Any]
    parts: Mapping[str, PlannedPart]
    absent: Mapping[str, str]
    settings: Mapping[str, Decision]
    device: str
    compute_dtype: str
    policies: Policies
    own_size: ImageSize

    @property
    def denoiser(self) -> PlannedPart:
        """The denoiser, or the first of two."""
        return next(iter(self.parts.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def drawn_size(self, asked: AskedSize) -> ImageSize:
        """What is drawn where so much is asked for."""
        return asked.of(self.own_size, self.found.sampling.size_multiple)

    def to_json(self) -> dict[str, Any]:
        """The contract of ``slipcast generate --dry-run --json``."""
        size = self.policies.size
        return {
            "path": str(self.found.path),
            "family": self.found.family.id,
            "variant": self.found.variant,
            "pipeline": self.pipeline,
            "arguments": dict(self.arguments),
            "parts": {role: part.to_json() for role, part in self.parts.items()},
            "absent": dict(self.absent),
            "settings": {name: decision.model_dump() for name, decision in self.settings.items()},
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "size": {"width": size.width, "height": size.height, "frames": size.frames},
            "bytes": self.nbytes,
            "placements": dict(self.policies.memory.placements),
            "device_peak": self.policies.memory.peak_bytes,
        }


def make_pipeline_plan(
    path: str | Path,
    settings: Settings,
    size: AskedSize | ImageSize | None = None,
    snapshot: Snapshot | None = None,
    *,
    found: FoundPipeline | None = None,
) -> PipelinePlan:
    """Plan a pipeline: find its parts, and plan the load of each.

    Args:
        path: a denoiser's file or folder, a file of several models, or a pipeline's folder.
        settings: those of the denoiser; other models compute in its dtype and stay as quantised as their files.
        size: what is to be drawn: what the pipeline draws by itself where it is None, or in part.
        snapshot: the device's memory; None: as it is now.
        found: what ``find_pipeline`` found at the path, where it was asked already, which it can be without torch.

    Raises:
        DeviceError: it does not fit the device; the message names the setting that would make it fit.
        CompanionError: parts are missing, or not what the pipeline needs.
        SlipcastError: whatever finding and planning each part raises.
    """
    found = found or find_pipeline(path, settings)
    device = resolve_device(settings.device)[0]
    snapshot = snapshot or take_snapshot(device, settings.device_reserve_mib)
    return plan_found(found, settings, size or AskedSize(), snapshot)


def plan_found(
    found: FoundPipeline, settings: Settings, size: AskedSize | ImageSize, snapshot: Snapshot
) -> PipelinePlan:
    """Plan a pipeline whose parts are found; see ``make_pipeline_plan``."""
    planned = _plan_parts(found, settings)
    own = own_size(pipeline_class(found.pipeline), planned.denoiser.origin.config)
    drawn = size if isinstance(size, ImageSize) else size.of(own, found.sampling.size_multiple)
    encodes = isinstance(size, AskedSize) and size.picture is not None
    placed, policies = _decided(found, planned, settings, drawn, snapshot, encodes=encodes)
    denoiser = placed[found.denoiser.role]
    return PipelinePlan(
        found=found,
        pipeline=found.pipeline,
        arguments=FrozenMapping(planned.arguments),
        parts=FrozenMapping(placed),
        absent=found.absent,
        settings=FrozenMapping({**_settings_of(denoiser), **policies.decisions}),
        device=snapshot.device.name,
        compute_dtype=planned.denoiser.compute_dtype,
        policies=policies,
        own_size=own,
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """The parts before it is decided where they lie."""

    parts: Mapping[str, PlannedPart]
    arguments: Mapping[str, Any]
    denoiser: Plan


def _decided(
    found: FoundPipeline, planned: _Planned, settings: Settings, size: ImageSize, snapshot: Snapshot, *, encodes: bool
) -> tuple[dict[str, PlannedPart], Policies]:
    """What is decided of the parts.

    Raises:
        DeviceError: nothing fits; it names what would.
    """
    known = {_weights(settings): planned}
    try:
        return _decide(found, planned, settings, size, snapshot, encodes=encodes)
    except DeviceError as refusal:
        decide = other_decisions(found, settings, snapshot, encodes=encodes, known=known)
        raise with_remedies(refusal, settings, size, found.sampling.size_multiple, decide) from None


def _decide(
    found: FoundPipeline, planned: _Planned, settings: Settings, size: ImageSize, snapshot: Snapshot, *, encodes: bool
) -> tuple[dict[str, PlannedPart], Policies]:
    placed, policies = decide_policies(planned.parts, found.sampling, settings, size, snapshot)
    if encodes:
        refit(policies, planned.parts, found.sampling, size, snapshot, encodes=True)
    return placed, policies


def other_decisions(
    found: FoundPipeline,
    settings: Settings,
    snapshot: Snapshot,
    *,
    encodes: bool,
    known: dict[tuple[Any, ...], _Planned] | None = None,
) -> Decide:
    """What would be decided on the memory of a pipeline with other settings and of other sizes.

    Args:
        found: the pipeline's parts.
        settings: those that the snapshot was taken with.
        snapshot: the device without the pipeline.
        encodes: whether a picture is encoded as well.
        known: the parts' plans by the settings that bear on them; what is added is kept there.
    """
    known = {} if known is None else known

    def decide(other: Settings, size: ImageSize) -> MemoryDecision:
        key = _weights(other)
        if key not in known:
            known[key] = _plan_parts(found, other)
        seen = snapshot
        if other.device_reserve_mib != settings.device_reserve_mib:
            seen = replace(snapshot, reserve=reserve_of(snapshot.total, other.device_reserve_mib))
        return _decide(found, known[key], other, size, seen, encodes=encodes)[1].memory

    return decide


def _weights(settings: Settings) -> tuple[Any, ...]:
    """The settings that make other weights of the same parts."""
    return settings.fp8, settings.text_encoder, settings.speed, settings.compile


def _plan_parts(found: FoundPipeline, settings: Settings) -> _Planned:
    kind = pipeline_class(found.pipeline)
    first = found.denoiser
    denoiser = make_plan(_match(first), denoiser_settings(settings, first), others=first.beside)
    parts = {first.role: PlannedPart(first, denoiser, denoiser.bytes.resident)}
    for part in found.parts[1:]:
        parts[part.role] = _plan_part(part, settings, denoiser)
    arguments = _arguments(kind, found)
    _refuse_unknown(kind, found, arguments)
    return _Planned(parts, arguments, denoiser)


def _settings_of(denoiser: PlannedPart) -> dict[str, Decision]:
    assert denoiser.plan is not None
    return {name: denoiser.plan.settings[name] for name in _SETTINGS}


def _plan_part(part: Companion, settings: Settings, denoiser: Plan) -> PlannedPart:
    if part.kind == "scheduler":
        check_scheduler(part)
        return PlannedPart(part, None, 0)
    if part.kind == "tokenizer":
        processor_class(part.class_name)
        assert part.path is not None
        check_processor_files(part.path, part.role)
        return PlannedPart(part, None, 0)
    if part.match is None:
        return PlannedPart(part, None, _bytes_of_folder(part, settings, denoiser.compute_dtype))
    second = part.match.family.kind == "denoiser"
    own = denoiser_settings(settings, part) if second else companion_settings(settings, part, denoiser)
    plan = make_plan(part.match, own, others=part.beside)
    return PlannedPart(part, plan, plan.bytes.resident + bytes_around(part, plan))


def _match(part: Companion) -> Any:
    assert part.match is not None  # a pipeline begins from an identified denoiser
    return part.match


def _bytes_of_folder(part: Companion, settings: Settings, dtype: str) -> int:
    """What the weights of a folder take in a dtype."""
    assert part.path is not None
    headers = read_checkpoint(part.path, limit_mib=settings.header_limit_mib).headers
    elements = sum(tensor.elements for header in headers.values() for tensor in header.tensors.values())
    size: int = getattr(torch, dtype).itemsize
    return elements * size


def _arguments(kind: type, found: FoundPipeline) -> dict[str, Any]:
    """Of the family's and the folder's values those that the class takes, and that are no parts."""
    known = own_arguments(kind)
    roles = {part.role for part in found.parts} | found.absent.keys()
    arguments = {name: value for name, value in found.arguments.items() if name in known and name not in roles}
    wrong = [name for name, value in arguments.items() if not takes_value(kind, name, value)]
    if wrong:
        raise CompanionError(
            f"values that {found.pipeline} does not take: "
            + ", ".join(f"{name} is {repr(arguments[name])[:60]}" for name in wrong),
            expected="of a part a library and a class, of an argument a plain value of its kind",
            hint="correct the pipeline's model_index.json, or download it again",
            path=found.path,
            roles=tuple(wrong),
        )
    return arguments


def _refuse_unknown(kind: type, found: FoundPipeline, arguments: Mapping[str, Any]) -> None:
    """Refuse parts that the class does not take, and a class that takes others than the family names.

    Raises:
        CompanionError: it names them.
    """
    known = part_names(kind)
    unknown = [part.role for part in found.parts if part.role not in known]
    lacking = [] if is_modular(kind) else list(_lacking(kind, found, arguments))
    if unknown or lacking:
        raise CompanionError(
            f"{found.pipeline} "
            + " and ".join(
                filter(
                    None,
                    (
                        f"takes no {', '.join(unknown)}" if unknown else "",
                        f"wants {', '.join(lacking)} as well" if lacking else "",
                    ),
                )
            ),
            expected=f"the parts that {found.family.title} names: {', '.join(part.role for part in found.parts)}",
            hint="install another version of diffusers, or correct companions: in the family file",
            path=found.path,
            roles=(*unknown, *lacking),
        )


def _lacking(kind: type, found: FoundPipeline, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Parts that a class can't do without."""
    given = {part.role for part in found.parts} | found.absent.keys() | arguments.keys()
    optional = set(getattr(kind, "_optional_components", ()))
    for name, parameter in own_arguments(kind).items():
        if parameter.default is parameter.empty and name not in given and name not in optional:
            yield name
