"""Proofs of what a file says of its pipeline: that the classes fit one another, and that numbers are diffusers' own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from slipcast.engine.build import model_class
from slipcast.engine.check.fact import Drawing, Fact, drawings, judged
from slipcast.engine.check.pipeline_source import PipelineSource, is_number, pipeline_source
from slipcast.engine.check.proof import Outcome
from slipcast.engine.check.sampling_names import found, processor
from slipcast.engine.check.subject import Subject
from slipcast.engine.pipeline.classes import is_modular, own_arguments, scheduler_class
from slipcast.registry.catalogue import Catalogue
from slipcast.registry.companions import is_class, kind_of_role
from slipcast.registry.strict_yaml import Where

_ANNOTATION = "the annotations of the pipeline"
_KINDS = {"text_encoder": "text_encoder", "text_conditioner": "text_encoder", "vae": "vae", "transformer": "denoiser"}
"""What kind of family a companion is, by how its role begins."""
_GUIDES = ("guidance", "cfg")


def prove_pipeline(subject: Subject) -> Outcome:
    """The pipeline is one for the class, and each companion is of a class that it takes."""
    return judged(subject, _pipeline(subject))


def _pipeline(subject: Subject) -> Iterator[Fact]:
    family = subject.family
    yield from _families(subject.catalogue, ("companions",), family.companions)
    for name, variant in family.variants.items():
        yield from _families(subject.catalogue, ("variants", name, "companions"), variant.companions)
    for drawing in drawings(family):
        yield from _classes(subject, drawing)


def _families(catalogue: Catalogue, where: Where, companions: Mapping[str, str]) -> Iterator[Fact]:
    """That each companion's family and variant are there, and of the kind that its role asks for."""
    for role, companion in companions.items():
        if is_class(companion):
            continue
        id_, _, variant = companion.partition("/")
        at, said = (*where, role), f"{role} {companion}"
        if id_ not in catalogue:
            yield Fact(at, said, against="no family is called so", final=True)
        elif variant and variant not in catalogue[id_].variants:
            yield Fact(at, said, against=f"{id_} has no such variant", final=True)
        else:
            wanted = next((kind for start, kind in _KINDS.items() if role.startswith(start)), None)
            kind = catalogue[id_].kind
            if wanted in (None, kind):
                yield Fact(at, said, by="their family files")
            else:
                yield Fact(at, said, against=f"that is a family of the kind {kind}, not {wanted}", final=True)


def _classes(subject: Subject, drawing: Drawing) -> Iterator[Fact]:
    sampling, at = drawing.sampling, (*drawing.where, "sampling")
    source = pipeline_source(sampling.pipeline)
    if source is None:
        return
    if drawing.states("pipeline", "denoiser") or not drawing.where:
        yield _taken(source, sampling.denoiser, model_class(drawing.model), (*at, "pipeline"), f"{sampling.pipeline}")
    if drawing.states("pipeline") and not drawing.where:
        yield from _draws_from_text(source, (*at, "pipeline"))
    if drawing.states("image_to_image"):
        yield from _starts_from_picture(drawing)
    for role, companion in drawing.own.items():
        ours = _class_of(subject.catalogue, role, companion)
        if ours is not None and role in source.parts:
            where, said = (*drawing.where, "companions", role), f"{role} {companion}"
            yield _taken(source, role, ours, where, said)
            yield from _of_encoder(subject.catalogue, drawing, role, ours, where)
    for number, role in enumerate(drawing.said.optional):
        empty = getattr(source.kind, "_optional_components", ())
        by = "the pipeline's optional components" if role in empty else ""
        yield Fact((*at, "optional", number), f"optional {role}", by)
    yield from _arguments(source, drawing)


def _taken(source: PipelineSource, role: str, ours: Any, where: Where, said: str) -> Fact:
    """That a class may be a component of the pipeline."""
    if role not in source.parts:
        return Fact(where, said, against=f"{source.kind.__name__} has no {role}", final=True)
    if source.admits(role, ours) is not False:
        return Fact(where, said, _ANNOTATION)
    if role == "scheduler" and ours.__name__ in source.examples:
        return Fact(where, said, "the pipeline's example")
    kinds = " or ".join(kind.__name__ for kind in source.parts[role])
    return Fact(where, said, against=f"{source.kind.__name__} takes {kinds} as its {role}, not {ours.__name__}")


def _of_encoder(catalogue: Catalogue, drawing: Drawing, role: str, ours: Any, where: Where) -> Iterator[Fact]:
    """That a tokenizer is the one that transformers has for the text encoder of its role."""
    encoder = role.replace("tokenizer", "text_encoder")
    if role == encoder or encoder not in drawing.companions:
        return
    kind = _class_of(catalogue, encoder, drawing.companions[encoder])
    config = getattr(kind, "config_class", None)
    known = importlib.import_module("transformers.models.auto.tokenization_auto").TOKENIZER_MAPPING_NAMES
    named = known.get(getattr(config, "model_type", ""), ())
    theirs = {str(name).removesuffix("Fast") for name in (named if isinstance(named, tuple) else (named,)) if name}
    generic = ("TokenizersBackend", "PreTrainedTokenizer")
    if theirs and not theirs & {*generic} and "Tokenizer" in ours.__name__:
        fits = ours.__name__.removesuffix("Fast") in theirs
        against = f"transformers has {' or '.join(sorted(theirs))} for {kind.__name__}"
        yield Fact(where, f"{role} {ours.__name__}", "transformers' tokenizers" if fits else "", against)


def _class_of(catalogue: Catalogue, role: str, companion: str) -> Any:
    if is_class(companion):
        find = {"model": model_class, "tokenizer": processor, "scheduler": scheduler_class}[kind_of_role(role)]
        return found(find, companion)
    id_, _, variant = companion.partition("/")
    known = id_ in catalogue and (not variant or variant in catalogue[id_].variants)
    return found(model_class, catalogue[id_].model_of(variant or None)) if known else None


def _auto(name: str) -> Mapping[str, Any]:
    """One of diffusers' tables of pipelines, by the task: TEXT2IMAGE, IMAGE2IMAGE or INPAINT."""
    table: Mapping[str, Any] = getattr(
        importlib.import_module("diffusers.pipelines.auto_pipeline"), f"AUTO_{name}_PIPELINES_MAPPING"
    )
    return table


def _draws_from_text(source: PipelineSource, where: Where) -> Iterator[Fact]:
    """That the pipeline of the family itself is not known as one for pictures alone."""
    tasks = [task for task in ("TEXT2IMAGE", "IMAGE2IMAGE", "INPAINT") if source.kind in _auto(task).values()]
    if tasks and "TEXT2IMAGE" not in tasks:
        yield Fact(where, source.kind.__name__, against="diffusers lists it for pictures to start from")


def _starts_from_picture(drawing: Drawing) -> Iterator[Fact]:
    """That a pipeline for pictures takes them and the same model, and is that of the other one's table."""
    sampling, where = drawing.sampling, (*drawing.where, "sampling", "image_to_image")
    name = sampling.image_to_image
    source = pipeline_source(name)
    if source is None:
        return
    yield _taken(source, sampling.denoiser, model_class(drawing.model), where, str(name))
    if not {"image", "images"} & source.call.keys():
        yield Fact(where, str(name), against="its call takes no image", final=True)
    for key, kind in _auto("TEXT2IMAGE").items():
        if kind.__name__ == sampling.pipeline != name and key in _auto("IMAGE2IMAGE"):
            theirs = _auto("IMAGE2IMAGE")[key].__name__
            same = theirs == name
            yield Fact(where, str(name), "diffusers' auto pipelines" if same else "", f"diffusers has {theirs} for it")


def _arguments(source: PipelineSource, drawing: Drawing) -> Iterator[Fact]:
    """That the constructor's arguments have values of their kind; one that is not the default has a source."""
    if is_modular(source.kind):
        return
    for name, value in drawing.said.arguments.items():
        where, said = (*drawing.where, "sampling", "arguments", name), f"{name} {value}"
        parameter = own_arguments(source.kind).get(name)
        if parameter is None:
            yield Fact(where, said, against=f"{source.kind.__name__} takes no such argument", final=True)
            continue
        default = parameter.default
        kinds = source.parts[name]
        if isinstance(value, str) and kinds and str not in kinds:
            yield Fact(where, said, against=f"it is of the kind {kinds[0].__name__}", final=True)
            continue
        if isinstance(default, bool) is not isinstance(value, bool) and default not in (None, inspect.Parameter.empty):
            yield Fact(where, said, against=f"its default is {default!r}", final=True)
        else:
            by, number = "the pipeline's own defaults" if value == default else "", value if is_number(value) else None
            yield Fact(where, said, by, f"it is {default!r} else", value=number)


def prove_sampling(subject: Subject) -> Outcome:
    """Steps, guidance, its argument and frames are those of the pipeline's call or example, or have a source."""
    return judged(subject, (fact for drawing in drawings(subject.family) for fact in _sampling(drawing)))


def _sampling(drawing: Drawing) -> Iterator[Fact]:
    sampling, at = drawing.sampling, (*drawing.where, "sampling")
    source = pipeline_source(sampling.pipeline)
    if source is None:
        return
    if sampling.steps is not None and drawing.states("steps", "pipeline"):
        where = (*at, "steps" if drawing.states("steps") else "pipeline")
        yield _number(source, "num_inference_steps", sampling.steps, where, "steps")
    if sampling.guidance is not None and drawing.states("guidance", "pipeline", "guidance_argument"):
        where = (*at, "guidance" if drawing.states("guidance") else "pipeline")
        argument = sampling.guidance_argument or "guidance_scale"
        yield _number(source, argument, sampling.guidance, where, "guidance")
    if sampling.guidance_argument is not None and drawing.states("guidance_argument", "pipeline"):
        yield _guides(source, sampling.guidance_argument, sampling.guidance, at)
    if sampling.negative_prompt is not None and drawing.states("negative_prompt"):
        given = source.call.get("negative_prompt")
        said = f"negative prompt {sampling.negative_prompt!r}"
        quoted = f'negative_prompt="{sampling.negative_prompt}"' in source.examples
        shown = given == sampling.negative_prompt or quoted
        yield Fact((*at, "negative_prompt"), said, "the pipeline's example" if shown else "")
    if sampling.frame_rate is not None and drawing.states("frame_rate"):
        name = "frame_rate" if is_number(source.call.get("frame_rate")) else "fps"
        yield _number(source, name, sampling.frame_rate, (*at, "frame_rate"), "frames a second")


def _number(source: PipelineSource, argument: str, value: float, where: Where, said: str) -> Fact:
    """That a number is what the pipeline has by itself, or what its example gives."""
    by = source.shows(argument, value)
    others = source.call.get(argument)
    against = f"{argument} of {source.kind.__name__} is {others!r} where none is given"
    return Fact(where, f"{said} {value:g}", by, against, value=value)


def _guides(source: PipelineSource, argument: str, guidance: float | None, at: Where) -> Fact:
    """That an argument of the call is the one that takes the strength of guidance: of several, that of this number."""
    where = (*at, "guidance_argument")
    guides = [name for name in source.call if any(word in name for word in _GUIDES) and is_number(source.call[name])]
    if argument not in source.call or not any(word in argument for word in _GUIDES):
        return Fact(where, argument, against=f"that is no strength of guidance of {source.kind.__name__}", final=True)
    by_itself = [name for name in guides if source.call[name] == guidance]
    if argument in by_itself or source.shows(argument, guidance or 0.0):
        return Fact(where, argument, "the pipeline's own defaults")
    others = [name for name in guides if name != argument and source.shows(name, guidance or 0.0)]
    against = f"{guidance:g} is the strength of {others[0]}" if others else f"its strength is not {guidance}"
    return Fact(where, argument, against=against, final=bool(others))
