"""Proofs on small models of the class: that values come back from native names, and that the configuration shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.small_model import SmallFiles, match_of, model_prefix, unique_values, write_files
from slipcast.engine.check.subject import SmallModel, Subject
from slipcast.engine.convert import convert
from slipcast.registry.claims import choose_variant
from slipcast.registry.errors import CheckError, KeyMapError, SlipcastError
from slipcast.registry.evidence import weigh
from slipcast.registry.expression import evaluate_config
from slipcast.registry.family import MODEL_NAMES
from slipcast.registry.names import Names
from slipcast.registry.strict_yaml import Where


def prove_values(subject: Subject) -> Outcome:
    """Every element of a small model comes back from native names, and its configuration is inferred."""
    if subject.tiny is None:
        return no_small_model(subject)
    for number, small in enumerate(subject.small):
        _prove_shown(subject, small, number)
    try:
        files = write_files(subject.family, unique_values(subject.tiny), subject.scratch / "values")
        back = subject.scratch / "values" / "back.safetensors"
        convert(files.match, back, "diffusers", prefix=model_prefix(subject.family))
    except SlipcastError as problem:
        raise refuted_by(subject, "the small model can't be written and read back", problem) from problem
    wrong = differing(load_file(back), load_file(files.in_model_names))
    if wrong:
        raise subject.refuted(
            f"{len(wrong)} tensors do not come back as they were",
            expected="every element where it was, after the way from the model to native names and back",
            hint="correct the entries of these tensors",
            where=subject.entry_of(wrong[0].removeprefix(model_prefix(subject.family))),
            items=wrong,
        )
    for layout in subject.family.namings:
        _prove_naming(subject, files, layout)
    elements = sum(tensor.numel() for tensor in files.tensors.values())
    namings = "".join(f", also from the names {layout}" for layout in subject.family.namings)
    return proved(f"{elements:,} elements of the small model, each back where it was{namings}")


def _prove_naming(subject: Subject, files: SmallFiles, layout: str) -> None:
    """The small model comes back from other names too, and is recognised in them."""
    family, where = subject.family, ("namings", layout)
    folder = subject.scratch / "values"
    named, back = folder / f"{layout}.safetensors", folder / f"{layout}-back.safetensors"
    try:
        convert(files.match, named, layout, prefix=model_prefix(family))
        match = match_of(family, named)
        if match.layout != layout:
            raise subject.refuted(
                f"the small model in the names {layout} is taken for one in {match.layout} names",
                expected="names that tell the naming",
                hint="correct the entries under keys",
                where=where,
            )
        convert(match, back, MODEL_NAMES, prefix=model_prefix(family))
    except CheckError:
        raise
    except SlipcastError as problem:
        raise refuted_by(subject, f"the small model in the names {layout}", problem, where) from problem
    different = [key for key, value in files.match.config.items() if match.config.get(key) != value]
    wrong = differing(load_file(back), load_file(files.in_model_names)) or different
    if wrong:
        raise subject.refuted(
            f"{len(wrong)} tensors or arguments do not come back from the names {layout} as they were",
            expected="every element where it was, and the same configuration",
            hint="correct the entries of these tensors",
            where=where,
            items=wrong,
        )


def _prove_inferred(subject: Subject, small: SmallModel, inferred: Mapping[str, Any], what: str) -> None:
    """What the tensors of a small model show is what it was built with, stated or by the class's defaults."""
    wanted = {**small.built.arguments, **small.config}
    different = [
        key for key in inferred if key in wanted and not _agree(inferred[key], wanted[key], key in small.config)
    ]
    if different:
        key = different[0]
        stated = "" if key in small.config else ", by the class's default"
        raise subject.refuted(
            f"{key} of {what} is {wanted[key]!r}{stated}, but inferred {inferred[key]!r}",
            expected="what the tensors show",
            hint=f"correct config.{key}, or the small model's",
            where=("config", key),
            items=[f"{key}: {wanted[key]!r}, inferred {inferred[key]!r}" for key in different],
        )


def _agree(inferred: Any, wanted: Any, stated: bool) -> bool:
    """Whether an argument is as it was stated; of a mapping that is not, what was inferred of it has to be there."""
    if not stated and isinstance(inferred, Mapping) and isinstance(wanted, Mapping):
        return all(key in wanted and _agree(value, wanted[key], False) for key, value in inferred.items())
    return bool(inferred == wanted)


def _prove_shown(subject: Subject, small: SmallModel, number: int) -> None:
    """A small model is recognised by its native names and shapes, and these show its configuration."""
    family, what = subject.family, name_of(number)
    where: Where = ("tiny", "also", number - 1) if number else ("tiny",)
    loaded = [name for name in small.beside if family.key_map.drop_reason(name) is None]
    if loaded:
        raise subject.refuted(
            f"{loaded[0]} of {what} is no tensor that the family drops",
            expected="tensors that nobody loads",
            hint="correct its name, or add it to drop:",
            where=(*where, "beside", loaded[0]),
        )
    contained = {name: (1,) for name in family.identify.has if family.key_map.contained(name) is not None}
    try:
        view = Names({**family.key_map.native_view(small.built.shapes), **contained, **small.beside})
        missed = weigh(family.identify, view)
        if not missed.complete:
            raise subject.refuted(
                f"{what} is not recognised",
                expected="a model of the family",
                hint="correct the small model, or identify:",
                where=("identify",),
                items=missed.missing,
            )
        variant = choose_variant(family.variants, view, Path(what))
        config = family.config_of(variant.name if variant is not None else None)
        inferred = evaluate_config(config, family.let, view)
    except KeyMapError as problem:
        raise refuted_by(subject, what, problem, where) from problem
    _prove_inferred(subject, small, inferred, what)


def name_of(number: int) -> str:
    """What messages call a small model."""
    return f"tiny.also.{number - 1}" if number else "the small model"


def differing(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that only one side has, or whose values are not the same."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
    ]


def no_small_model(subject: Subject) -> Outcome:
    """Why a proof that needs a small model is not led."""
    return skipped("the family file has no section tiny" if subject.family.tiny is None else "it can't be built")


def refuted_by(subject: Subject, what: str, problem: SlipcastError, where: Where = ("keys",)) -> CheckError:
    """The refutation that an error of the small model is."""
    return subject.refuted(
        f"{what}: {problem.found}",
        expected=problem.expected,
        hint=problem.hint,
        where=getattr(problem, "where", ()) or where,
        items=problem.items,
    )
