"""A family file that is broken in many ways, and the proofs that notice each.

Models are built once for each configuration, and the cheapest proofs come first: those that need the small models
alone, then those on a few recorded headers, and only where these notice nothing those on all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any

from slipcast.engine import conversion, written_proof
from slipcast.engine.check import converter_proof
from slipcast.engine.check import subject as subject_module
from slipcast.engine.check.name_proofs import doubts_of
from slipcast.engine.check.records import Records
from slipcast.engine.check.run import lead_proof
from slipcast.engine.check.subject import Subject, build, cases_of, file_of, small_models_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import SlipcastError
from slipcast.registry.expression import evaluate_config
from slipcast.registry.family import Family
from slipcast.registry.family_file import FamilyFile, build_family, read_family_file
from slipcast.registry.header import Shape
from slipcast.registry.strict_yaml import Document, load_yaml
from support.mutations import (
    EXCHANGED,
    LEFT_OUT,
    Data,
    Mutation,
    config_mutations,
    identify_mutations,
    keep_mutations,
    keys_mutations,
)

ON_SMALL_MODELS = ("values", "rules", "converter", "layout")
ON_HEADERS = ("bijection", "names", "config", "way back", "recognised", "others")


class BrokenFamily:
    """A family file that is broken in many ways.

    Args:
        family: the family as it is.
        records: the recorded headers.
    """

    def __init__(self, family: Family, records: Records) -> None:
        self.family = family
        self.records = records
        self.data: Data = load_yaml(file_of(family)).data
        self.base = None if family.extends is None else read_family_file(file_of(load_catalogue()[family.extends]))
        examples = self.data.get("examples", [])
        few = list({example["expect"].get("layout"): example for example in reversed(examples)}.values())
        self.stages = [None, few] if len(few) == len(examples) else [None, few, examples]
        self._held: dict[tuple[str, int], bool] = {}

    def tried(self) -> Iterator[tuple[Mutation, str | None]]:
        """Each mutation, and what notices it: a proof, or why it is none; None where nothing does."""
        for mutation in keep_mutations(self.data):
            yield mutation, self._noticed_by(mutation.data, ("patterns",))
        for mutation in identify_mutations(self.data):
            yield mutation, self._noticed_by(mutation.data, ON_SMALL_MODELS)
        for mutation in config_mutations(self.data):
            by = self._noticed_by(mutation.data, ON_SMALL_MODELS)
            yield mutation, by or ("equivalent" if self._means_the_same(mutation.data) else None)
        for mutation in keys_mutations(self.data):
            by = self._noticed_by(mutation.data, ON_SMALL_MODELS)
            yield mutation, by or ("has a source" if self._has_a_source(mutation) else None)

    def _noticed_by(self, data: Data, proofs: Sequence[str]) -> str | None:
        """The proof that a broken file fails, and the whole one does not; None where there is none."""
        try:
            family = self._read(data)
        except SlipcastError:
            return "reading"
        for stage, examples in enumerate(self.stages):
            with self._subject(family, data, examples) as subject:
                for name in proofs if examples is None else dict.fromkeys((*proofs, *ON_HEADERS)):
                    if lead_proof(name, subject).status == "failed" and self._holds(name, stage):
                        return name
        with self._subject(family, data, None) as subject:
            return "key map" if lead_proof("key map", subject).status == "failed" else None

    def _holds(self, name: str, stage: int) -> bool:
        """Whether nothing refutes a proof of the file as it is."""
        if (name, stage) not in self._held:
            with self._subject(self._whole, self.data, self.stages[stage]) as subject:
                self._held[name, stage] = lead_proof(name, subject).status != "failed"
        return self._held[name, stage]

    def _has_a_source(self, mutation: Mutation) -> bool:
        """Whether it exchanges or leaves as they are the parts of a rule of which no shape, header or converter tells.

        The proof ``names`` sees to it that such a rule has a source.
        """
        if f" {EXCHANGED}: " not in mutation.what and f" {LEFT_OUT}: " not in mutation.what:
            return False
        changed = set(self._read(mutation.data).key_map.rules)
        wrong = [rule for rule in self._whole.key_map.rules if rule not in changed]
        return bool(wrong) and all(rule.where in self._doubtful for rule in wrong)

    @cached_property
    def _doubtful(self) -> set[tuple[str | int, ...]]:
        with self._subject(self._whole, self.data, self.stages[-1]) as subject:
            return {doubt.where for doubt in doubts_of(subject) if doubt.what != "name" or doubt.excused}

    def _means_the_same(self, data: Data) -> bool:
        """Whether an expression without branches gives the same for all models of the class, and more than one value.

        So it is with the axes of a kernel that the class makes square: a wrong one is no mistake.
        """
        path, expression = _difference(self.data, data)
        if " else " in str(expression):
            return False
        broken = self._read(data)
        seen: list[object] = []
        for view, expected in self._variations:
            try:
                if _evaluated(broken, view) != expected:
                    return False
            except SlipcastError:
                return False
            seen.append(_at(expected, path[1:]))
        return any(value != seen[0] for value in seen)

    @cached_property
    def _variations(self) -> list[tuple[Mapping[str, Shape], Mapping[str, object]]]:
        """Small models in each of which one argument is another, and what they show, if that is how they were built."""
        assert self.family.tiny is not None
        found: list[tuple[Mapping[str, Shape], Mapping[str, object]]] = []
        for config in chain(self.family.tiny.configs[1:], _variations(dict(self.family.tiny.config))):
            try:
                view = self._whole.key_map.native_view(build(self.family.model, config).shapes)
                shown = _evaluated(self._whole, view)
            except SlipcastError:
                continue
            if all(shown[key] == value for key, value in config.items() if key in shown):
                found.append((view, shown))
        return found

    @cached_property
    def _whole(self) -> Family:
        return self._read(self.data)

    def _read(self, data: Data) -> Family:
        file = FamilyFile(self.family.id, self.family.source, self._document(data))
        return build_family(file, self.base, linted=True)

    def _document(self, data: Data) -> Document:
        lines: dict[tuple[str | int, ...], int] = {
            (section, key): 1 for section in ("keys", "sources", "identify") for key in data.get(section, {})
        }
        return Document(data, f"{self.family.id}.yaml", lines)

    @contextmanager
    def _subject(self, family: Family, data: Data, examples: Sequence[Data] | None) -> Iterator[Subject]:
        catalogue = load_catalogue().with_family(family)
        if examples is not None:
            headers = {example["header"] for example in examples}
            chosen = tuple(example for example in family.examples if example.header in headers)
            family = family.model_copy(update={"examples": chosen})
        small, problem = small_models_of(family)
        with tempfile.TemporaryDirectory() as scratch:
            yield Subject(
                family=family,
                catalogue=catalogue,
                documents=[self._document(data)],
                records=None if examples is None else self.records,
                cases=() if examples is None else tuple(cases_of(family, self.records, catalogue)),
                small=small,
                tiny_problem=problem,
                scratch=Path(scratch),
            )


def _evaluated(family: Family, view: Mapping[str, Shape]) -> Mapping[str, object]:
    """The entries of let and config together."""
    return evaluate_config({**family.let, **family.config}, {}, view)


def _difference(one: Any, other: Any, path: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], Any]:
    """Where data differs in one value from other data, and the value."""
    keys = range(len(one)) if isinstance(one, list) else one if isinstance(one, dict) else ()
    for key in keys:
        if one[key] != other[key]:
            return _difference(one[key], other[key], (*path, key))
    return path, one


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    return reduce(getitem, path, value)


def _variations(value: Any) -> Iterator[Any]:
    """A nested value with each of its numbers doubled, or one of its flags turned, in turn."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value * 2
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ({**value, key: other} for other in _variations(item))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in _variations(item))


@contextmanager
def models_built_once() -> Iterator[None]:
    """Let one model be built for each configuration; the proofs only look at it."""
    places: list[tuple[Any, str]] = [
        (subject_module, "build"),
        (converter_proof, "build"),
        (conversion, "build_on_meta"),
        (written_proof, "build_on_meta"),
    ]
    originals = [getattr(module, name) for module, name in places]
    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, _remembering(original))
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def _remembering(function: Callable[[str, Mapping[str, Any]], Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    """A function of a class's name and of arguments that gives or raises the same again where it knows these."""
    known: dict[str, Any] = {}

    def remembering(model: str, config: Mapping[str, Any]) -> Any:
        key = model + repr(sorted(config.items()))
        if key not in known:
            try:
                known[key] = function(model, config)
            except SlipcastError as problem:
                known[key] = problem
        if isinstance(known[key], SlipcastError):
            raise known[key]
        return known[key]

    return remembering
