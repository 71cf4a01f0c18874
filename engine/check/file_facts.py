"""The proof of what a file says of other files: prefixes, models beside the own one, words in names, architectures."""

from __future__ import annotations

import importlib
import inspect
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache, lru_cache

from torch import nn

from slipcast.engine.build import model_class
from slipcast.engine.check.fact import Fact, judged
from slipcast.engine.check.proof import Outcome
from slipcast.engine.check.records import Records, source_of
from slipcast.engine.check.subject import Subject, small_models_of

_HEADER = "recorded headers"
_LOADERS = "diffusers' loaders of single files"
_GGUF = "the package gguf"
_SIGNS = re.compile(r"[^a-z0-9]")
_STRING = re.compile(r"[\"']([\w.]+)[\"']")


def prove_parts(subject: Subject) -> Outcome:
    """What stands before names, and which models lie in one file, is shown by headers or diffusers' loaders."""
    facts = (*_prefixes(subject), *_contained(subject), *_guesses(subject), *_architectures(subject), *_served(subject))
    return judged(subject, facts)


def _prefixes(subject: Subject) -> Iterator[Fact]:
    """That each prefix begins names of a recorded header, or is known to diffusers."""
    for number, prefix in enumerate(subject.family.prefixes):
        if prefix:
            by = _shown(subject, prefix) or _role(subject, prefix)
            yield Fact(("prefixes", number), f"prefix {prefix}", by)


def _shown(subject: Subject, beginning: str) -> str:
    """What shows that names begin so; empty where nothing does."""
    if subject.records is not None:
        names = _names_of(subject.records)
        at = bisect_left(names, beginning)
        if at < len(names) and names[at].startswith(beginning):
            return _HEADER
    return _LOADERS if any(text.startswith(beginning) for text in _loader_strings()) else ""


def _role(subject: Subject, prefix: str) -> str:
    """What shows that a prefix is the part of pipelines that families of this kind are."""
    for other in subject.catalogue.values():
        for each in (other.companions, *(variant.companions for variant in other.variants.values())):
            id_ = each.get(prefix.removesuffix("."), "").partition("/")[0]
            if prefix.endswith(".") and id_ in subject.catalogue and subject.catalogue[id_].kind == subject.family.kind:
                return "the parts of pipelines"
    return ""


_NAMES: dict[int, list[str]] = {}


def _names_of(records: Records) -> list[str]:
    """The names of all tensors in all records, sorted."""
    key = hash((records.folder, tuple(records.names)))
    if key not in _NAMES:
        _NAMES[key] = sorted({name for record in records.names for name in records.header(record).tensors})
    return _NAMES[key]


@cache
def _loader_strings() -> frozenset[str]:
    """The strings with dots in diffusers' module that reads files of several models."""
    text = inspect.getsource(importlib.import_module("diffusers.loaders.single_file_utils"))
    return frozenset(found for found in _STRING.findall(text) if "." in found)


def _contained(subject: Subject) -> Iterator[Fact]:
    """That names begin as ``contains`` says, and that what begins so is a model of that family."""
    for prefix, id_ in subject.family.contains.items():
        where, said = ("contains", prefix), f"{prefix} {id_}"
        others = [other for case in subject.cases for other in case.beside if prefix in other.prefix]
        families = sorted({other.family.id for other in others})
        relatives = {id_, *(other.id for other in subject.catalogue.values() if id_ in other.serves)}
        if others:
            fits = bool(relatives & set(families))
            against = f"recorded headers have {', '.join(families)} there"
            yield Fact(where, said, _HEADER if fits else "", against, final=True)
            continue
        known = any(prefix in name for case in subject.cases if case.match for name in case.match.everything.weights)
        wanted = {companion.partition("/")[0] for companion in subject.family.companions.values()}
        by = _HEADER if known else _LOADERS if any(text.startswith(prefix) for text in _loader_strings()) else ""
        against = "" if by else "no recorded header and no loader of diffusers has names that begin so"
        if by and id_ not in wanted:
            by, against = "", f"the file's companions are {', '.join(sorted(wanted))}"
        yield Fact(where, said, by, against, final=bool(against))


def _guesses(subject: Subject) -> Iterator[Fact]:
    """That words that suggest a variant are those of its name, of its pipeline or of a recorded file."""
    for name, variant in subject.family.variants.items():
        pipeline = variant.sampling.pipeline if variant.sampling is not None else None
        examples = [case.example.header for case in subject.cases if case.example.expect.variant == name]
        known = [name, pipeline or "", *examples, *_sources(subject, tuple(examples))]
        texts = [_SIGNS.sub("", text.lower()) for text in known]
        for number, word in enumerate(variant.guess_from_filename):
            plain = _SIGNS.sub("", word.lower())
            shown = any(plain in text for text in texts)
            where = ("variants", name, "guess_from_filename", number)
            yield Fact(where, f"the word {word}", "the variants' names" if shown else "")


def _sources(subject: Subject, names: tuple[str, ...]) -> list[str]:
    folder = subject.records.folder if subject.records is not None else None
    return [source_of(folder, name) or "" for name in names] if folder is not None else []


def _architectures(subject: Subject) -> Iterator[Fact]:
    """That llama.cpp knows the architectures that files of other namings state."""
    known = _known_architectures()
    for name, naming in subject.family.namings.items():
        for number, architecture in enumerate(naming.architectures if known else ()):
            where, said = ("namings", name, "architectures", number), f"architecture {architecture}"
            there = architecture in known
            yield Fact(where, said, _GGUF if there else "", f"{_GGUF} has none", final=not there)


@lru_cache(maxsize=1)
def _known_architectures() -> frozenset[str]:
    """The architectures that the package gguf knows; none where it is not installed."""
    try:
        names = importlib.import_module("gguf").MODEL_ARCH_NAMES
    except ImportError:
        return frozenset()
    return frozenset(names.values())


def _served(subject: Subject) -> Iterator[Fact]:
    """That the other class has the model inside, and square layers where it says that they are the identity."""
    for id_, serves in subject.family.serves.items():
        where, said = ("serves", id_), f"serves {id_}"
        if id_ not in subject.catalogue:
            yield Fact(where, said, against="no family is called so", final=True)
            continue
        small, _ = small_models_of(subject.catalogue[id_])
        if not small:
            yield Fact(where, said)
            continue
        modules = dict(small[0].built.model.named_modules())
        inside = modules.get(serves.inside)
        own = {name.rpartition(".")[0] for built in subject.built for name in built.shapes}
        theirs = {name for name, _ in inside.named_modules()} if inside is not None else set()
        if inside is None or not own & theirs:
            against = f"{model_class(subject.catalogue[id_].model).__name__} has none of its modules there"
            yield Fact((*where, "inside"), f"inside {serves.inside}", against=against, final=True)
        else:
            yield Fact((*where, "inside"), f"inside {serves.inside}", "the other family's class")
        for number, name in enumerate(serves.identity):
            layer = modules.get(name)
            square = isinstance(layer, nn.Linear) and layer.bias is None
            by = "the other family's class" if square else ""
            against = "that is no linear layer without a bias"
            yield Fact((*where, "identity", number), f"identity {name}", by, against, final=True)
