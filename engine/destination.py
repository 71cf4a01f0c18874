"""Where a written checkpoint goes. Imports no torch, so that a place that can't be is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from slipcast.registry.claims import Layout
from slipcast.registry.errors import SettingsError, UnsupportedFileError
from slipcast.registry.family import MODEL_NAMES, NATIVE_NAMES
from slipcast.registry.foreign_files import PICKLE_SUFFIXES
from slipcast.registry.identify import Match
from slipcast.registry.new_files import refuse_place

SUFFIX = ".safetensors"
CONFIG = "config.json"
WEIGHTS: Mapping[str, str] = MappingProxyType(
    {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}
)
"""What each library calls the weights in a model's folder."""
_OTHER_FILES = PICKLE_SUFFIXES | {".gguf", ".json", ".sft", ".safetensor", ".onnx", ".npz"}
"""Endings of files that are not written; a folder may have any other."""
_POSSIBLE = f"a file whose name ends in {SUFFIX}; in the model's names, as with --layout diffusers, also a folder"


@dataclass(frozen=True, slots=True)
class Destination:
    """A place that can be written to.

    Attributes:
        layout: whose names the output bears.
        weights: the file of its weights.
        folder: whether that lies in a folder of its own, with a ``config.json``.
    """

    layout: Layout
    weights: Path
    folder: bool


def destination(match: Match, out: Path, layout: Layout | None, *, prefix: str | None, overwrite: bool) -> Destination:
    """The place that a name means.

    Args:
        match: the model that is read.
        out: a file whose name ends in ``.safetensors``, or a folder.
        layout: whose names to write; the input's own where left out.
        prefix: what is to stand before each name.
        overwrite: whether what lies there may be replaced.

    Raises:
        UnsupportedFileError: the output is the input itself, is there already, or its name can't hold the layout.
        SettingsError: no such layout, or a prefix that can't be.
    """
    layouts = (NATIVE_NAMES, MODEL_NAMES, *match.family.namings)
    if layout is not None and layout not in layouts:
        raise SettingsError(
            f"the layout {layout!r}",
            expected="one of " + ", ".join(layouts),
            hint="choose one of these, or leave it out",
            field="layout",
        )
    layout = layout or default_layout(match)
    if prefix is not None:
        checked_prefix(match, prefix)
    folder = out.is_dir() or out.suffix.lower() != SUFFIX
    weights = out / WEIGHTS[match.model.partition(".")[0]] if folder else out
    _refuse_input(match, out, weights)
    if folder:
        _refuse_name(out, layout)
        _refuse_folder(out, weights, prefix, overwrite=overwrite)
    else:
        refuse_place(weights, overwrite=overwrite)
    return Destination(layout, weights, folder)


def default_layout(match: Match) -> Layout:
    """Whose names an output has where nobody says: the input's, of other names than the family's the model's."""
    return MODEL_NAMES if match.layout in match.family.namings else match.layout or NATIVE_NAMES


def checked_prefix(match: Match, prefix: str) -> str:
    """A prefix under which the model is found again.

    Raises:
        SettingsError: the family does not know it.
    """
    known = match.family.prefixes
    if prefix not in known and prefix != match.prefix:
        raise SettingsError(
            f"the prefix {prefix!r}, under which no {match.family.id} would be found again",
            expected="one of " + ", ".join(map(repr, known)),
            hint="take one of these, or add it to prefixes: in the family file",
            field="prefix",
        )
    return prefix


def _refuse_input(match: Match, out: Path, weights: Path) -> None:
    inputs = {file.resolve() for file in match.header.files}
    if weights.resolve() in inputs or out.resolve() == match.header.path.resolve():
        raise UnsupportedFileError(
            "the output is the input itself",
            expected="another file or folder than the one that is read",
            hint="name another place; the input is read while the output is written",
            path=out,
        )


def _refuse_name(out: Path, layout: Layout) -> None:
    """Refuse what is no file to write by its name, and can't be a folder either."""
    found = ""
    if not out.is_dir() and out.suffix.lower() in _OTHER_FILES:
        found = f"the name ends in {out.suffix}: files of that kind are not written"
    elif layout != MODEL_NAMES:
        found = f"a folder for a checkpoint in {layout} names"
    if found:
        stem = out.stem if out.suffix.lower() in _OTHER_FILES else out.name
        raise UnsupportedFileError(
            found, expected=_POSSIBLE, hint=f"name for example {stem or 'model'}{SUFFIX}", path=out
        )


def _refuse_folder(out: Path, weights: Path, prefix: str | None, *, overwrite: bool) -> None:
    if prefix:
        raise SettingsError(
            f"the prefix {prefix!r} in a folder",
            expected="names without a prefix, as the model class has them",
            hint=f"leave the prefix out, or write a file whose name ends in {SUFFIX}",
            field="prefix",
        )
    inside = out.iterdir() if out.is_dir() else ()
    foreign = sorted(path.name for path in inside if path.name not in (weights.name, CONFIG))
    if foreign:
        raise UnsupportedFileError(
            f"a folder that holds {len(foreign)} other files",
            expected=f"a new folder, or one with {weights.name} and {CONFIG} alone",
            hint="name another folder: beside other files it would not be clear which the model is",
            path=out,
            items=foreign,
        )
    for path in (weights, out / CONFIG) if out.is_dir() else (out,):
        refuse_place(path, overwrite=overwrite)
