"""The side tensors of a written checkpoint, as the input or a spelling has them: scales and markers.

Sources of the spellings: ComfyUI's per-layer quantisation metadata, version 1, and its earlier convention
``scaled_fp8``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.nvfp4 import SCALE_2
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.converted import ConvertedTensor, Extract, origin_of
from slipcast.engine.file_codec import matrix_shape
from slipcast.engine.plan import Target
from slipcast.engine.reader import SAFETENSORS_NAMES
from slipcast.engine.wanted import Spelling, no_legacy
from slipcast.engine.written_format import format_of, is_e5m2, marker_of
from slipcast.registry.header import Shape
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import (
    FILE_MARKER,
    INPUT_SCALE,
    LAYER_METADATA,
    MARKER,
    SECOND_SCALE,
    WEIGHT_SCALE,
)

_ROLES = {SCALE: WEIGHT_SCALE, SCALE_2: SECOND_SCALE}
_LEGACY = {WEIGHT_SCALE: "scale_weight", INPUT_SCALE: "scale_input"}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight of the output in codes.

    Attributes:
        name: its name in the file.
        target: how its parts are made.
        codec: what it is in.
        sources: the weights of the input that are in it, in the order of its rows.
        spelling: how side tensors are called; None as the sources have them.
        full_precision: whether the producer of a source wants it multiplied in full precision.
    """

    name: str
    target: Target
    codec: Codec
    sources: tuple[Bundle, ...]
    spelling: Spelling | None
    full_precision: bool

    @property
    def layer(self) -> str:
        """The name of its layer in the file."""
        return self.name.removesuffix(".weight")

    @property
    def is_new(self) -> bool:
        """Whether it was quantised just now, so that the side tensors of its sources mean nothing any more."""
        return self.target.how == "encode"


def layer_tensors(
    weight: QuantisedWeight, equal: Callable[[list[Bundle], str], bool], lose: Callable[[str, str], None]
) -> Iterator[ConvertedTensor]:
    """The tensors of a quantised weight: codes, scales, scale of activations, marker.

    Args:
        weight: the weight.
        equal: whether the tensors of some weights in a role all hold the same bytes.
        lose: told of each tensor of the input that is left out, with the reason.
    """
    origin = origin_of(weight.sources[0].weight, weight.target.pieces[0].source_rows)
    for part, spec in weight.codec.parts(matrix_shape(weight.target.shape)).items():
        name, dtype, shape = weight.name, SAFETENSORS_NAMES[spec.dtype], spec.shape
        if part == CODES:
            shape = weight.target.shape if isinstance(weight.codec, ScaledCodec) else shape
        else:
            name = f"{weight.layer}.{_leaf(weight, _ROLES[part])}"
            dtype, shape = _scale_spec(weight, part, dtype, shape)
        yield ConvertedTensor(name, dtype, shape, made=weight.target, part=part, origin=origin)
    if not weight.is_new:
        yield from _input_scale(weight, equal, lose)
    yield from _marker(weight, equal)


def _leaf(weight: QuantisedWeight, role: str) -> str:
    """What a side tensor's name ends in."""
    if weight.spelling == "legacy":
        return _LEGACY[role]
    named = [source.sides[role] for source in weight.sources if role in source.sides]
    return named[0].name.rpartition(".")[2] if weight.spelling is None and named else role


def _scale_spec(weight: QuantisedWeight, part: str, dtype: str, shape: Shape) -> tuple[str, Shape]:
    """Dtype and shape of a scale: as the sources have them, or as ComfyUI reads them."""
    scaled = isinstance(weight.codec, ScaledCodec)
    usual = (dtype, (*shape, 1) if scaled and len(shape) == 1 else shape)
    if weight.spelling is not None or weight.is_new:
        return usual
    given = [source.sides[_ROLES[part]] for source in weight.sources]
    dtype = given[0].dtype if len({scale.dtype for scale in given}) == 1 else dtype
    if not shape:
        return dtype, given[0].shape
    if not scaled:
        return dtype, shape
    kept = (shape[0], *given[0].shape[1:])
    return dtype, kept if given[0].elements > 1 and prod(kept) == prod(shape) else usual[1]


def _input_scale(
    weight: QuantisedWeight, equal: Callable[[list[Bundle], str], bool], lose: Callable[[str, str], None]
) -> Iterator[ConvertedTensor]:
    """The scale of activations, which parts of a weight share; weights that are joined must have the same."""
    given = [source.sides[INPUT_SCALE] for source in weight.sources if INPUT_SCALE in source.sides]
    if len(given) == len(weight.sources) and equal(list(weight.sources), INPUT_SCALE):
        name = f"{weight.layer}.{_leaf(weight, INPUT_SCALE)}"
        yield ConvertedTensor(name, given[0].dtype, given[0].shape, (Extract(given[0]),))
        return
    for scale in given:
        lose(scale.name, f"the weights that make {weight.name} have different scales of activations")


def _marker(weight: QuantisedWeight, equal: Callable[[list[Bundle], str], bool]) -> Iterator[ConvertedTensor]:
    given = [source.sides[MARKER] for source in weight.sources if MARKER in source.sides]
    if weight.spelling == "legacy" or (weight.spelling is None and not given):
        return
    name = f"{weight.layer}.{MARKER}"
    if weight.spelling is None and len(given) == len(weight.sources) and equal(list(weight.sources), MARKER):
        yield ConvertedTensor(name, given[0].dtype, given[0].shape, (Extract(given[0]),))
        return
    data = json.dumps(marker_of(weight.codec, full_precision=weight.full_precision)).encode()
    yield ConvertedTensor(name, "U8", (len(data),), data=data)


def renamed_sides(bundle: Bundle, layer: str) -> Iterator[ConvertedTensor]:
    """The side tensors of a weight that goes as it is to a layer of another name."""
    skipped = len(bundle.name.removesuffix(".weight"))
    for side in bundle.sides.values():
        yield ConvertedTensor(layer + side.name[skipped:], side.dtype, side.shape, (Extract(side),))


def legacy_marker(prefix: str, weights: list[QuantisedWeight], alter: Callable[[str], None]) -> ConvertedTensor:
    """The tensor that marks a component in the legacy spelling: of two elements where products are to be exact.

    Raises:
        SettingsError: weights in codes that the spelling has no names for.
    """
    for weight in weights:
        if format_of(weight.codec) not in ("fp8_scaled", "fp8_raw"):
            raise no_legacy(format_of(weight.codec))
    precise = sum(weight.full_precision for weight in weights)
    if 0 < precise < len(weights):
        alter(
            f"{precise} of {len(weights)} layers are marked to be multiplied in full precision; "
            "the legacy spelling can only say it of all, and does"
        )
    elements = 2 if precise else 0
    dtype = "F8_E5M2" if all(is_e5m2(weight.codec) for weight in weights) else "F8_E4M3"
    return ConvertedTensor(prefix + FILE_MARKER, dtype, (elements,), data=bytes(elements))


def renamed_metadata(
    metadata: Mapping[str, str], layers: Mapping[str, list[str]], alter: Callable[[str], None]
) -> dict[str, str]:
    """A file's metadata with the layers that it describes under their new names.

    Args:
        metadata: the input's.
        layers: name of each layer of the output whose codes stay described there -> names of its layers in the input.
        alter: told what is not kept.
    """
    renamed = dict(metadata)
    text = renamed.pop(LAYER_METADATA, None)
    if text is None:
        return renamed
    try:
        document = json.loads(text)
        described = {str(layer): dict(says) for layer, says in document["layers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        alter(f"the metadata {LAYER_METADATA} can't be read and is left out")
        return renamed
    kept: dict[str, dict[str, Any]] = {}
    for layer, sources in layers.items():
        says = [described[source] for source in sources if source in described]
        if says:
            kept[layer] = says[0]
            if any(each.get("full_precision_matrix_mult") is True for each in says):
                kept[layer] = {**says[0], "full_precision_matrix_mult": True}
    if kept:
        renamed[LAYER_METADATA] = json.dumps({**document, "layers": kept})
    return renamed
