"""The model class's constructor arguments: read off the header, or taken from a config.json and held against it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slipcast.registry.errors import ConfigError, ExpressionError
from slipcast.registry.expression import evaluate_config
from slipcast.registry.family import Family
from slipcast.registry.header import Header, Shape
from slipcast.registry.strict_yaml import dotted

_READS_HEADER = re.compile(r"\b(size|count|has)\(")
_HEAD = re.compile(r"(Encoder)?Model$|For[A-Z][A-Za-z]*$")
"""The end of a transformers class's name that says what it puts on top of a model."""


def infer_config(
    family: Family, shapes: Mapping[str, Shape], header: Header, variant: str | None = None
) -> Mapping[str, Any]:
    """Constructor arguments of the family's model class.

    A folder's ``config.json`` wins over what is inferred, since it also says what no tensor shows. Where the header
    does show a value (the family's expression reads it with ``size``, ``count`` or ``has``), the two must agree; null
    in a config.json leaves it to the class.

    Args:
        family: the family that claims the header.
        shapes: native names and logical shapes.
        header: the header; its ``config`` is the parsed ``config.json`` or None.
        variant: a variant of the family, or None.

    Raises:
        ConfigError: the header lacks what an expression reads, or the config.json is of another class, contradicts
            the tensors, or scales latents by what is no number.
    """
    expressions = family.config_of(variant)
    inferred = _inferred(family, expressions, shapes, header)
    if header.config is None:
        return MappingProxyType(inferred)
    recorded = {key: value for key, value in header.config.items() if not key.startswith("_")}
    _same_class(family, variant, header)
    conflicts = _conflicts(expressions, inferred, recorded)
    if conflicts:
        raise ConfigError(
            "config.json contradicts the tensors beside it",
            expected="values that agree with the tensors' shapes",
            hint="one of the two is of another model: put the right config.json beside the weights",
            path=header.path,
            items=conflicts,
        )
    wrong = _impossible(family, recorded)
    if wrong:
        raise ConfigError(
            "config.json holds values that latents can't be scaled or moved by",
            expected="a number other than 0 as scaling_factor, a number or null as shift_factor",
            hint="the file is damaged or was changed: put the config.json of this model beside the weights",
            path=header.path,
            items=wrong,
        )
    recorded.pop("quantization_config", None)
    return MappingProxyType({**inferred, **recorded})


def _inferred(
    family: Family, expressions: Mapping[str, Any], shapes: Mapping[str, Shape], header: Header
) -> dict[str, Any]:
    try:
        return evaluate_config(expressions, family.let, shapes)
    except ExpressionError as error:
        raise ConfigError(
            f"the tensors don't show how to build a {family.id}: {error.found}",
            expected="all the tensors of the model, in their usual shapes",
            hint="the file is incomplete or damaged: download or convert it again; if all files of the kind fail, "
            f"the family file is wrong ({family.source}, {dotted(error.where)})",
            path=header.path,
            items=error.items,
        ) from error


def _same_class(family: Family, variant: str | None, header: Header) -> None:
    assert header.config is not None
    named = header.config.get("_class_name")
    names = [named] if named is not None else list(header.config.get("architectures") or [])
    library, _, expected = family.model_of(variant).partition(".")
    alike = [_HEAD.sub("", name) for name in names] if library == "transformers" else []
    if names and expected not in names and _HEAD.sub("", expected) not in alike:
        raise ConfigError(
            f"config.json is of the class {names[0]}",
            expected=f"{expected}, the class of the family {family.id}, whose tensors these are",
            hint="put the config.json of this model beside the weights",
            path=header.path,
        )


def reads_header(expression: Any) -> bool:
    """Whether an entry of a family's ``config:`` is an expression that reads a header, rather than a constant."""
    return isinstance(expression, str) and _READS_HEADER.search(expression) is not None


def _conflicts(
    expressions: Mapping[str, Any], inferred: Mapping[str, Any], recorded: Mapping[str, Any], place: str = ""
) -> list[str]:
    found: list[str] = []
    for key, expression in expressions.items():
        if key not in recorded or key not in inferred:
            continue
        if isinstance(expression, Mapping):
            if isinstance(recorded[key], Mapping):
                found += _conflicts(expression, inferred[key], recorded[key], f"{place}{key}.")
        elif recorded[key] is not None and reads_header(expression) and _plain(inferred[key]) != _plain(recorded[key]):
            found.append(f"{place}{key}: config.json says {recorded[key]!r}, the tensors show {inferred[key]!r}")
    return found


def _impossible(family: Family, recorded: Mapping[str, Any]) -> list[str]:
    """What no tensor shows, and would fail or spoil latents when they are scaled and moved by it."""
    if family.kind != "vae":
        return []
    scale, shift = recorded.get("scaling_factor", 1), recorded.get("shift_factor")
    found = [] if _is_number(scale) and scale else [f"scaling_factor: {scale!r}"]
    return found if shift is None or _is_number(shift) else [*found, f"shift_factor: {shift!r}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
