"""A denoiser with all that its pipeline needs, found without torch: the path, its family's facts, and each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.catalogue import Catalogue, load_catalogue
from slipcast.registry.companion_search import CompanionSearch
from slipcast.registry.companion_widths import refuse_other_widths
from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError, IdentificationError
from slipcast.registry.experts import refuse_other_experts
from slipcast.registry.family import Family
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.identify import Match
from slipcast.registry.inspection import Identified, identify_path
from slipcast.registry.pipeline_index import PipelineIndex, index_around, read_index
from slipcast.registry.runtime import Sampling
from slipcast.registry.settings import Settings

_PASSED_OVER = "the pipeline's folder lists it, the family file does not: it is not loaded"


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """What a pipeline is made of.

    Attributes:
        path: what the user named, or the file that a folder stands for.
        family: the family that describes the pipeline: the denoiser's, or the one whose pipeline a folder names.
        variant: a variant of it, or None.
        sampling: what it is sampled with.
        pipeline: name of the diffusers class.
        arguments: the pipeline's arguments that are no parts.
        parts: every part, the denoiser first.
        absent: roles that stay empty, with the reason.
    """

    path: Path
    family: Family
    variant: str | None
    sampling: Sampling
    pipeline: str
    arguments: Mapping[str, Any]
    parts: tuple[Companion, ...]
    absent: Mapping[str, str]

    @property
    def denoiser(self) -> Companion:
        """The denoiser."""
        return self.parts[0]


def find_pipeline(path: str | Path, settings: Settings) -> FoundPipeline:
    """Find what a pipeline is made of.

    Each part is taken from the first of these that has it: the setting ``companions.ROLE``; the pipeline's folder,
    where the path is one or lies in one; the same file; the setting ``companions.folder``; what lies beside the file.
    A scheduler is otherwise made from the family's arguments, a tokenizer taken from its text encoder's folder.

    Args:
        path: a denoiser's file or folder, a file of several models, or a pipeline's folder.
        settings: families, family, component, companions and header_limit_mib matter.

    Raises:
        CompanionError: parts are missing, or not what the pipeline needs: all of them, with what would satisfy each.
        IdentificationError: the path holds no denoiser, or one whose family has no pipeline.
        SlipcastError: whatever reading and identifying raises.
    """
    identified = identify_path(path, settings)
    path, main = identified.checkpoint.path, identified.main
    _refuse_other_kind(path, main)
    index = index_around(path)
    around = None if settings.companions.folder is None else read_index(Path(settings.companions.folder))
    family, variant, sampling = _description(main, index, around, load_catalogue(settings.families))
    pipeline = _pipeline_class(family, sampling, index, path)
    needed = dict(family.companions)
    needed |= family.variants[variant].companions if variant is not None else {}
    needed |= {match.component: match.family.id for match in identified.matches if _is_second(match, main)}
    denoiser = _denoiser(path, identified, sampling, inside=index is not None and index.folder == path)
    if index is None:
        refuse_other_experts((denoiser,), sampling)  # before another is looked for by its name
    search = CompanionSearch(path, identified, index, sampling, settings)
    parts, absent = search.find_all(needed)
    refuse_other_widths(main, parts, sampling)
    if index is None:
        refuse_other_experts((denoiser, *parts), sampling)
    listed = {} if index is None else index.classes
    passed_over = {role: _PASSED_OVER for role in listed if role not in {denoiser.role, *needed}}
    return FoundPipeline(
        path=path,
        family=family,
        variant=variant,
        sampling=sampling,
        pipeline=pipeline,
        arguments=FrozenMapping(_arguments(sampling, index, around)),
        parts=(denoiser, *parts),
        absent=FrozenMapping({**absent, **passed_over}),
    )


def _refuse_other_kind(path: Path, main: Match) -> None:
    if main.family.kind != "denoiser":
        raise IdentificationError(
            f"a {main.family.kind.replace('_', ' ')}, {main.family.title}, and no denoiser",
            expected="a denoiser, from which a pipeline begins",
            hint="name the denoiser's file, and this one by the setting companions",
            path=path,
        )


def _denoiser(path: Path, identified: Identified, sampling: Sampling, *, inside: bool) -> Companion:
    """The denoiser that a path is, or that lies inside the pipeline's folder that it is."""
    main = identified.main
    return Companion(
        role=main.component if inside else sampling.denoiser,
        kind="model",
        class_name=main.model,
        found="in the pipeline's folder" if inside else "the path itself",
        path=path / main.component if inside else path,
        match=main,
        beside=identified.beside,
    )


def _is_second(match: Match, main: Match) -> bool:
    """Whether a component of a pipeline's folder is a denoiser beside the first, as of two experts."""
    return match.component != main.component and match.family.id == main.family.id


def _description(
    main: Match, index: PipelineIndex | None, companions: PipelineIndex | None, catalogue: Catalogue
) -> tuple[Family, str | None, Sampling]:
    """The family and variant whose facts hold for the pipeline: those that a folder's class is of, else the denoiser's.

    Two families can share a denoiser's class and tensors, and differ in the pipeline around it. The denoiser's own
    folder also tells variants apart; that of the companions is another denoiser's, and may be another variant's.
    """
    own = main.family, main.variant, _sampling(main.family, main.variant)
    relatives = [family for id_ in catalogue if (family := catalogue[id_]).model == main.family.model]
    if index is not None and index.pipeline not in (own[2].pipeline, own[2].image_to_image):
        return _of_pipeline(index.pipeline, main.family, relatives) or own
    if index is None and companions is not None and _of_pipeline(companions.pipeline, main.family, ()) is None:
        return _of_pipeline(companions.pipeline, None, relatives) or own
    return own


def _of_pipeline(
    pipeline: str, first: Family | None, others: Iterable[Family]
) -> tuple[Family, str | None, Sampling] | None:
    """The family and variant that a pipeline's class is of; None where it is of none."""
    for family in ([] if first is None else [first]) + [family for family in others if family is not first]:
        for variant in _variants(family):
            sampling = _sampling(family, variant)
            if pipeline and sampling.pipeline == pipeline:
                return family, variant, sampling
    return None


def _variants(family: Family) -> Iterator[str | None]:
    """The variants of a family, the one that is assumed first."""
    yield from sorted(family.variants, key=lambda name: not family.variants[name].default)
    if not family.variants:
        yield None


def _sampling(family: Family, variant: str | None) -> Sampling:
    own = family.sampling or Sampling()
    return own if variant is None else own.joined(family.variants[variant].sampling)


def _pipeline_class(family: Family, sampling: Sampling, index: PipelineIndex | None, path: Path) -> str:
    if sampling.pipeline is None:
        raise IdentificationError(
            f"{family.title}, whose family file names no pipeline",
            expected="a family whose sampling: names a pipeline of diffusers",
            hint="load the denoiser alone, with slipcast.load, or add the pipeline to the family file",
            path=path,
        )
    if index is None or index.pipeline in ("", sampling.pipeline, sampling.image_to_image):
        return sampling.pipeline
    raise CompanionError(
        f"a folder of the pipeline {index.pipeline!r}",
        expected=f"one that {family.title} has: {sampling.pipeline}"
        + (f" or {sampling.image_to_image}" if sampling.image_to_image else ""),
        hint="name the denoiser in it, as FOLDER/transformer, and the parts by the setting companions",
        path=index.folder,
        roles=(sampling.denoiser,),
    )


def _arguments(sampling: Sampling, index: PipelineIndex | None, companions: PipelineIndex | None) -> dict[str, Any]:
    """Plain values for the pipeline's class; which of them it takes is seen when it is built.

    The denoiser's own folder knows best, the family file better than a folder that is another denoiser's.
    """
    alike = companions is not None and companions.pipeline == sampling.pipeline
    others = companions.arguments if companions is not None and alike else {}
    own = index.arguments if index is not None else {}
    return {**others, **sampling.arguments, **own}
