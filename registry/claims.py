"""Asks families whether a header is theirs: under each prefix, in the file's native names and in the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipcast.registry.catalogue import Catalogue
from slipcast.registry.evidence import Evidence, weigh
from slipcast.registry.family import MODEL_NAMES, NATIVE_NAMES, Family, Variant
from slipcast.registry.header import Shape
from slipcast.registry.names import Names
from slipcast.registry.quantisation import Bundle
from slipcast.registry.signature import Signature

Layout = str
"""Whose names: ``native``, ``diffusers`` (the model's), or one of the family's ``namings``."""

ARCHITECTURE = "general.architecture"
"""The metadata in which a GGUF file says what it holds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One family's answer to one header, under the prefix and in the naming where it found most.

    Attributes:
        family: the family that was asked.
        prefix: the prefix under which it found most.
        layout: the naming in which it found most.
        evidence: what it found and missed.
        names: native names and logical shapes, as the family reads them.
    """

    family: Family
    prefix: str
    layout: Layout
    evidence: Evidence
    names: Names


def ask(
    weights: Mapping[str, Bundle], catalogue: Mapping[str, Family], architecture: str | None = None
) -> tuple[Answer, ...]:
    """Every family's answer to a header's weights, the one that found most of its evidence first.

    Args:
        weights: the header's weights.
        catalogue: the families to ask.
        architecture: what a GGUF file says that it holds.
    """
    under: dict[str, Names] = {}
    answers = [_best_answer(weights, family, architecture, under) for family in catalogue.values()]
    return tuple(
        sorted(answers, key=lambda answer: (not answer.evidence.complete, -answer.evidence.share, answer.family.id))
    )


def plausible(weights: Mapping[str, Bundle], catalogue: Catalogue) -> dict[str, Family]:
    """The families whose evidence may be complete, told by their signatures: asking one takes far longer."""
    under: dict[str, Names] = {}
    return {id_: catalogue[id_] for id_ in catalogue if _is_plausible(weights, catalogue.signature(id_), under)}


def _is_plausible(weights: Mapping[str, Bundle], signature: Signature, under: dict[str, Names]) -> bool:
    return any(signature.allows(_names_under(prefix, weights, under)) for prefix in signature.prefixes)


def _names_under(prefix: str, weights: Mapping[str, Bundle], under: dict[str, Names]) -> Names:
    if prefix not in under:
        under[prefix] = Names({name: bundle.shape for name, bundle in strip_prefix(weights, prefix).items()})
    return under[prefix]


def strip_prefix(weights: Mapping[str, Bundle], prefix: str) -> dict[str, Bundle]:
    """The weights that begin with a prefix, by the rest of their names."""
    return {name[len(prefix) :]: bundle for name, bundle in weights.items() if name.startswith(prefix)}


def _best_answer(
    weights: Mapping[str, Bundle], family: Family, architecture: str | None, under: dict[str, Names]
) -> Answer:
    """Try the prefixes from long to short, and under each the native names before the model's and others."""
    best: Answer | None = None
    for prefix in sorted(family.prefixes, key=len, reverse=True):
        for answer in _answers(family, prefix, _names_under(prefix, weights, under), architecture):
            if answer.evidence.complete:
                return answer
            if best is None or answer.evidence.share > best.evidence.share:
                best = answer
    assert best is not None  # a family has at least one prefix
    return best


def _answers(family: Family, prefix: str, names: Names, architecture: str | None) -> list[Answer]:
    native = Answer(family, prefix, NATIVE_NAMES, weigh(family.identify, names), names)
    if native.evidence.complete or not names:
        return [native]
    answers = [native, _answer_in(MODEL_NAMES, family, prefix, names)]
    for layout, naming in family.namings.items():
        if naming.architectures and architecture not in naming.architectures:
            continue
        model = family.naming_maps[layout].model_view(names)
        if model is not None:
            answers.append(_answer_in(layout, family, prefix, model))
    return answers


def _answer_in(layout: Layout, family: Family, prefix: str, model: Mapping[str, Shape]) -> Answer:
    """The answer to names of the model's, read back into native ones."""
    view = Names(family.key_map.native_view(model))
    return Answer(family, prefix, layout, weigh(family.identify, view), view)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A variant, why it was chosen, and whether that is a guess."""

    name: str
    reason: str
    guessed: bool


def choose_variant(
    variants: Mapping[str, Variant], names: Names, path: Path, wanted: VariantChoice | None = None
) -> VariantChoice | None:
    """The variant of a family; None where it has none that fits.

    What tensors show goes before what another model needs, that before what a file name says, and that before the
    default. A variant that asks for tensors and a word needs both, and goes before one that its tensors alone show.
    None is chosen against its own tensors.

    Args:
        variants: the family's variants.
        names: native names and logical shapes.
        path: the file, or the folder.
        wanted: the variant that another model of the same file has for its companion.
    """
    fitting: dict[str, str] = {}
    for name, variant in variants.items():
        evidence = weigh(variant, names)
        if evidence.complete:
            shown = [*evidence.found, *(f"no {absent}" for absent in evidence.absent), *evidence.held]
            fitting[name] = ", ".join(shown)
    said = {name: word for name in fitting if (word := word_in(path, variants[name])) is not None}
    for name, word in said.items():
        if fitting[name]:
            return VariantChoice(name, f"{fitting[name]}, and the file name contains {word!r}", True)
    for name, shown_by in fitting.items():
        if shown_by and not variants[name].guess_from_filename:
            return VariantChoice(name, shown_by, False)
    if wanted is not None and wanted.name in fitting:
        return wanted
    for name, word in said.items():
        return VariantChoice(name, f"the file name contains {word!r}", True)
    for name in fitting:
        if variants[name].default:
            return VariantChoice(name, "no tensor and no file name says otherwise", True)
    return None


def wanted_variant(claim: Answer, claims: Sequence[Answer], path: Path) -> VariantChoice | None:
    """The variant of one model that another of the same file has for its companion."""
    for other in claims:
        if other is not claim:
            family, chosen = other.family, choose_variant(other.family.variants, other.names, path)
            own = family.variants[chosen.name].companions if chosen is not None else {}
            for companion in {**family.companions, **own}.values():
                id_, _, name = companion.partition("/")
                if id_ == claim.family.id and name:
                    return VariantChoice(name, f"the {family.id} in the same file needs it", False)
    return None


def word_in(path: Path, variant: Variant) -> str | None:
    """The word of a variant that a file's name contains; None where it contains none."""
    return next((word for word in variant.guess_from_filename if word.lower() in path.name.lower()), None)
