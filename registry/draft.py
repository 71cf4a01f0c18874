"""Drafts the family file of a checkpoint that no family claims: what its header shows, and what a human must decide."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from slipcast.registry.catalogue import Catalogue
from slipcast.registry.claims import ask, strip_prefix
from slipcast.registry.distinguish import Known, distinguishing_names, mentioned_by
from slipcast.registry.draft_text import DraftFacts, draft_text
from slipcast.registry.errors import IdentificationError, SettingsError
from slipcast.registry.family import Family
from slipcast.registry.family_file import FOLDERS, FamilyFile, build_family
from slipcast.registry.header import Header
from slipcast.registry.names import Names
from slipcast.registry.quantisation import Bundle, assemble
from slipcast.registry.strangers import kind_of_stranger
from slipcast.registry.strict_yaml import parse_yaml

PLACEHOLDER = "diffusers.TODO"
"""A model class that parses and that no library has: loading says so until it is replaced."""

_ID = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
_CLASS = re.compile(r"(diffusers|transformers)\.[A-Z][A-Za-z0-9_]*")
_PREFIX = re.compile(r"([A-Za-z0-9_-]+\.)*")
_KINDS = {
    "controlnet": ("controlnet", "control_layers", "controlnet_blocks"),
    "text_encoder": ("embed_tokens", "token_embedding", "encoder.embed_tokens", "shared"),
    "vae": ("decoder", "quant_conv", "post_quant_conv"),
}
"""What the names of each kind that is no denoiser mostly hold, as whole segments."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted family file.

    Attributes:
        text: what it says; it parses, and claims the checkpoint.
        family: the family that it describes.
        file: where it belongs in a folder of family files.
        inseparable: known things that have all of its evidence too.
    """

    text: str
    family: Family
    file: str
    inseparable: tuple[str, ...]


def draft_family(
    header: Header,
    id_: str,
    catalogue: Catalogue,
    *,
    known: Mapping[str, Iterable[str]] | None = None,
    model: str | None = None,
    kind: str | None = None,
) -> Draft:
    """Draft the family file of a checkpoint.

    Args:
        header: its header.
        id_: the id that the family shall have.
        catalogue: every known family.
        known: the tensors' names in other checkpoints, to be told from.
        model: the model class, as ``diffusers.Name``; else that of the folder's config.json, or a placeholder.
        kind: denoiser, text_encoder, vae or controlnet; guessed where it is left out.

    Raises:
        SettingsError: an id or a class that can't be, or an id that is taken.
        IdentificationError: a known family claims the checkpoint, or it is no model.
    """
    _check_id(id_, catalogue)
    weights = assemble(header).weights
    _refuse_known(header, weights, catalogue)
    prefix = guess_prefix(weights, {prefix for family in catalogue.values() for prefix in family.prefixes})
    names = Names({name: bundle.shape for name, bundle in strip_prefix(weights, prefix).items()})
    others: dict[str, Known] = {f"family {family.id}": mentioned_by(family) for family in catalogue.values()}
    others |= {f"header {name}": _bearing(frozenset(has), catalogue, prefix) for name, has in (known or {}).items()}
    evidence, inseparable = distinguishing_names(names, others)
    if not evidence:
        raise IdentificationError(
            "no tensor whose name could stand in a family file",
            expected="names of letters, digits, hyphens and underscores, parted by dots",
            hint="rename the tensors",
            path=header.path,
        )
    facts = DraftFacts(
        id=id_,
        kind=kind or guess_kind(names),
        model=_checked_class(model) or _class_of(header) or PLACEHOLDER,
        prefix=prefix,
        names=names,
        evidence=evidence,
        inseparable=inseparable,
        config=header.config,
        outside=sorted({name.partition(".")[0] for name in weights if not name.startswith(prefix)}),
    )
    text = draft_text(facts)
    family = build_family(FamilyFile(id_, f"{id_}.yaml", parse_yaml(text, f"{id_}.yaml")))
    (answer,) = ask(weights, {id_: family})
    assert answer.evidence.complete, answer.evidence.missing  # its evidence is names of this header
    folder = FOLDERS[facts.kind]
    return Draft(text, family, f"{folder}/{id_}.yaml" if folder else f"{id_}.yaml", inseparable)


def guess_prefix(names: Iterable[str], known: Iterable[str]) -> str:
    """What stands before the names of the model in a file.

    It is the longest known prefix that more than half of the names bear, else what all of them begin with, up to a dot.
    """
    names = list(names)
    for prefix in sorted(known, key=len, reverse=True):
        if prefix and 2 * sum(name.startswith(prefix) for name in names) > len(names):
            return prefix
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names), strict=False))
    common = "".join(letter for letter, _ in shared)
    common = common[: common.rfind(".") + 1]
    deeper = {name[len(common) :].partition(".")[0] for name in names}
    return common if len(deeper) > 2 and _PREFIX.fullmatch(common) else ""


def guess_kind(names: Iterable[str]) -> str:
    """What part of a pipeline a model is, judged by its names; a denoiser where nothing else is."""
    segments = Counter(segment for name in names for segment in set(name.split(".")))
    for kind, words in _KINDS.items():
        if any(segments[word] for word in words):
            return kind
    return "denoiser"


def _check_id(id_: str, catalogue: Catalogue) -> None:
    if not _ID.fullmatch(id_):
        raise SettingsError(
            f"the id {id_!r}",
            expected="small letters and digits, parted by dots or hyphens",
            hint="write for example my-model-2",
            field="id",
        )
    if id_ in catalogue:
        raise SettingsError(
            f"the id {id_!r}, which is taken by {catalogue[id_].source}",
            expected="an id of its own",
            hint="choose another one",
            field="id",
        )


def _checked_class(model: str | None) -> str | None:
    if model is not None and not _CLASS.fullmatch(model):
        raise SettingsError(
            f"the model class {model!r}",
            expected="diffusers.Name or transformers.Name",
            hint="leave it out to fill it in later",
            field="model",
        )
    return model


def _class_of(header: Header) -> str | None:
    """The class that a folder's config.json names, if it could be one."""
    config = header.config or {}
    architectures = config.get("architectures")
    if isinstance(config.get("_class_name"), str):
        found = f"diffusers.{config['_class_name']}"
    elif isinstance(architectures, list) and len(architectures) == 1:
        found = f"transformers.{architectures[0]}"
    else:
        return None
    return found if _CLASS.fullmatch(found) else None


def _refuse_known(header: Header, weights: Mapping[str, Bundle], catalogue: Catalogue) -> None:
    claims = [answer.family.id for answer in ask(weights, catalogue) if answer.evidence.complete]
    if claims:
        raise IdentificationError(
            f"a checkpoint of the known family {' and '.join(claims)}",
            expected="a checkpoint that no family claims",
            hint=f"see 'slipcast inspect PATH'; to describe a relative of it, write 'extends: {claims[0]}' and an "
            "identify: of its own into a file by hand",
            path=header.path,
            candidates=tuple(claims),
        )
    stranger = kind_of_stranger(weights)
    if stranger or not weights:
        raise IdentificationError(
            stranger or "a file without weights",
            expected="the weights of a model",
            hint="name the checkpoint of the model itself",
            path=header.path,
        )


def _bearing(there: frozenset[str], catalogue: Catalogue, own: str) -> Known:
    """Whether another checkpoint has a tensor of this name, under any prefix that is known."""
    prefixes = {"", own, *(prefix for family in catalogue.values() for prefix in family.prefixes)}
    return lambda name: any(prefix + name in there for prefix in prefixes)
