"""The proof that latents and hidden states are as wide as the file says: to the VAE, the text encoder and the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipcast.engine.build import model_class
from slipcast.engine.check.fact import Drawing, Fact, drawings, judged
from slipcast.engine.check.pipeline_source import is_number, pipeline_source
from slipcast.engine.check.proof import Outcome
from slipcast.engine.check.subject import Case, Subject
from slipcast.engine.check.vae_shapes import VaeShapes, recorded_match, vae_of
from slipcast.registry.companion_widths import output_width
from slipcast.registry.companions import is_class

_HEADER = "recorded headers"
_DEFAULTS = "the classes' own defaults"
_PACKED = (1, 4)
"""How many latents may lie in one channel of a denoiser: each alone, or squares of 2 x 2."""


def prove_latents(subject: Subject) -> Outcome:
    """Channels and scale of latents are the VAE's, and each width that the denoiser takes is what its part gives."""
    return judged(subject, (fact for drawing in drawings(subject.family) for fact in _facts(subject, drawing)))


def _facts(subject: Subject, drawing: Drawing) -> Iterator[Fact]:
    sampling = drawing.sampling
    vae, recorded = vae_of(drawing.companions.get("vae", ""), subject.catalogue, subject.records)
    if drawing.states("latent_channels") or ("vae" in drawing.own and sampling.latent_channels is not None):
        yield _channels(subject, drawing, vae, recorded=recorded)
    if sampling.latent_scale is not None and (drawing.states("latent_scale") or "vae" in drawing.own):
        yield _vae_s(
            drawing, "latent_scale", sampling.latent_scale, vae.scale if vae is not None else None, recorded=recorded
        )
    if sampling.size_multiple is not None and drawing.states("size_multiple", "latent_scale"):
        yield _multiple(subject, drawing)
    yield from _frames(drawing, vae, recorded=recorded)
    if "vae" in drawing.own:
        yield from _published(subject, drawing)
    if drawing.states("takes"):
        for role, argument in drawing.said.takes.items():
            yield _taken(subject, drawing, role, argument)
    if drawing.where and drawing.own:
        for role in drawing.own.keys() & sampling.takes.keys():
            yield _taken(subject, drawing, role, sampling.takes[role])


def _published(subject: Subject, drawing: Drawing) -> Iterator[Fact]:
    """That the VAE's variant has the factors of the VAE that was published with an example's weights."""
    companion = drawing.companions["vae"]
    id_, _, variant = companion.partition("/")
    if subject.records is None or id_ not in subject.catalogue or variant not in subject.catalogue[id_].variants:
        return
    where, said = (*drawing.where, "companions", "vae"), f"vae {companion}"
    stated = subject.catalogue[id_].config_of(variant)
    for case in subject.cases:
        name = f"{(case.example.config or '').rpartition('.')[0]}.vae"
        folder = subject.records.folder.parent / "model_configs"
        if not _uses(subject, case, "vae", companion) or not (folder / f"{name}.json").is_file():
            continue
        published = subject.records.config(name)
        other = [key for key in stated if is_number(stated[key]) and key in published and stated[key] != published[key]]
        against = f"{name} has {', '.join(f'{key} {published[key]}' for key in other)}"
        yield Fact(where, said, "" if other else "published configurations", against, final=bool(other))


def _vae_s(drawing: Drawing, field: str, value: int, shown: int | None, *, recorded: bool) -> Fact:
    """That a number is the VAE's; where only its class's defaults are known, that of the pipeline may be it."""
    where, said = (*drawing.where, "sampling", field), f"{field} {value}"
    if shown == value:
        return Fact(where, said, _HEADER if recorded else _DEFAULTS)
    if shown is not None and recorded:
        return Fact(where, said, against=f"it is {shown} of {drawing.companions['vae']}", final=True)
    alone = _pipeline_s_scale(drawing)
    by = "the pipeline's own defaults" if field == "latent_scale" and value == alone else ""
    against = f"it is {shown or alone} by the defaults of {drawing.companions.get('vae')}"
    return Fact(where, said, by, against, value=value)


def _pipeline_s_scale(drawing: Drawing) -> int | None:
    """What a pipeline without parts takes the VAE's scale to be."""
    source = pipeline_source(drawing.sampling.pipeline)
    if source is None:
        return None
    try:
        empty = source.kind(**dict.fromkeys(source.parts))
    except Exception:
        return None
    names = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    return next((int(value) for name in names if isinstance(value := getattr(empty, name, None), int)), None)


def _channels(subject: Subject, drawing: Drawing, vae: VaeShapes | None, *, recorded: bool) -> Fact:
    where = (*drawing.where, "sampling", "latent_channels")
    value = drawing.sampling.latent_channels
    said = f"latent_channels {value}"
    if recorded and vae is not None and vae.channels != value:
        against = f"{drawing.companions['vae']} has {vae.channels}, a recorded header shows"
        return Fact(where, said, against=against, final=True)
    argument = drawing.sampling.takes.get("vae")
    cases = _cases_of(subject, drawing, "latent_channels")
    for case in cases:
        assert case.built is not None
        given = case.built.arguments.get(argument) if argument else None
        if given is not None and given != value:
            against = f"{case.example.header} has {argument} {given}, which takes them"
            return Fact(where, said, against=against, final=True)
    if recorded or (argument and cases):
        return Fact(where, said, _HEADER)
    packed = [value * many for many in _PACKED if value]
    if any(_in_and_out(case.built.arguments) & {*packed} for case in cases if case.built is not None):
        return Fact(where, said, _HEADER)
    if (vae is not None and vae.channels == value) or (_in_and_out(_defaults(drawing.model)) & {*packed}):
        return Fact(where, said, _DEFAULTS)
    shown = f"the VAE's class has {vae.channels}" if vae is not None else "nothing shows it"
    return Fact(where, said, against=shown, value=value)


def _in_and_out(arguments: Mapping[str, Any]) -> set[int]:
    names = ("in_channels", "out_channels", "in_visual_dim", "out_visual_dim")
    return {value for name in names if isinstance(value := arguments.get(name), int)}


def _defaults(model: str) -> dict[str, Any]:
    parameters = inspect.signature(model_class(model).__init__).parameters
    return {name: value.default for name, value in parameters.items() if value.default is not value.empty}


def _cases_of(subject: Subject, drawing: Drawing, field: str) -> list[Case]:
    """The examples for which a field of ``sampling`` holds as this place says it."""
    variants = subject.family.variants
    return [
        case
        for case in subject.cases
        if case.match is not None
        and case.built is not None
        and (
            case.match.variant == drawing.variant
            or (
                drawing.variant is None
                and (case.match.variant is None or field not in variants[case.match.variant].sampling.model_fields_set)
            )
        )
    ]


def _multiple(subject: Subject, drawing: Drawing) -> Fact:
    """That sizes are whole patches of latents, as the class or the packing has them, or what the pipeline asks for."""
    sampling, where = drawing.sampling, (*drawing.where, "sampling", "size_multiple")
    value, scale = sampling.size_multiple or 1, sampling.latent_scale or 1
    said = f"size_multiple {value}"
    cases = _cases_of(subject, drawing, "size_multiple")
    arguments = [case.built.arguments for case in cases if case.built is not None]
    tokens = {scale * patch for given in arguments or [_defaults(drawing.model)] for patch in _patches(given, sampling)}
    parted = next((token for token in {scale, *tokens} if value % token), None)
    if parted is not None:
        return Fact(where, said, against=f"that is no multiple of {parted}, which is one token", final=True)
    if value in tokens:
        return Fact(where, said, _HEADER if arguments else _DEFAULTS)
    asked = set(_asked(drawing, scale))
    if value in asked:
        return Fact(where, said, "the pipeline's own check")
    known = ", ".join(map(str, sorted(tokens | asked)))
    return Fact(where, said, against=f"it is {known}" if known else "", final=bool(tokens | asked))


_CHECK = re.compile(r"height % \(?(?:self\.vae_scale_factor\w* \* )?(\d+)\)? != 0")


def _asked(drawing: Drawing, scale: int) -> Iterator[int]:
    """Of what the pipeline asks heights to be multiples."""
    source = pipeline_source(drawing.sampling.pipeline)
    for found in _CHECK.finditer(source.text if source is not None else ""):
        yield int(found[1]) * (scale if "vae_scale_factor" in found[0] else 1)


def _patches(arguments: Mapping[str, Any], sampling: Any) -> Iterator[int]:
    """The sides of patches, in latents, that a model's arguments speak for."""
    for name, value in arguments.items():
        if name in ("patch_size", "all_patch_size", "patch_size_hw"):
            given = value[-1] if isinstance(value, list | tuple) and value else value
            if isinstance(given, int) and given > 1:
                yield given
                return
    channels = arguments.get("in_channels")
    if isinstance(channels, int) and sampling.latent_channels:
        yield 2 if channels == 4 * sampling.latent_channels else 1


def _frames(drawing: Drawing, vae: VaeShapes | None, *, recorded: bool) -> Iterator[Fact]:
    """That a family that draws videos says how many frames the VAE makes one of, as it shows."""
    source, sampling = pipeline_source(drawing.sampling.pipeline), drawing.sampling
    films = source is not None and "num_frames" in source.call and (vae is None or vae.frames > 1)
    if (films and drawing.states("pipeline", "latent_frames")) or drawing.states("latent_frames"):
        where = (*drawing.where, "sampling", "latent_frames" if drawing.states("latent_frames") else "pipeline")
        given, shown = sampling.latent_frames, vae.frames if vae is not None else None
        if given == shown and shown is not None:
            yield Fact(where, f"latent_frames {given}", _HEADER if recorded else _DEFAULTS)
        else:
            against = "" if shown is None else f"the VAE makes one frame of {shown}"
            yield Fact(where, f"latent_frames {given}", against=against, final=shown is not None)


def _taken(subject: Subject, drawing: Drawing, role: str, argument: str) -> Fact:
    """That the denoiser's argument is there, and as large as what the companion gives."""
    own = "takes" in drawing.said.model_fields_set
    where = (*drawing.where, "sampling", "takes", role) if own else (*drawing.where, "companions", role)
    said = f"{role} by {argument}"
    companion = drawing.companions.get(role)
    if argument not in inspect.signature(model_class(drawing.model).__init__).parameters:
        return Fact(where, said, against=f"{drawing.model} has no such argument", final=True)
    if companion is None:
        return Fact(where, said, against="that is none of companions", final=True)
    given = _given(subject, companion)
    cases = [case for case in subject.cases if case.match is not None and _uses(subject, case, role, companion)]
    for case in cases:
        taken = case.built.arguments.get(argument) if case.built is not None else None
        if given is not None and taken is not None and taken != given:
            against = f"{case.example.header} takes {taken}, {companion} gives {given}"
            return Fact(where, said, against=against, final=True)
    if given is not None and cases:
        return Fact(where, said, _HEADER)
    default = _defaults(drawing.model).get(argument)
    if given is not None and default == given:
        return Fact(where, said, _DEFAULTS)
    width = drawing.sampling.latent_channels if role == "vae" else None
    shown = [default, *(case.built.arguments.get(argument) for case in cases if case.built is not None)]
    if width is not None and width in shown:
        return Fact(where, said, _HEADER if cases else _DEFAULTS)
    return Fact(where, said, against=f"{argument} is {default} by the class's default, {companion} gives {given}")


def _uses(subject: Subject, case: Case, role: str, companion: str) -> bool:
    assert case.match is not None
    variant = case.match.variant
    own = subject.family.variants[variant].companions if variant is not None else {}
    return own.get(role, subject.family.companions.get(role)) == companion


def _given(subject: Subject, companion: str) -> int | None:
    """How wide a companion's output is, by a recorded header of it; None where none shows it."""
    if is_class(companion):
        return None
    id_, _, variant = companion.partition("/")
    if id_ not in subject.catalogue:
        return None
    match = recorded_match(subject.catalogue[id_], variant or None, subject.records)
    return None if match is None else output_width(match)
