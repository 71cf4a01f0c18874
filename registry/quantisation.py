"""How each weight of a file is quantised, and its logical shape, from the header alone.

The unit is the bundle: a weight with its scales and its marker. Bundles are assembled from the file's own names,
before any renaming, so that what a file says of its layers by name moves with them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from slipcast.registry.checkpoint import read_tensor_bytes
from slipcast.registry.errors import SlipcastError
from slipcast.registry.guesses import without_guesses
from slipcast.registry.header import Header, Shape, TensorInfo
from slipcast.registry.layer_format import FLOAT8, Granularity, LayerFormat, layer_format, unpacked
from slipcast.registry.saved_layers import as_blocks, saved_codecs, saved_full_precision
from slipcast.registry.side_tensors import (
    AMBIGUOUS_LEAVES,
    FILE_MARKER,
    IGNORED_LEAVES,
    LAYER_METADATA,
    MARKER,
    SPELLINGS,
    is_file_marker,
    split_side,
)

_MARKER_LIMIT = 4096
_INTEGER_CODES = frozenset({"U8", "I8", "I32"})
_PADDED = {"nvfp4": 16, "mxfp8": 32}
_PACKED_WEIGHTS = ("qweight", "weight_packed", "int8_weight")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A weight and everything that belongs to it.

    Attributes:
        name: the weight's name in the file; of a packed weight ``layer.weight``, whatever the file calls it.
        weight: the tensor that holds the values or the codes.
        format: a name of the formats' contract: ``plain``, ``fp8_scaled``, ``nvfp4``, ...
        shape: the logical shape; nvfp4's and mxfp8's may be padded, which the model's shape resolves.
        sides: role -> tensor: ``weight_scale``, ``weight_scale_2``, ``input_scale``, ``comfy_quant``, ...
        granularity: how far one scale reaches; None without a scale.
        full_precision: the producer wants this layer multiplied in full precision.
        options: what the marker says besides, for example ``convrot_groupsize``.
    """

    name: str
    weight: TensorInfo
    format: str
    shape: Shape
    sides: Mapping[str, TensorInfo] = field(default_factory=lambda: MappingProxyType({}))
    granularity: Granularity | None = None
    full_precision: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_plain(self) -> bool:
        """Whether the tensor's own values are the weight."""
        return self.format == "plain"

    def pads(self, shape: Shape) -> bool:
        """Whether the codes hold a weight of this logical shape, padded to whole blocks or as one row of them."""
        if self.format == "gguf":
            return len(self.shape) == 2 and self.shape[0] == 1 and prod(self.shape) == prod(shape)
        block = _PADDED.get(self.format)
        if block is None or len(shape) != 2 or len(self.shape) != 2:
            return False
        return self.shape == shape or self.shape == tuple(-(-length // block) * block for length in shape)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor of the file that the bundle holds."""
        return (self.weight, *self.sides.values())


@dataclass(frozen=True, slots=True)
class Bundles:
    """All of a file's tensors, each in exactly one place.

    Attributes:
        weights: bundles by name, in the order of the bytes.
        markers: tensors that mark a whole component.
        ignored: tensors that bear on no weight, with the reason.
        orphans: side tensors without a weight, or of an unknown kind. Loading a file that has one is an error.
        problems: what is unreadable or contradictory, as sentences.
    """

    weights: Mapping[str, Bundle]
    markers: tuple[TensorInfo, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    orphans: tuple[TensorInfo, ...] = ()
    problems: tuple[str, ...] = ()


def assemble(header: Header) -> Bundles:
    """Sort a header's tensors into bundles.

    Markers of at most 4 KiB are read from the file; nothing else of its data is.
    """
    sides, weights, markers, ignored = _sort(header)
    described, problems = _descriptions(header, sides)
    unreadable = bool(problems)
    saved, precise = saved_codecs(header.config), saved_full_precision(header.config)
    found: dict[str, Bundle] = {}
    said: dict[str, Mapping[str, Any]] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        own = sides.pop(layer, {}) if name.endswith(".weight") else {}
        says = described.pop(layer, {})
        if says or saved.get(layer) == "mxfp8":
            said[name] = says or {"format": "mxfp8"}
        weight = as_blocks(unpacked(weight, own, says), saved.get(layer, ""))
        format_ = layer_format(weight, own, says, header.metadata)
        marked_precise = layer in precise or (format_.name == "fp8_scaled" and _marked_full_precision(name, markers))
        found[name] = _bundle(name, weight, own, format_, marked_precise)
        problems += [f"{name}: {problem}" for problem in format_.problems]
    found, layout_problems = _one_nvfp4_layout(found)
    problems += layout_problems
    marked = {
        name for name in found if any(name.startswith(marker.name.removesuffix(FILE_MARKER)) for marker in markers)
    }
    found, doubts = without_guesses(found, said, marked, unreadable=unreadable)
    problems += doubts
    problems += [f"the file's metadata describes {layer}, which has no weight" for layer in described]
    orphans = tuple(tensor for group in sides.values() for tensor in group.values())
    orphans += tuple(
        tensor for bundle in found.values() for role, tensor in bundle.sides.items() if _is_foreign(role, bundle)
    )
    return Bundles(
        weights=MappingProxyType(found),
        markers=tuple(markers),
        ignored=MappingProxyType(ignored),
        orphans=orphans,
        problems=tuple(problems),
    )


def count_formats(bundles: Iterable[Bundle]) -> dict[str, int]:
    """Number of weights of each format, the most frequent first."""
    return dict(Counter(bundle.format for bundle in bundles).most_common())


def _sort(
    header: Header,
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo], list[TensorInfo], dict[str, str]]:
    """Tell side tensors, weights, markers of whole components and ignored tensors apart, by their names."""
    quantised = {
        name.removesuffix(".weight")
        for name, tensor in header.tensors.items()
        if (tensor.dtype in FLOAT8 or tensor.dtype in _INTEGER_CODES) and len(tensor.shape) >= 2
    }
    quantised |= {name.rpartition(".")[0] for name in header.tensors if name.rpartition(".")[2] in _PACKED_WEIGHTS}
    sides: dict[str, dict[str, TensorInfo]] = {}
    weights: dict[str, TensorInfo] = {}
    markers: list[TensorInfo] = []
    ignored: dict[str, str] = {}
    for name, tensor in header.tensors.items():
        if is_file_marker(name):
            markers.append(tensor)
        elif any(name.endswith("." + leaf) for leaf in IGNORED_LEAVES):
            ignored[name] = "a preference for a kernel"
        elif name.endswith(".scale") and _beside_codes(name, header):
            sides.setdefault(name.removesuffix(".scale"), {})["scale"] = tensor
        elif (split := split_side(name)) is None or (split[1] in AMBIGUOUS_LEAVES and split[0] not in quantised):
            weights[name] = tensor
        elif split[1] in _PACKED_WEIGHTS and f"{split[0]}.weight" not in header.tensors:
            weights[f"{split[0]}.weight"] = tensor
        else:
            role = SPELLINGS.get(split[1], split[1])
            group = sides.setdefault(split[0], {})
            group[role if role not in group else name] = tensor  # a second one is consumed by no format
    return sides, weights, markers, ignored


def _beside_codes(name: str, header: Header) -> bool:
    """Whether ``layer.scale`` stands beside a weight of codes; norms call their weight ``scale`` too."""
    weight = header.tensors.get(name.removesuffix("scale") + "weight")
    return weight is not None and len(weight.shape) >= 2 and (weight.dtype in _INTEGER_CODES or weight.dtype in FLOAT8)


def _descriptions(
    header: Header, sides: Mapping[str, Mapping[str, TensorInfo]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the file says of its layers: from its metadata, then from the marker tensor of each layer."""
    problems: list[str] = []
    described: dict[str, dict[str, Any]] = {}
    if (text := header.metadata.get(LAYER_METADATA)) is not None:
        try:
            layers = json.loads(text)["layers"]
            described = {str(layer): _flat(values) for layer, values in layers.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(
                f"the metadata {LAYER_METADATA} can't be read ({type(error).__name__}); going by the tensors"
            )
    for layer, group in sides.items():
        if MARKER not in group:
            continue
        try:
            raw = read_tensor_bytes(header, group[MARKER], limit=_MARKER_LIMIT)
            described[layer] = described.get(layer, {}) | _flat(json.loads(raw.rstrip(b"\x00")))
        except (SlipcastError, ValueError, TypeError, RecursionError) as error:
            problems.append(
                f"the marker {group[MARKER].name} can't be read ({type(error).__name__}); going by the tensors"
            )
    return described, problems


def _flat(values: Any) -> dict[str, Any]:
    """A layer's description; some programs put part of it one level down, under ``params``."""
    own = dict(values)
    return {**dict(own.pop("params", {})), **own}


def _bundle(
    name: str, weight: TensorInfo, sides: dict[str, TensorInfo], format_: LayerFormat, full_precision: bool
) -> Bundle:
    return Bundle(
        name=name,
        weight=weight,
        format=format_.name,
        shape=format_.shape,
        sides=MappingProxyType(sides),
        granularity=format_.granularity,
        full_precision=format_.full_precision or (full_precision and format_.name != "plain"),
        options=MappingProxyType(format_.options),
    )


def _marked_full_precision(name: str, markers: Iterable[TensorInfo]) -> bool:
    """Whether the marker of a weight's component has two elements; each component of a file has its own."""
    own = [marker for marker in markers if name.startswith(marker.name.removesuffix(FILE_MARKER))]
    return bool(own) and max(own, key=lambda marker: len(marker.name)).elements == 2


def _one_nvfp4_layout(bundles: dict[str, Bundle]) -> tuple[dict[str, Bundle], list[str]]:
    """Give all nvfp4 weights the byte layout that some of them show; one file was written by one program."""
    layouts = {bundle.options["layout"] for bundle in bundles.values() if "layout" in bundle.options}
    if len(layouts) != 1:
        return bundles, ["its nvfp4 layers are in two byte layouts"] if layouts else []
    (layout,) = layouts
    options = MappingProxyType({"layout": layout})
    settled = {
        name: replace(bundle, options=options) if bundle.format == "nvfp4" else bundle
        for name, bundle in bundles.items()
    }
    return settled, []


def _is_foreign(role: str, bundle: Bundle) -> bool:
    """Whether a side tensor has no meaning in its bundle's format; formats that are only refused are not judged."""
    return bundle.format in _OWN_ROLES and role not in _OWN_ROLES[bundle.format]


_OWN_ROLES: Mapping[str, frozenset[str]] = {
    "plain": frozenset(),
    "fp8_scaled": frozenset({"weight_scale", "input_scale", MARKER}),
    "fp8_raw": frozenset({MARKER, "input_scale"}),
    "nvfp4": frozenset({"weight_scale", "weight_scale_2", "input_scale", MARKER}),
    "mxfp8": frozenset({"weight_scale", "input_scale", MARKER}),
    "int8": frozenset({"weight_scale", "input_scale", MARKER}),
    "int8_convrot": frozenset({"weight_scale", "input_scale", MARKER}),
}
