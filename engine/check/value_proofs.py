"""Proofs on a small model of the class: where values go, and what diffusers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.small_model import (
    SmallFiles,
    Tensors,
    match_of,
    model_prefix,
    unique_values,
    write_files,
)
from slipcast.engine.check.subject import Built, Subject, build
from slipcast.engine.convert import convert
from slipcast.registry.errors import CheckError, SlipcastError
from slipcast.registry.family import MODEL_NAMES
from slipcast.registry.header import Shape
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.place import parse_place
from slipcast.registry.strict_yaml import Where


def prove_values(subject: Subject) -> Outcome:
    """Every element of a small model comes back from native names, and its configuration is inferred."""
    if subject.tiny is None:
        return no_small_model(subject)
    try:
        files = write_files(subject.family, unique_values(subject.tiny), subject.scratch / "values")
        back = subject.scratch / "values" / "back.safetensors"
        convert(files.match, back, "diffusers", prefix=model_prefix(subject.family))
    except SlipcastError as problem:
        raise refuted_by(subject, "the small model can't be written and read back", problem) from problem
    _prove_inferred(subject, files)
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


def _prove_inferred(subject: Subject, files: SmallFiles) -> None:
    assert subject.family.tiny is not None
    inferred, wanted = files.match.config, subject.family.tiny.config
    different = [key for key in wanted if key in inferred and inferred[key] != wanted[key]]
    if different:
        raise subject.refuted(
            f"{different[0]} of the small model is {wanted[different[0]]!r}, but inferred {inferred[different[0]]!r}",
            expected="what the tensors show",
            hint=f"correct config.{different[0]}, or the small model's",
            where=("config", different[0]),
            items=[f"{key}: {wanted[key]!r}, inferred {inferred[key]!r}" for key in different],
        )


def prove_converter(subject: Subject) -> Outcome:
    """Where diffusers has a converter for the class, it puts every element where the key map does."""
    if subject.tiny is None:
        return no_small_model(subject)
    converter = _converter(subject.family.model)
    if converter is None:
        return skipped("diffusers has no converter for the class")
    values = unique_values(subject.tiny)
    try:
        native = load_file(write_files(subject.family, values, subject.scratch / "converter").native)
    except SlipcastError as problem:
        raise refuted_by(subject, "the small model can't be written", problem) from problem
    prefix = subject.family.prefixes[0]
    bare = {name.removeprefix(prefix): tensor for name, tensor in native.items()}
    bare = {name: tensor for name, tensor in bare.items() if subject.family.key_map.contained(name) is None}
    of = ""
    try:
        theirs = _convert_named(converter, native, bare, subject.tiny, _dropped(subject.family.key_map))
        if differing(values, theirs) and not differing(values, _convert_kept(converter, native, subject.tiny)):
            return proved(f"diffusers' converter gives the same {len(values)} tensors, once it sees names it has taken")
    except Exception as error:  # some want the sizes of the published model
        published = next((case.built for case in subject.cases if case.built is not None), _default_model(subject))
        thin = None if published is None else thin_files(subject.family.key_map, published.shapes)
        if published is None or thin is None:
            return skipped(f"diffusers' converter fails on a small model: {type(error).__name__}: {error}")
        values, native = thin
        try:
            theirs = _convert(converter, native, published)
        except Exception as again:
            return skipped(f"diffusers' converter fails at full size: {type(again).__name__}: {again}")
        of = " of one column each, at full size"
    left = {name for name in theirs if name not in values and subject.family.key_map.drop_reason(name) is not None}
    found = differing(values, {name: tensor for name, tensor in theirs.items() if name not in left})
    excused = _excused(subject, {name: tuple(tensor.shape) for name, tensor in values.items()}, found)
    wrong = [name for name in found if name not in excused]
    if wrong:
        raise subject.refuted(
            f"diffusers' converter puts {len(wrong)} tensors elsewhere",
            expected="the same elements in the same tensors",
            hint="correct the entries of these tensors; shapes can't show halves, squares or orders",
            where=subject.entry_of(wrong[0]),
            items=wrong,
        )
    apart = sum(name in values for name in excused)
    others = f"; {apart} differ, for the reasons that the family file gives" if apart else ""
    return proved(f"diffusers' converter gives the same {len(values) - apart} tensors{of}{others}")


def _excused(subject: Subject, shapes: Mapping[str, Shape], found: Collection[str]) -> set[str]:
    """Those of the differing tensors that ``converter_differs`` names, under the model's names or left as they were."""
    family = subject.family
    assert family.tiny is not None
    excused: set[str] = set()
    for text in family.tiny.converter_differs:
        place = parse_place(text)
        taken = {name for name in shapes if place.takes(tuple(name.split(".")))}
        if not taken & set(found):
            raise subject.refuted(
                f"diffusers' converter puts {text!r} where the key map does" if taken else f"{text!r} hits nothing",
                expected="tensors of the small model that the converter puts elsewhere",
                hint="remove the entry",
                where=("tiny", "converter_differs", text),
            )
        excused |= taken
    links = family.key_map.links(shapes)
    excused |= {file for link in links if any(term.model in excused for term in link.terms) for file in link.files}
    return excused & set(found)


def _default_model(subject: Subject) -> Built | None:
    """The model of the class's own defaults, which mostly are the published one's; for a family without examples."""
    try:
        return build(subject.family.model, {})
    except SlipcastError:
        return None


def _convert(
    converter: Callable[..., Mapping[str, torch.Tensor]], native: Mapping[str, torch.Tensor], built: Built
) -> Mapping[str, torch.Tensor]:
    return converter(checkpoint=dict(native), config=dict(getattr(built.model, "config", {})))


class _Kept(dict[str, torch.Tensor]):
    """Tensors that stay where they are popped."""

    def pop(self, name: str, *default: Any) -> Any:
        return self.get(name, *default) if default else self[name]


def _convert_kept(
    converter: Callable[..., Mapping[str, torch.Tensor]], native: Mapping[str, torch.Tensor], built: Built
) -> Mapping[str, torch.Tensor]:
    """What a converter makes that tells layouts apart by names in what it has already emptied; nothing if it fails."""
    try:
        return converter(checkpoint=_Kept(native), config=dict(getattr(built.model, "config", {})))
    except Exception:  # whatever it raises, it is no answer
        return {}


def _convert_named(
    converter: Callable[..., Mapping[str, torch.Tensor]],
    full: Tensors,
    bare: Tensors,
    built: Built,
    dropped: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Mapping[str, torch.Tensor]:
    """What a converter makes of names without their prefix, of these and what nobody loads, or of names with it."""
    for tried in (bare, {**bare, **dropped}):
        try:
            made = _convert(converter, tried, built)
        except Exception:  # it wants the others
            continue
        if made:
            return made
    return _convert(converter, full, built)


def _dropped(key_map: KeyMap) -> Tensors:
    """A tensor for each that a file may hold and nobody loads, where its name is whole."""
    return {str(drop.place): torch.zeros(1) for drop in key_map.drops if "{" not in str(drop.place)}


def thin_files(key_map: KeyMap, shapes: Mapping[str, Shape]) -> tuple[Tensors, Tensors] | None:
    """Whole numbers for the rows of a model of full size, as the model has them and as its file does.

    Tensors of more dimensions have one column, so that a large model takes little memory. None where the key map
    does more than to exchange and join rows.
    """
    values: Tensors = {}
    stop = 0
    for name, shape in shapes.items():
        rows = shape[0] if shape else 1
        start, stop = stop, stop + rows
        values[name] = torch.arange(start, stop).view(rows, 1) if len(shape) > 1 else torch.arange(start, stop)
    native: Tensors = {}
    for link in key_map.links(shapes):
        if len(link.files) > 1 or any(term.operation not in (None, "swap_halves") for term in link.terms):
            return None
        rows_of = [
            values[term.model].roll(values[term.model].shape[0] // 2, 0)
            if term.operation == "swap_halves"
            else values[term.model]
            for term in link.terms
        ]
        native[link.files[0]] = torch.cat(rows_of)
    return values, native


def _converter(model: str) -> Callable[..., Mapping[str, torch.Tensor]] | None:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    entries: Any = SINGLE_FILE_LOADABLE_CLASSES
    converter: Callable[..., Mapping[str, torch.Tensor]] | None = entries.get(model.removeprefix("diffusers."), {}).get(
        "checkpoint_mapping_fn"
    )
    return converter


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
