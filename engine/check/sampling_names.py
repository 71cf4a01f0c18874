"""The names of diffusers and transformers that a family file gives for its pipeline, and whether they are there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from slipcast.engine.build import model_class, pipeline_parameters
from slipcast.engine.pipeline.classes import (
    own_arguments,
    part_names,
    pipeline_class,
    scheduler_class,
)
from slipcast.registry.companions import is_class, kind_of_role
from slipcast.registry.errors import SlipcastError
from slipcast.registry.family import Family
from slipcast.registry.runtime import Sampling
from slipcast.registry.strict_yaml import Where

Name = tuple[Where, str, bool]
"""Where a name stands, the name, and whether it is there."""


def sampling_names(family: Family) -> list[Name]:
    """Every name that ``sampling:`` and ``companions:`` give, of the family and of its variants."""
    if family.sampling is None:
        return []
    names = list(_names((), family.sampling, family.sampling, family.companions, family.companions))
    for name, variant in family.variants.items():
        joined = family.sampling.joined(variant.sampling)
        all_companions = {**family.companions, **variant.companions}
        names += _names(("variants", name), variant.sampling, joined, variant.companions, all_companions)
    return names


def _names(
    place: Where,
    said: Sampling,
    joined: Sampling,
    companions: Mapping[str, str],
    all_companions: Mapping[str, str],
) -> Iterator[Name]:
    """The names that one place gives, held against what holds with all that it leaves to the family."""
    at = (*place, "sampling")
    call: Collection[str] = (joined.pipeline and pipeline_parameters(joined.pipeline)) or ()
    kind = found(pipeline_class, joined.pipeline)
    taken: Collection[str] = own_arguments(kind) if kind is not None else ()
    parts: Collection[str] = part_names(kind) if kind is not None else ()
    for field in ("pipeline", "image_to_image"):
        name = getattr(said, field)
        if name is not None and field in said.model_fields_set:
            yield (*at, field), name, found(pipeline_class, name) is not None
    if said.guidance_argument is not None:
        yield (*at, "guidance_argument"), said.guidance_argument, said.guidance_argument in call
    for name in said.arguments:
        yield (*at, "arguments", name), name, name in taken
    if joined.pipeline is None:
        return
    if "denoiser" in said.model_fields_set:
        yield (*at, "denoiser"), said.denoiser, said.denoiser in parts
    for number, role in enumerate(said.optional):
        yield (*at, "optional", number), role, role in parts and role in all_companions
    scheduler = found(scheduler_class, all_companions.get("scheduler"))
    known = inspect.signature(scheduler.__init__).parameters if scheduler is not None else ()
    for name in said.scheduler or ():
        yield (*at, "scheduler", name), name, name in known
    for role, companion in companions.items():
        yield (*place, "companions", role), role, role in parts
        if is_class(companion):
            yield (*place, "companions", role), companion, found(_CLASSES[kind_of_role(role)], companion) is not None


def processor(name: str) -> Any:
    """A class of transformers, also one that the library only stands in for until what it needs is installed."""
    return getattr(importlib.import_module("transformers"), name.partition(".")[2], None)


_CLASSES: Mapping[str, Callable[[str], Any]] = {
    "model": model_class,
    "tokenizer": processor,
    "scheduler": scheduler_class,
}


def found(find: Callable[[str], Any], name: str | None) -> Any:
    """The class of a name, or None."""
    try:
        return None if name is None else find(name)
    except SlipcastError:
        return None
