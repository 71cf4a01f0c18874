"""Weights whose codes could be read in two ways, where the file ought to say which: they are not loaded by a guess."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipcast.registry.layer_format import mxfp8_order_shows
from slipcast.registry.side_tensors import WEIGHT_SCALE

if TYPE_CHECKING:
    from slipcast.registry.quantisation import Bundle


def without_guesses(
    bundles: Mapping[str, Bundle],
    described: Mapping[str, Mapping[str, Any]],
    marked: Collection[str],
    *,
    unreadable: bool,
) -> tuple[dict[str, Bundle], list[str]]:
    """The bundles, with the format ``unknown`` where only a guess could tell it, and a sentence for each.

    Args:
        bundles: weights by name.
        described: what the file says of single weights, by name.
        marked: weights under a marker of a whole component.
        unreadable: whether a description of layers could not be read.
    """
    rotated = any(bundle.format == "int8_convrot" for bundle in bundles.values())
    scaled = {name for name, bundle in bundles.items() if bundle.format == "fp8_scaled"}
    told = any(name in scaled for name in described)
    ordered = any(_order_is_told(bundle, described.get(name, {})) for name, bundle in bundles.items())
    found: dict[str, Bundle] = {}
    problems: list[str] = []
    for name, bundle in bundles.items():
        says = described.get(name, {})
        doubt = ""
        if bundle.format == "int8":
            doubt = _int8_doubt(says, rotated, unreadable, in_marked=name in marked)
        elif bundle.format == "mxfp8" and not ordered:
            doubt = (
                "mxfp8 scales whose shape fits the swizzled and the linear order, of which nothing tells which it is"
            )
        elif bundle.format == "fp8_raw" and len(bundle.shape) >= 2:
            doubt = _float8_doubt(says, told, name in marked and bool(scaled & set(marked)))
        if doubt:
            problems.append(f"{name}: {doubt}")
            bundle = replace(bundle, format="unknown")
        found[name] = bundle
    return found, problems + _bare_matrices(found)


def _bare_matrices(bundles: Mapping[str, Bundle]) -> list[str]:
    """A sentence on float8 weights without a scale in a file that scales others: raw on purpose, or a scale is lost."""
    scaled = sum(bundle.format == "fp8_scaled" for bundle in bundles.values())
    bare = [
        name
        for name, bundle in bundles.items()
        if bundle.format == "fp8_raw" and len(bundle.shape) >= 2 and name.endswith(".weight")
    ]
    if not scaled or not bare:
        return []
    more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
    return [
        f"{bare[0]}{more} in float8 without a scale, beside {scaled} weights with one: taken for the values themselves"
    ]


def _order_is_told(bundle: Bundle, says: Mapping[str, Any]) -> bool:
    """Whether mxfp8's scales are known to be swizzled: by a description, or by a shape that only they have."""
    if bundle.format != "mxfp8":
        return False
    return bool(says) or mxfp8_order_shows(bundle.shape, bundle.sides[WEIGHT_SCALE].shape)


def _int8_doubt(says: Mapping[str, Any], rotated: bool, unreadable: bool, *, in_marked: bool) -> str:
    """Plain int8 and rotated int8 look alike; read as the other, a weight is noise."""
    if not isinstance(says.get("convrot", False), bool):
        return f"its marker says convrot: {says['convrot']!r}, which is neither true nor false"
    if "convrot_groupsize" in says and "convrot" not in says:
        return "its marker gives a group of rotated columns, but not whether they are rotated"
    if not says and unreadable:
        return "int8 codes whose description can't be read: they may be rotated"
    if not says and in_marked:
        return "int8 codes that nothing describes, under a marker of scaled fp8"
    vague = "format" not in says and "convrot" not in says
    return "int8 codes that nothing describes, in a file of rotated ones" if vague and rotated else ""


def _float8_doubt(says: Mapping[str, Any], told: bool, in_marked: bool) -> str:
    """Codes without a scale, where those beside them have one: their scale may be lost."""
    if says.get("format") == "mxfp8":
        return "it is marked as mxfp8 and has no scale"
    if (says and told) or in_marked:
        return "float8 codes without a scale, in a file that gives the others of their kind one"
    return ""
