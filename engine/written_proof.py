"""Proves of a file that was just written, before it takes its name, that it is what it was meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipcast.engine.accounting import account
from slipcast.engine.build import build_on_meta
from slipcast.engine.conversion import codecs_of, known_arguments, model_shapes
from slipcast.engine.converted import Conversion
from slipcast.engine.model_tensors import model_tensors
from slipcast.registry.catalogue import Catalogue
from slipcast.registry.config import reads_header
from slipcast.registry.errors import AccountingError, SlipcastError
from slipcast.registry.header import Checkpoint, Header
from slipcast.registry.identify import Match, identify
from slipcast.registry.safetensors_header import read_safetensors


def prove_written(path: Path, match: Match, conversion: Conversion, config: Mapping[str, Any] | None) -> None:
    """Read the header of a written file, identify it, and hold its weights against the model and what was meant.

    Args:
        path: the file.
        match: the input.
        conversion: what was to be written.
        config: what stands in the config.json beside it, if there is one.

    Raises:
        AccountingError: the file would not be recognised as what it is.
    """
    header = read_safetensors(path)
    if config is not None:
        header = Header(
            path, "diffusers folder", header.files, header.tensors, header.metadata, MappingProxyType(dict(config))
        )
    try:
        checkpoint = Checkpoint(path, MappingProxyType({"": header}))
        (written,) = identify(checkpoint, Catalogue({match.family.id: match.family}))
        problems = list(_other_model(written, match, conversion)) or list(_other_weights(written, conversion))
    except SlipcastError as error:
        raise _not_as_meant([error.found, *error.items]) from error
    if problems:
        raise _not_as_meant(problems)


def _other_model(written: Match, match: Match, conversion: Conversion) -> Iterator[str]:
    """Where a file looks like one of another model, as sentences."""
    if written.layout not in (None, conversion.layout) or written.prefix != conversion.prefix:
        yield f"its names look {written.layout} under the prefix {written.prefix!r}"
    for argument, expression in match.family.config.items():
        value, seen = match.config.get(argument), written.config.get(argument)
        if reads_header(expression) and seen != value:
            yield f"{argument} is {value!r} in the input, and reads as {seen!r}"


def _other_weights(written: Match, conversion: Conversion) -> Iterator[str]:
    """Weights that are in something else than what was meant, as sentences."""
    tensors = model_tensors(build_on_meta(written.model, known_arguments(written)))
    accounts = account(written, model_shapes(tensors), tensors.ties)
    codecs = {name: codec.name for name, codec in codecs_of(written, accounts).items()}
    for name, meant in conversion.codecs.items():
        full = conversion.prefix + name
        if full in accounts.shapes and codecs.get(full) != meant:
            yield f"{name} is in {meant}, and reads as {codecs.get(full, 'plain values')}"
    for name, codec in codecs.items():
        if name.removeprefix(conversion.prefix) not in conversion.codecs:
            yield f"{name} has no codes, and reads as {codec}"


def _not_as_meant(problems: list[str]) -> AccountingError:
    return AccountingError(
        "what was written would not be read as what it is; nothing is left of it",
        expected="a file from which the same model is recognised",
        hint="choose another format or layout, or say in the family file what the tensors can't show (config:, "
        "precision.nvfp4_layout)",
        items=problems,
    )
