"""What a checkpoint is, as one value: the answer of ``slipcast inspect``. Made without torch and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.catalogue import Catalogue, load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import IdentificationError
from slipcast.registry.header import Checkpoint
from slipcast.registry.identify import Match, are_apart, identify
from slipcast.registry.parts import choose_component, unclaimed_parts
from slipcast.registry.quantisation import Bundles, assemble, count_formats
from slipcast.registry.settings import Settings


@dataclass(frozen=True, slots=True)
class Component:
    """One recognised model inside a checkpoint.

    Attributes:
        name: its folder in a pipeline folder; in a file of several its prefix without the last dot; "" for the only
            one.
        family: id of its family.
        kind: denoiser, text_encoder, vae or controlnet.
        variant: a variant of the family, or None.
        layout: whose names it bears; None where the two namings are one.
        prefix: what stands before each of its names.
        formats: format name -> number of weights.
        tensors: number of its tensors, scales and markers of its weights included.
        nbytes: bytes of these.
    """

    name: str
    family: str
    kind: str
    variant: str | None
    layout: str | None
    prefix: str
    formats: Mapping[str, int]
    tensors: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "family": self.family,
            "kind": self.kind,
            "variant": self.variant,
            "layout": self.layout,
            "prefix": self.prefix,
            "formats": dict(self.formats),
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a path holds.

    Attributes:
        path: what was inspected; of a folder that stands for a file, that file.
        container: how the tensors are packed.
        components: the recognised models, the main one first.
        tensors: number of tensors in all files.
        nbytes: bytes of all tensors.
        formats: format name -> number of weights, over all files.
        evidence: what the main one was recognised by.
        guesses: what no tensor shows.
        problems: scales without a weight, unreadable markers, components and parts of files that no family claims.
        config: the main model's constructor arguments.
    """

    path: Path
    container: str
    components: tuple[Component, ...]
    tensors: int
    nbytes: int
    formats: Mapping[str, int]
    evidence: tuple[str, ...]
    guesses: tuple[str, ...]
    problems: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def main(self) -> Component:
        """The denoiser where there is one, else the first component."""
        return self.components[0]

    def to_dict(self) -> dict[str, Any]:
        """The contract of ``slipcast inspect --json``."""
        return {
            "path": str(self.path),
            "container": self.container,
            "family": self.main.family,
            "variant": self.main.variant,
            "layout": self.main.layout,
            "prefix": self.main.prefix,
            "formats": dict(self.formats),
            "components": [component.to_dict() for component in self.components],
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "evidence": list(self.evidence),
            "guesses": list(self.guesses),
            "problems": list(self.problems),
            "config": dict(self.config),
        }


@dataclass(frozen=True, slots=True)
class Identified:
    """A checkpoint with its matches.

    Attributes:
        checkpoint: its headers.
        matches: the models that were asked for, the main one first.
        beside: every other model in the file of the main one.
    """

    checkpoint: Checkpoint
    matches: tuple[Match, ...]
    beside: tuple[Match, ...]

    @property
    def main(self) -> Match:
        """The denoiser where there is one, else the first match."""
        return self.matches[0]


def identify_path(path: str | Path, settings: Settings, *, needed: str | None = None) -> Identified:
    """Read the headers that a path holds and identify them.

    Args:
        path: as for ``read_checkpoint``.
        settings: families, family, component and header_limit_mib matter.
        needed: as for ``identify``.

    Raises:
        SettingsError: the settings ask for a family or a component that is not there.
        SlipcastError: whatever reading and identifying raises.
    """
    catalogue = load_catalogue(settings.families)
    checkpoint = read_checkpoint(path, limit_mib=settings.header_limit_mib)
    if settings.family is not None:
        catalogue.refuse_unknown(settings.family)
    matches = identify(checkpoint, catalogue, family=settings.family, needed=needed)
    known = matches if settings.family is None else _identified(checkpoint, catalogue)
    if settings.component is not None:
        matches = (choose_component(settings.component, matches, unclaimed_parts(known or matches)),)
    main, *rest = sorted(matches, key=lambda match: match.family.kind != "denoiser")
    in_its_file = [match for match in known if match.component == main.component and match.family.id != main.family.id]
    return Identified(checkpoint, (main, *rest), tuple(match for match in in_its_file if are_apart(match, main)))


def _identified(checkpoint: Checkpoint, catalogue: Catalogue) -> tuple[Match, ...]:
    """What is found without the setting ``family``; nothing where that setting is what settles whose the file is."""
    try:
        return identify(checkpoint, catalogue)
    except IdentificationError:
        return ()


def inspect_path(path: str | Path, settings: Settings) -> Inspection:
    """Say what a path holds.

    Raises:
        SlipcastError: the path can't be read, or no family claims any of it.
    """
    identified = identify_path(path, settings)
    headers = identified.checkpoint.headers
    claimed = {match.component for match in identified.matches}
    everything = {match.component: match.everything for match in identified.matches}
    everything |= {name: assemble(header) for name, header in headers.items() if name not in claimed}
    weights = [bundle for bundles in everything.values() for bundle in bundles.weights.values()]
    return Inspection(
        path=identified.checkpoint.path,
        container=identified.main.header.container,
        components=tuple(_component(match) for match in identified.matches),
        tensors=sum(len(header.tensors) for header in headers.values()),
        nbytes=sum(header.nbytes for header in headers.values()),
        formats=count_formats(weights),
        evidence=identified.main.evidence,
        guesses=identified.main.guesses,
        problems=(
            *_problems(everything, claimed),
            *map(str, unclaimed_parts((*identified.matches, *identified.beside))),
        ),
        config=identified.main.config,
    )


def _component(match: Match) -> Component:
    return Component(
        name=match.name,
        family=match.family.id,
        kind=match.family.kind,
        variant=match.variant,
        layout=match.layout,
        prefix=match.prefix,
        formats=count_formats(match.bundles.values()),
        tensors=sum(len(bundle.tensors) for bundle in match.bundles.values()),
        nbytes=sum(tensor.nbytes for bundle in match.bundles.values() for tensor in bundle.tensors),
    )


def _problems(everything: Mapping[str, Bundles], claimed: Iterable[str]) -> Iterable[str]:
    for name, bundles in everything.items():
        yield from bundles.problems
        yield from (f"no weight consumes {tensor.name}" for tensor in bundles.orphans)
        if name not in claimed:
            yield f"no family claims the component {name}"
