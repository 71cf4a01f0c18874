"""Which family a checkpoint is of: every family is asked, exactly one must win, and the answer carries its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipcast.registry.catalogue import Catalogue
from slipcast.registry.claims import (
    ARCHITECTURE,
    Answer,
    Layout,
    VariantChoice,
    ask,
    choose_variant,
    plausible,
    strip_prefix,
    wanted_variant,
    word_in,
)
from slipcast.registry.config import infer_config
from slipcast.registry.errors import IdentificationError
from slipcast.registry.evidence import absence, asked_of, weigh
from slipcast.registry.family import Family, Variant
from slipcast.registry.header import Checkpoint, Header
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.quantisation import Bundle, Bundles, assemble
from slipcast.registry.strangers import claimed_twice, unclaimed


@dataclass(frozen=True, slots=True)
class Match:
    """One model found in a checkpoint.

    Attributes:
        header: where its tensors lie.
        component: its folder in a pipeline folder; "" elsewhere.
        family: the family that claims it.
        variant: a variant of the family, or None.
        layout: whose names the tensors bear; None where the family's names and the model's are one.
        prefix: what stands before each of its names in the file.
        bundles: its weights by name, without the prefix and without what another family describes.
        everything: all tensors of the file, sorted.
        config: constructor arguments of the model class.
        evidence: what was seen, as sentences.
        guesses: what no tensor shows, as sentences.
        part: where its tensors lie in a file of several models: its prefix without the last dot; "" elsewhere.
    """

    header: Header
    component: str
    family: Family
    variant: str | None
    layout: Layout | None
    prefix: str
    bundles: Mapping[str, Bundle]
    everything: Bundles
    config: Mapping[str, Any]
    evidence: tuple[str, ...]
    guesses: tuple[str, ...] = ()
    part: str = ""

    @property
    def model(self) -> str:
        """The class that is built, ``library.Name``."""
        return self.family.model_of(self.variant)

    @property
    def key_map(self) -> KeyMap:
        """What the file's names are in the model's."""
        return self.family.key_map_of(self.layout)

    @property
    def name(self) -> str:
        """What tells it from the other models of the checkpoint; "" where it is the only one."""
        return "/".join(filter(None, (self.component, self.part)))


def identify(
    checkpoint: Checkpoint, catalogue: Catalogue, *, family: str | None = None, needed: str | None = None
) -> tuple[Match, ...]:
    """Find the models that a checkpoint holds.

    Args:
        checkpoint: the headers, as ``read_checkpoint`` gives them.
        catalogue: every known family.
        family: ask this family alone; it must still find its evidence.
        needed: what a pipeline needs, ``ID`` or ``ID/VARIANT``: of a model of that family this variant is taken
            where no tensor shows another.

    Returns:
        One match for each model in a file, and for each recognised component of a pipeline folder. Never empty.

    Raises:
        IdentificationError: no family claims any component, or two claim the same tensors.
    """
    asked = catalogue if family is None else Catalogue({family: catalogue[family]})
    matches: list[Match] = []
    failures: list[IdentificationError] = []
    for component, header in checkpoint.headers.items():
        bundles = assemble(header)
        try:
            matches += _identify_header(header, component, bundles, asked, needed)
        except IdentificationError as error:
            failures.append(error)
    ambiguous = [failure for failure in failures if failure.candidates]
    if ambiguous or not matches:
        raise (ambiguous or failures)[0]
    return tuple(matches)


def _identify_header(
    header: Header, component: str, bundles: Bundles, catalogue: Catalogue, needed: str | None
) -> Iterator[Match]:
    path = header.path / component if component else header.path
    architecture = header.metadata.get(ARCHITECTURE)
    answers = ask(bundles.weights, plausible(bundles.weights, catalogue), architecture)
    claims = [answer for answer in answers if answer.evidence.complete]
    if not claims:
        raise unclaimed(path, bundles.weights, ask(bundles.weights, catalogue, architecture))
    if not all(are_apart(one, other) for one, other in combinations(claims, 2)):
        raise claimed_twice(path, claims)
    for claim in claims:
        part = claim.prefix.removesuffix(".") if len(claims) > 1 else ""
        wanted = (
            _configured_variant(claim, header)
            or wanted_variant(claim, claims, header.path)
            or _needed_variant(claim, needed, header.path)
        )
        yield _match(header, component, bundles, claim, part, wanted)


def _configured_variant(claim: Answer, header: Header) -> VariantChoice | None:
    """The variant whose class, other than the family's, a folder's config.json names; or whose constants it has.

    Where it has as many of another's, as in a file that was corrected and published anew, neither is taken.
    """
    config = header.config or {}
    fitting = {name: each for name, each in claim.family.variants.items() if weigh(each, claim.names).complete}
    for name, variant in fitting.items():
        if variant.model is not None and variant.model.partition(".")[2] == config.get("_class_name"):
            return VariantChoice(name, "config.json names its class", False)
    alike = {
        name: [f"{key}: {value}" for key, value in _constants(variant).items() if config.get(key) == value]
        for name, variant in fitting.items()
    }
    most = max(map(len, alike.values()), default=0)
    best = [name for name, values in alike.items() if values and len(values) == most]
    if len(best) != 1 or most < len(_constants(fitting[best[0]])):
        return None
    return VariantChoice(best[0], f"config.json has {', '.join(alike[best[0]])}", False)


def _constants(variant: Variant) -> dict[str, float]:
    """The arguments of a variant that no tensor shows, as a scale of latents."""
    return {name: value for name, value in variant.config.items() if isinstance(value, int | float)}


def _needed_variant(claim: Answer, needed: str | None, path: Path) -> VariantChoice | None:
    """The variant that a pipeline needs of a model, if it needs that model.

    Not against a word in the file's name for a variant with other constants: no tensor shows which are right.
    """
    id_, _, wanted = (needed or "").partition("/")
    variants = claim.family.variants
    if id_ != claim.family.id or wanted not in variants:
        return None
    named = [name for name, variant in variants.items() if word_in(path, variant) is not None]
    if wanted not in named and any(_constants(variants[name]) != _constants(variants[wanted]) for name in named):
        return None
    return VariantChoice(wanted, "the pipeline needs it", False)


def are_apart(one: Answer | Match, other: Answer | Match) -> bool:
    """Whether two claims on one file are on different models: under prefixes that differ, or one inside the other."""
    outer, inner = sorted((one, other), key=lambda claim: len(claim.prefix))
    if not inner.prefix.startswith(outer.prefix):
        return True
    return (inner.prefix.removeprefix(outer.prefix), inner.family.id) in outer.family.contains.items()


def _match(
    header: Header, component: str, bundles: Bundles, claim: Answer, part: str, wanted: VariantChoice | None
) -> Match:
    family, names = claim.family, claim.names
    variant = choose_variant(family.variants, names, header.path, wanted)
    evidence = [
        f"found {name} {list(names[name])}" if name in names else f"found {name}.*" for name in claim.evidence.found
    ]
    evidence += absence(claim.evidence)
    evidence += [f"what the family asks of {', '.join(asked_of(condition))} holds" for condition in claim.evidence.held]
    if claim.prefix:
        evidence.append(f"under the prefix {claim.prefix}")
    guesses: list[str] = []
    if variant is not None:
        (guesses if variant.guessed else evidence).append(f"variant {variant.name}: {variant.reason}")
    return Match(
        header=header,
        component=component,
        family=family,
        variant=variant.name if variant is not None else None,
        layout=claim.layout if family.key_map.rules or claim.layout in family.namings else None,
        prefix=claim.prefix,
        bundles=MappingProxyType(
            {
                name: bundle
                for name, bundle in strip_prefix(bundles.weights, claim.prefix).items()
                if family.key_map.contained(name) is None
            }
        ),
        everything=bundles,
        config=infer_config(family, names, header, variant.name if variant is not None else None),
        evidence=tuple(evidence),
        guesses=tuple(guesses),
        part=part,
    )
