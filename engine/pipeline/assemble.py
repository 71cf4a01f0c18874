"""Puts a planned pipeline together: loads each part as the plan says, and makes the diffusers pipeline of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipcast.engine.build import model_class
from slipcast.engine.loader import Progress
from slipcast.engine.pipeline.apply_policies import apply_policies_
from slipcast.engine.pipeline.chat_templates import check_chat_template
from slipcast.engine.pipeline.classes import (
    is_modular,
    needs_chat_template,
    own_arguments,
    pipeline_class,
    processor_class,
)
from slipcast.engine.pipeline.dtypes import match_dtypes_
from slipcast.engine.pipeline.inside import put_inside
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan, PlannedPart
from slipcast.engine.pipeline.policies import Policies
from slipcast.engine.pipeline.schedulers import make_scheduler
from slipcast.engine.plan import Decision
from slipcast.engine.planned_load import load_planned
from slipcast.engine.policy.apply import Applied
from slipcast.engine.report import Report
from slipcast.registry.companions import Companion
from slipcast.registry.errors import AccountingError, CompanionError, SlipcastError

logger = logging.getLogger("slipcast")
_RECORD = "_slipcast_record"


@dataclass(slots=True)
class PipelineRecord:
    """What is known of a pipeline that was put together here.

    Attributes:
        plan: what it was made by.
        reports: role -> report of each model that slipcast loaded.
        status: setting -> what became of it; whoever engages one writes it here.
        policies: the plan's, or those of the size that was drawn last.
        applied: what was done to it as a whole.
    """

    plan: PipelinePlan
    reports: Mapping[str, Report]
    status: dict[str, Decision]
    policies: Policies
    applied: Applied


def assemble(
    plan: PipelinePlan, *, progress: Progress | None = None, cancelled: Callable[[], bool] | None = None
) -> Any:
    """Load the parts of a pipeline and put them together.

    Args:
        plan: of the pipeline.
        progress: called with the bytes read so far and in all, of the models that slipcast loads.
        cancelled: asked as they are read; once it says True this ends with ``Cancelled`` and leaves nothing.

    Returns:
        A pipeline of the class that the plan names, with every model in eval mode, where the plan places it.

    Raises:
        CompanionError: a tokenizer, scheduler or model can't be made of its folder.
        SlipcastError: whatever loading a model raises.
    """
    parts: dict[str, Any] = {}
    reports: dict[str, Report] = {}
    so_far = _Sum(plan, progress)
    kind = pipeline_class(plan.pipeline)
    light = {role: _from_library(part, plan) for role, part in plan.parts.items() if part.companion.kind != "model"}
    _check_chat_templates(kind, plan, light)
    for role, part in plan.parts.items():
        if part.plan is not None:
            loaded = load_planned(part.plan, part.header, progress=so_far.of_next(), cancelled=cancelled)
            parts[role], reports[role] = put_inside(loaded.model, part), loaded.report
            so_far.add(part)
        else:
            parts[role] = light[role] if role in light else _from_library(part, plan)
    cast = match_dtypes_({role: part for role, part in parts.items() if isinstance(part, torch.nn.Module)})
    if cast:
        logger.info("inputs are cast: %s", ", ".join(f"{role} computes in {dtype}" for role, dtype in cast.items()))
    pipe = _build(kind, parts, plan.arguments)
    applied = apply_policies_(pipe, plan)
    setattr(pipe, _RECORD, PipelineRecord(plan, reports, dict(plan.settings), plan.policies, applied))
    logger.info("%s of %s, %s bytes on %s", plan.pipeline, ", ".join(parts), f"{plan.nbytes:,}", plan.device)
    return pipe


def pipeline_record(pipe: Any) -> PipelineRecord:
    """What is known of a pipeline.

    Raises:
        CompanionError: the pipeline was not made by slipcast.
    """
    record = getattr(pipe, _RECORD, None)
    if not isinstance(record, PipelineRecord):
        raise CompanionError(
            f"a {type(pipe).__name__} that slipcast did not put together",
            expected="what slipcast.pipeline returned",
            hint="make it with slipcast.pipeline",
        )
    return record


def pipeline_status(pipe: Any) -> dict[str, Decision]:
    """What became of each setting: requested, engaged, reason.

    Raises:
        CompanionError: the pipeline was not made by slipcast.
    """
    return dict(pipeline_record(pipe).status)


class _Sum:
    """Progress over several loads as one."""

    def __init__(self, plan: PipelinePlan, progress: Progress | None) -> None:
        self._total = sum(part.plan.bytes.read for part in plan.parts.values() if part.plan is not None)
        self._done, self._progress = 0, progress

    def of_next(self) -> Progress | None:
        progress = self._progress
        return None if progress is None else lambda read, _: progress(self._done + read, self._total)

    def add(self, part: PlannedPart) -> None:
        assert part.plan is not None
        self._done += part.plan.bytes.read


def _from_library(part: PlannedPart, plan: PipelinePlan) -> Any:
    """A part that its own library reads: from local files, without pickles, without code from the folder."""
    companion = part.companion
    try:
        if companion.kind == "scheduler":
            return make_scheduler(companion)
        if companion.kind == "tokenizer":
            return processor_class(companion.class_name).from_pretrained(str(companion.path), local_files_only=True)
        staying = plan.policies.memory.placements[companion.role] == "resident"
        return _library_model(companion, plan.compute_dtype).to(plan.device if staying else "cpu").eval()
    except SlipcastError:
        raise
    except Exception as error:  # whatever the library finds wrong with the folder
        raise CompanionError(
            f"{companion.class_name} can't be made of the {companion.role}: {type(error).__name__}: {error}",
            expected="a folder with all its files, as it was published",
            hint=f"download the folder again, or name another by the setting companions.{companion.role}",
            path=companion.path,
            roles=(companion.role,),
        ) from error


def _library_model(companion: Companion, dtype: str) -> Any:
    """A model that its own library reads, which fills what a file lacks with random values, and goes on."""
    kind: Any = model_class(companion.class_name)
    options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    model, info = kind.from_pretrained(str(companion.path), dtype=getattr(torch, dtype), **options)
    lacking = [f"{name}: missing" for name in info.get("missing_keys", ())]
    lacking += [f"{mismatch[0]}: of another shape" for mismatch in info.get("mismatched_keys", ())]
    if lacking:
        raise AccountingError(
            f"{len(lacking)} parameters of the {companion.role} that its files don't have, or have in another shape",
            expected=f"every parameter of {companion.class_name}",
            hint=f"download the folder again, or name another by the setting companions.{companion.role}",
            path=companion.path,
            items=sorted(lacking),
        )
    return model


def _check_chat_templates(kind: Any, plan: PipelinePlan, parts: Mapping[str, Any]) -> None:
    """Refuse a pipeline that encodes prompts by a chat template none of whose tokenizers has one, or a broken one."""
    processors = [role for role, part in plan.parts.items() if part.companion.kind == "tokenizer"]
    if not processors or not needs_chat_template(kind):
        return
    if all(getattr(parts[role], "chat_template", None) is None for role in processors):
        raise CompanionError(
            f"as the {processors[0]}: a folder without a chat template",
            expected=f"one with it, in chat_template.jinja or tokenizer_config.json, as {plan.pipeline} applies it",
            hint=f"download the folder again, or name another by the setting companions.{processors[0]}",
            path=plan.parts[processors[0]].companion.path,
            roles=tuple(processors),
        )
    for role in processors:
        check_chat_template(parts[role], role, plan.parts[role].companion.path)


def same_parts(pipe: Any, kind: Any) -> Any:
    """Another pipeline of the same parts, which are shared and stay as they are.

    Args:
        pipe: what ``assemble`` returned.
        kind: the class of the other one.
    """
    record = pipeline_record(pipe)
    known = own_arguments(kind)
    parts = {role: part for role, part in pipe.components.items() if role in known}
    other = _build(kind, parts, {name: value for name, value in record.plan.arguments.items() if name in known})
    setattr(other, _RECORD, record)
    return other


def _build(kind: Any, parts: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    if is_modular(kind):
        pipe = kind()
        pipe.update_components(**parts)
        return pipe
    empty = {
        name: None
        for name, parameter in own_arguments(kind).items()
        if name not in parts and name not in arguments and parameter.default is parameter.empty
    }
    return kind(**parts, **arguments, **empty)
