"""What the proofs are about: a family file, its examples, and the models that it makes of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from slipcast.engine.build import build_on_meta
from slipcast.engine.check.records import PACKAGE, Records, builtin_folder
from slipcast.engine.model_tensors import ModelTensors, model_tensors
from slipcast.registry.catalogue import Catalogue
from slipcast.registry.errors import CheckError, SlipcastError
from slipcast.registry.family import Example, Family
from slipcast.registry.header import Checkpoint, Header, Shape
from slipcast.registry.identify import Match, are_apart, identify
from slipcast.registry.keymap.matching import RuleTree
from slipcast.registry.strict_yaml import Document, Where, dotted, load_yaml

BOOKKEEPING = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "model_type"})
"""Entries of a published configuration that say nothing of the model."""


@dataclass(frozen=True, eq=False)
class Built:
    """A model of the class, on the meta device.

    Attributes:
        model: the model.
        tensors: its tensors by name.
        shapes: its parameters and persistent buffers.
    """

    model: nn.Module
    tensors: ModelTensors
    shapes: Mapping[str, Shape]

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model was built with, the class's defaults included."""
        config: Any = self.model.config
        values = dict(config) if isinstance(config, Mapping) else config.to_dict()
        return {key: _plain(value) for key, value in values.items() if key[0] != "_" and key not in BOOKKEEPING}


@dataclass(frozen=True)
class SmallModel:
    """A small model of the section ``tiny:``.

    Attributes:
        config: the arguments that the family file gives it.
        built: the model.
        beside: native names and shapes of what its file holds and nobody loads.
    """

    config: Mapping[str, Any]
    built: Built
    beside: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """What diffusers' converter made of a small model's native file.

    Attributes:
        values: what the model has.
        theirs: what the converter made.
        how: of which model, in words.
        full_size: whether it is the published model that was converted, since the converter knows no other sizes.
    """

    values: Mapping[str, torch.Tensor]
    theirs: Mapping[str, torch.Tensor]
    how: str = ""
    full_size: bool = False


@dataclass(frozen=True)
class Case:
    """One example.

    Attributes:
        number: its index in the family file.
        example: what the file says of it.
        header: the recorded header; None where there is no such record.
        match: the header as one of this family; None where it is not recognised.
        beside: the other models in the header.
        built: the model that the inferred configuration makes; None where it makes none.
        problem: why one of them is missing.
    """

    number: int
    example: Example
    header: Header | None = None
    match: Match | None = None
    beside: tuple[Match, ...] = ()
    built: Built | None = None
    problem: SlipcastError | None = None


@dataclass(frozen=True)
class Subject:
    """A family, and everything that it is held against.

    Attributes:
        family: the family.
        catalogue: all families, this one among them.
        documents: its file, and that of the family that it extends.
        records: the recorded headers, or None where they are not there.
        cases: its examples; empty without records.
        small: its small models, the one that runs first; empty where it has none, or one that can't be built.
        tiny_problem: why a small model can't be built.
        scratch: a folder for files.
        conversions: what diffusers' converter made of the small models, once a proof has asked.
    """

    family: Family
    catalogue: Catalogue
    documents: Sequence[Document]
    records: Records | None
    cases: tuple[Case, ...]
    small: tuple[SmallModel, ...]
    tiny_problem: SlipcastError | None
    scratch: Path
    conversions: list[Converted] = field(default_factory=list)

    @property
    def tiny(self) -> Built | None:
        """The small model that runs, if there is one."""
        return self.small[0].built if self.small else None

    @property
    def built(self) -> list[Built]:
        """Every model that could be built."""
        examples = [case.built for case in self.cases if case.built is not None]
        return [*examples, *(small.built for small in self.small)]

    def at(self, where: Where) -> str:
        """Where an entry stands: ``family.yaml:12, keys.x_embedder``."""
        for length in range(len(where), 0, -1):
            for document in self.documents:
                if where[:length] in document.lines:
                    return f"{_short(document)}:{document.lines[where[:length]]}, {dotted(where)}"
        return f"{_short(self.documents[0])}, {dotted(where)}"

    def entry_of(self, name: str) -> Where:
        """The entry of the key map that a tensor of the model has its name in the file from; else the section."""
        rules = self.family.key_map.rules
        ((_, match),) = RuleTree(rules).match([name])
        return ("keys",) if match is None or match.term is None else rules[match.term[0]].where

    def refuted(self, found: str, *, expected: str, hint: str, where: Where, items: Sequence[str] = ()) -> CheckError:
        """The error of a proof that does not hold.

        Args:
            found: what refutes it.
            expected: what should be.
            hint: what to do.
            where: the entry of the family file that is to blame.
            items: the names concerned.
        """
        return CheckError(f"{self.at(where)}: {found}", expected=expected, hint=hint, items=items)


@contextmanager
def subject_of(family: Family, path: Path, catalogue: Catalogue, records: Records | None) -> Iterator[Subject]:
    """Gather what the proofs of a family need.

    Args:
        family: the family.
        path: its file.
        catalogue: all families, this one among them.
        records: the recorded headers, if they are there.
    """
    documents = [load_yaml(path)]
    if family.extends is not None:
        beside = path.with_name(f"{family.extends}.yaml")
        documents.append(load_yaml(beside if beside.is_file() else file_of(catalogue[family.extends])))
    small, tiny_problem = small_models_of(family)
    with tempfile.TemporaryDirectory(prefix="slipcast-check-") as scratch:
        yield Subject(
            family=family,
            catalogue=catalogue,
            documents=documents,
            records=records,
            cases=() if records is None else tuple(cases_of(family, records, catalogue)),
            small=small,
            tiny_problem=tiny_problem,
            scratch=Path(scratch),
        )


def file_of(family: Family) -> Path:
    """The file that a family was read from."""
    inside = family.source.removeprefix(f"{PACKAGE}/")
    return Path(family.source) if inside == family.source else builtin_folder() / inside


def identify_alone(family: Family, header: Header) -> Match:
    """A header as one of this family.

    Raises:
        SlipcastError: the family doesn't claim it, or its expressions don't fit it.
    """
    return identify(Checkpoint(header.path, MappingProxyType({"": header})), Catalogue({family.id: family}))[0]


def build(name: str, config: Mapping[str, object]) -> Built:
    """A model class with these arguments, on the meta device.

    Raises:
        ConfigError: the class refuses them.
        FamilyFileError: there is no such class.
    """
    model = build_on_meta(name, config)
    tensors = model_tensors(model)
    shapes = {
        name: tuple(tensor.shape) for name, tensor in chain(tensors.parameters.items(), tensors.persistent.items())
    }
    return Built(model, tensors, shapes)


def cases_of(family: Family, records: Records, catalogue: Catalogue) -> Iterator[Case]:
    """The examples of a family; one whose header is missing, not the family's or unbuildable says why."""
    known: dict[str, Built] = {}
    for number, example in enumerate(family.examples):
        header: Header | None = None
        match: Match | None = None
        beside: tuple[Match, ...] = ()
        try:
            header = records.header(example.header)
            match = identify_alone(family, header)
            beside = _beside(match, catalogue)
            arguments = match.model + repr(sorted(match.config.items()))
            if arguments not in known:
                known[arguments] = build(match.model, match.config)
            yield Case(number, example, header, match, beside, known[arguments])
        except SlipcastError as problem:
            yield Case(number, example, header, match, beside, problem=problem)


def _beside(match: Match, catalogue: Catalogue) -> tuple[Match, ...]:
    """The other models in the file of a match; none where two families claim what is one."""
    header = match.header
    try:
        found = identify(Checkpoint(header.path, MappingProxyType({"": header})), catalogue)
    except SlipcastError:
        return ()
    return tuple(other for other in found if other.family.id != match.family.id and are_apart(other, match))


def small_models_of(family: Family) -> tuple[tuple[SmallModel, ...], SlipcastError | None]:
    """The models of the section ``tiny:``, the one that runs first; none, and why, where one can't be built."""
    if family.tiny is None:
        return (), None
    try:
        models = [SmallModel(config, build(family.model, config)) for config in family.tiny.configs]
        also = [replace(model, beside=one.beside) for model, one in zip(models[1:], family.tiny.also, strict=True)]
        return (models[0], *also), None
    except SlipcastError as problem:
        return (), problem


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _short(document: Document) -> str:
    return Path(document.path or "").name
