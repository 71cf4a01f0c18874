"""The proof that diffusers' own converter, where the class has one, puts every element where the key map does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.small_model import Tensors, unique_values, write_files
from slipcast.engine.check.subject import Built, Converted, Subject, build
from slipcast.engine.check.value_proofs import differing, name_of, no_small_model, refuted_by
from slipcast.registry.errors import CheckError, SlipcastError
from slipcast.registry.header import Shape
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.place import parse_place

Converter = Callable[..., Mapping[str, torch.Tensor]]


def prove_converter(subject: Subject) -> Outcome:
    """Where diffusers has a converter for the class, it puts every element where the key map does."""
    if subject.tiny is None:
        return no_small_model(subject)
    if converter_of(subject.family.model) is None:
        return skipped("diffusers has no converter for the class")
    made = conversions(subject)
    found = [_found(subject, one) for one in made]
    excused = _excused(subject, made, {name for names in found for name in names})
    wrong = [name for names in found for name in names if name not in excused]
    if wrong:
        raise subject.refuted(
            f"diffusers' converter puts {len(wrong)} tensors elsewhere",
            expected="the same elements in the same tensors",
            hint="correct the entries of these tensors; shapes can't show halves, squares or orders",
            where=subject.entry_of(wrong[0]),
            items=wrong,
        )
    apart = sum(name in one.values for one in made for name in excused)
    others = f"; {apart} differ, for the reasons that the family file gives" if apart else ""
    tensors = sum(len(one.values) for one in made) - apart
    return proved(f"diffusers' converter gives the same {tensors} tensors{made[0].how}{others}")


def conversions(subject: Subject) -> tuple[Converted, ...]:
    """What diffusers' converter makes of each small model; nothing where there is no converter or no small model.

    Raises:
        CheckError: a small model can't be written, or the converter fails on it.
    """
    converter = converter_of(subject.family.model)
    if subject.tiny is None or converter is None:
        return ()
    if not subject.conversions:
        made = [_converted(subject, converter, subject.tiny, name_of(0))]
        for number, small in enumerate(subject.small[1:] if not made[0].full_size else (), 1):
            thin = _converted_thin(subject, converter, small.built, name_of(number))
            made.append(thin or _converted(subject, converter, small.built, name_of(number)))
        subject.conversions.extend(made)
    return tuple(subject.conversions)


def _found(subject: Subject, made: Converted) -> list[str]:
    """The tensors that differ, but for those that nobody loads."""
    key_map = subject.family.key_map
    theirs = {
        name: tensor for name, tensor in made.theirs.items() if name in made.values or key_map.drop_reason(name) is None
    }
    return differing(made.values, theirs)


def _converted(subject: Subject, converter: Converter, built: Built, what: str) -> Converted:
    """What the converter makes of a small model's file, or of the published model's where it wants its sizes."""
    values = unique_values(built)
    try:
        folder = Path(tempfile.mkdtemp(dir=subject.scratch)) / "files"
        native = load_file(write_files(subject.family, values, folder).native)
    except SlipcastError as problem:
        raise refuted_by(subject, f"{what} can't be written", problem) from problem
    prefix, key_map = subject.family.prefixes[0], subject.family.key_map
    bare = {name.removeprefix(prefix): tensor for name, tensor in native.items()}
    bare = {name: tensor for name, tensor in bare.items() if key_map.contained(name) is None}
    try:
        theirs = _convert_named(converter, native, bare, built, _dropped(key_map))
    except Exception as error:  # some want the sizes of the published model
        published = next((case.built for case in subject.cases if case.built is not None), _default_model(subject))
        thin = (
            None if published is None else _converted_thin(subject, converter, published, f"{what}, and at full size")
        )
        if thin is None:
            raise _unconverted(subject, what, error) from error
        return replace(thin, how=" of one column each, at full size", full_size=True)
    if differing(values, theirs):
        patient = _convert_kept(converter, native, built)
        if not differing(values, patient):
            return Converted(values, patient, ", once it sees names it has taken")
    return Converted(values, theirs)


def _converted_thin(subject: Subject, converter: Converter, built: Built, what: str) -> Converted | None:
    """What the converter makes of one column of each tensor; None where these can't be written."""
    key_map, prefix = subject.family.key_map, subject.family.prefixes[0]
    thin = thin_files(key_map, built.shapes)
    if thin is None:
        return None
    values, native = thin
    full = {prefix + name: tensor for name, tensor in native.items()}
    try:
        return Converted(values, _convert_named(converter, full, native, built, _dropped(key_map)))
    except Exception as error:
        raise _unconverted(subject, what, error) from error


def _unconverted(subject: Subject, what: str, error: Exception) -> CheckError:
    return subject.refuted(
        f"diffusers' converter fails on {what}: {type(error).__name__}: {error}",
        expected="files that it can convert",
        hint="a KeyError names what it looks for and the key map does not write",
        where=("keys",),
    )


def _excused(subject: Subject, made: Sequence[Converted], found: Collection[str]) -> set[str]:
    """Those of the differing tensors that ``converter_differs`` names, under the model's names or left as they were."""
    family = subject.family
    assert family.tiny is not None
    excused: set[str] = set()
    for text in family.tiny.converter_differs:
        place = parse_place(text)
        taken = {name for one in made for name in one.values if place.takes(tuple(name.split(".")))}
        if not taken & set(found):
            raise subject.refuted(
                f"diffusers' converter puts {text!r} where the key map does" if taken else f"{text!r} hits nothing",
                expected="tensors of the small model that the converter puts elsewhere",
                hint="remove the entry",
                where=("tiny", "converter_differs", text),
            )
        excused |= taken
    links = [link for one in made for link in family.key_map.links(one.values)]
    excused |= {file for link in links if any(term.model in excused for term in link.terms) for file in link.files}
    return excused & set(found)


def _default_model(subject: Subject) -> Built | None:
    """The model of the class's own defaults, which mostly are the published one's; for a family without examples."""
    try:
        return build(subject.family.model, {})
    except SlipcastError:
        return None


def _convert(converter: Converter, native: Mapping[str, torch.Tensor], built: Built) -> Mapping[str, torch.Tensor]:
    made = converter(checkpoint=dict(native), config=dict(getattr(built.model, "config", {})))
    return {name: tensor for name, tensor in made.items() if tensor is not None}  # None: it did not find it


class _Kept(dict[str, torch.Tensor]):
    """Tensors that stay where they are popped."""

    def pop(self, name: str, *default: Any) -> Any:
        return self.get(name, *default) if default else self[name]


def _convert_kept(converter: Converter, native: Mapping[str, torch.Tensor], built: Built) -> Mapping[str, torch.Tensor]:
    """What a converter makes that tells layouts apart by names in what it has already emptied; nothing if it fails."""
    try:
        return converter(checkpoint=_Kept(native), config=dict(getattr(built.model, "config", {})))
    except Exception:  # whatever it raises, it is no answer
        return {}


def _convert_named(
    converter: Converter,
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


def converter_of(model: str) -> Converter | None:
    """The function with which diffusers turns a file of a class into the class's names; None where it has none."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    entries: Any = SINGLE_FILE_LOADABLE_CLASSES
    converter: Converter | None = entries.get(model.removeprefix("diffusers."), {}).get("checkpoint_mapping_fn")
    return converter
