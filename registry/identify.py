"""Which family a checkpoint is of: every family is asked, exactly one must win, and the answer carries its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from slipcast.registry.config import infer_config
from slipcast.registry.errors import IdentificationError
from slipcast.registry.evidence import Evidence, weigh
from slipcast.registry.family import Family, Variant
from slipcast.registry.header import Checkpoint, Header, Shape
from slipcast.registry.quantisation import Bundle, Bundles, assemble, count_formats

Layout = Literal["native", "diffusers"]


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
        bundles: its weights by name, without the prefix.
        everything: all tensors of the file, sorted.
        config: constructor arguments of the model class.
        evidence: what was seen, as sentences.
        guesses: what no tensor shows, as sentences.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One family's answer to one header, under the prefix and in the naming where it found most.

    Attributes:
        family: the family that was asked.
        prefix: the prefix under which it found most.
        layout: the naming in which it found most.
        evidence: what it found and missed.
        shapes: native names and logical shapes as the family reads them.
    """

    family: Family
    prefix: str
    layout: Layout
    evidence: Evidence
    shapes: Mapping[str, Shape] = field(default_factory=lambda: MappingProxyType({}))


def identify(
    checkpoint: Checkpoint, catalogue: Mapping[str, Family], *, family: str | None = None
) -> tuple[Match, ...]:
    """Find the models that a checkpoint holds.

    Args:
        checkpoint: the headers, as ``read_checkpoint`` gives them.
        catalogue: every known family.
        family: ask this family alone; it must still find its evidence.

    Returns:
        One match for a file of one model, one for each recognised component of a pipeline folder. Never empty.

    Raises:
        IdentificationError: no family claims any component, or two claim the same one.
    """
    asked = {family: catalogue[family]} if family is not None else catalogue
    matches: list[Match] = []
    failures: list[IdentificationError] = []
    for component, header in checkpoint.headers.items():
        bundles = assemble(header)
        try:
            matches.append(_identify_header(header, component, bundles, asked))
        except IdentificationError as error:
            failures.append(error)
    if not matches or any(len(failure.candidates) > 1 for failure in failures):
        raise failures[0]
    return tuple(matches)


def ask(header: Header, bundles: Bundles, catalogue: Mapping[str, Family]) -> tuple[Answer, ...]:
    """Every family's answer to a header, the one that found most of its evidence first."""
    answers = [_best_answer(bundles.weights, family) for family in catalogue.values()]
    return tuple(
        sorted(answers, key=lambda answer: (not answer.evidence.complete, -answer.evidence.share, answer.family.id))
    )


def _identify_header(header: Header, component: str, bundles: Bundles, catalogue: Mapping[str, Family]) -> Match:
    answers = ask(header, bundles, catalogue)
    claims = [answer for answer in answers if answer.evidence.complete]
    if len(claims) != 1:
        raise _unidentified(header, component, bundles, answers, claims)
    return _match(header, component, bundles, claims[0])


def _best_answer(weights: Mapping[str, Bundle], family: Family) -> Answer:
    """Try the prefixes from long to short, and under each the native names before the model's."""
    best: Answer | None = None
    for prefix in sorted(family.prefixes, key=len, reverse=True):
        shapes = {name[len(prefix) :]: bundle.shape for name, bundle in weights.items() if name.startswith(prefix)}
        if not shapes:
            continue
        for layout in ("native", "diffusers"):
            view = shapes if layout == "native" else family.key_map.native_view(shapes)
            evidence = weigh(family.identify, view)
            answer = Answer(family, prefix, layout, evidence, view)
            if evidence.complete:
                return answer
            if best is None or evidence.share > best.evidence.share:
                best = answer
    return best or Answer(family, family.prefixes[-1], "native", weigh(family.identify, {}))


def _match(header: Header, component: str, bundles: Bundles, claim: Answer) -> Match:
    family, prefix = claim.family, claim.prefix
    variant, reason, guessed = choose_variant(family.variants, claim.shapes, header.path)
    seen = [
        f"{name} {list(claim.shapes[name])}" if name in claim.shapes else f"{name}.*" for name in claim.evidence.found
    ]
    evidence = (
        [f"found {what}" for what in seen]
        + [f"no {name}" for name in claim.evidence.absent]
        + list(claim.evidence.held)
    )
    if prefix:
        evidence.append(f"under the prefix {prefix}")
    if variant is not None and not guessed:
        evidence.append(f"variant {variant}: {reason}")
    own = {name[len(prefix) :]: bundle for name, bundle in bundles.weights.items() if name.startswith(prefix)}
    same_names = (
        claim.shapes.keys() == dict.fromkeys(own).keys()
        and claim.layout == "native"
        and _maps_nothing(family)
    )
    return Match(
        header=header,
        component=component,
        family=family,
        variant=variant,
        layout=None if same_names else claim.layout,
        prefix=prefix,
        bundles=MappingProxyType(own),
        everything=bundles,
        config=infer_config(family, claim.shapes, header),
        evidence=tuple(evidence),
        guesses=(f"variant {variant}: {reason}",) if variant is not None and guessed else (),
    )


def _maps_nothing(family: Family) -> bool:
    return not family.key_map.rules


def choose_variant(
    variants: Mapping[str, Variant], shapes: Mapping[str, Shape], path: Path
) -> tuple[str | None, str, bool]:
    """The variant, why, and whether it is a guess.

    What tensors show goes before what a file name says, and that before the default.
    """
    for name, variant in variants.items():
        if variant.has or variant.hasnt or variant.where:
            evidence = weigh(variant, shapes)
            if evidence.complete:
                return (
                    name,
                    ", ".join([*evidence.found, *(f"no {absent}" for absent in evidence.absent), *evidence.held]),
                    False,
                )
    for name, variant in variants.items():
        for word in variant.guess_from_filename:
            if word.lower() in path.name.lower():
                return name, f"the file name contains {word!r}", True
    for name, variant in variants.items():
        if variant.default:
            return name, "no tensor and no file name says otherwise", True
    return None, "", False


def _unidentified(
    header: Header, component: str, bundles: Bundles, answers: Sequence[Answer], claims: Sequence[Answer]
) -> IdentificationError:
    path = header.path / component if component else header.path
    if claims:
        return IdentificationError(
            "the families " + " and ".join(claim.family.id for claim in claims) + " both claim this checkpoint",
            expected="exactly one family whose evidence is complete",
            hint="force one with the setting family=ID, and sharpen identify: in the family files",
            path=path,
            items=[f"{claim.family.id}: " + ", ".join(claim.evidence.found) for claim in claims],
            candidates=tuple(claim.family.id for claim in claims),
        )
    nearest = answers[0] if answers else None
    missing = nearest.evidence.missing if nearest else ()
    seen = [f"{len(bundles.weights)} weights", "formats " + _listed(count_formats(bundles.weights.values()))]
    if prefixes := _top_prefixes(bundles.weights):
        seen.append("names begin with " + ", ".join(prefixes))
    kind = _kind_of_stranger(bundles.weights)
    return IdentificationError(
        f"no family claims this checkpoint{f' ({kind})' if kind else ''}: " + "; ".join(seen),
        expected="the evidence of one family"
        + (
            f"; the nearest is {nearest.family.id}, under the prefix {nearest.prefix!r}, which misses:"
            if nearest
            else ""
        ),
        hint="see 'slipcast explain PATH' for what each family looked for; 'slipcast new PATH --id ID' drafts a file for a new family",
        path=path,
        items=missing,
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _top_prefixes(names: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for name in names:
        first = name.partition(".")[0] + "."
        counts[first] = counts.get(first, 0) + 1
    return sorted(counts, key=lambda prefix: -counts[prefix])[:4]


def _kind_of_stranger(names: Iterable[str]) -> str:
    """A word for what is often given in place of a model."""
    leaves = {part for name in names for part in name.split(".")}
    if any(
        part.startswith(("lora_", "lokr_", "hada_")) or part in ("lora", "lora_A", "lora_B", "dora_scale")
        for part in leaves
    ):
        return "it looks like an adapter, which is loaded onto a model and is none"
    return ""
