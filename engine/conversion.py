"""What a checkpoint is in another naming or another format: names, dtypes and shapes, and where the values come from.

Reads no weight; of scales that are to become one it reads whether they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from slipcast.engine.accounting import Accounts, account
from slipcast.engine.build import build_on_meta, unknown_arguments
from slipcast.engine.codecs.base import Codec
from slipcast.engine.conversion_choice import WEIGHT_SUFFIX, Choice, Chooser, eligible_weights
from slipcast.engine.converted import Conversion, ConvertedTensor, Extract, origin_of
from slipcast.engine.destination import checked_prefix, default_layout
from slipcast.engine.file_codec import file_codec
from slipcast.engine.kept_codes import saved_codec
from slipcast.engine.model_tensors import ModelTensors, model_tensors
from slipcast.engine.new_weights import NewWeight, new_weights
from slipcast.engine.padded_codes import PaddedCodes
from slipcast.engine.plan import Target
from slipcast.engine.planner import refuse_formats
from slipcast.engine.precision import TORCH_NAMES, Rules, family_dtype, family_obstacle
from slipcast.engine.saved_quantisation import saved_quantisation
from slipcast.engine.staying_layers import StayingLayers
from slipcast.engine.wanted import Spelling, Wanted
from slipcast.engine.written_format import format_of
from slipcast.engine.written_sides import (
    QuantisedWeight,
    layer_tensors,
    legacy_marker,
    renamed_metadata,
    renamed_sides,
)
from slipcast.registry.checkpoint import read_tensor_bytes
from slipcast.registry.claims import Layout
from slipcast.registry.dtypes import item_bits
from slipcast.registry.errors import AccountingError, UnsupportedFormatError
from slipcast.registry.header import Shape, TensorInfo
from slipcast.registry.identify import Match
from slipcast.registry.keymap.operations import joined_shape, native_shape
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import FILE_MARKER

_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}
_COMPARED = 4096
"""The most bytes of a scale or marker that is read to be compared."""


def convert_header(
    match: Match,
    layout: Layout | None = None,
    *,
    wanted: Wanted | None = None,
    prefix: str | None = None,
    others: Sequence[Match] = (),
    unexpected: Sequence[str] = (),
) -> Conversion:
    """Say what a model is in another naming or another format.

    Args:
        match: the identified model.
        layout: whose names to give it; its own where left out.
        wanted: what its weights shall be in; they stay as they are where left out.
        prefix: what to put before each name. Left out, the input's own where the layout stays as it is, else none.
        others: the other models found in the same file; one by which the family is recognised stays as it is, others
            are left out.
        unexpected: globs of plain tensors that may be left over; they are left out.

    Raises:
        UnsupportedFormatError: a format that can't be read, or can't be kept.
        QuantisationError: nvfp4 whose byte layout nothing tells, or scales without a weight.
        SettingsError: a prefix that the family doesn't know, or a spelling that the codes do not have.
        AccountingError: tensors that do not add up to the model, or that can't be joined.
        ConfigError: the model class refuses its arguments.
    """
    refuse_formats(match)
    wanted = wanted or Wanted()
    layout = layout or default_layout(match)
    stays = match.layout is None or match.layout == layout
    prefix = checked_prefix(match, (match.prefix if stays else "") if prefix is None else prefix)
    model = build_on_meta(match.model, known_arguments(match))
    tensors = model_tensors(model)
    shapes = model_shapes(tensors)
    accounts = account(match, shapes, tensors.ties, others=others, unexpected=unexpected)
    codecs = codecs_of(match, accounts)
    _refuse_blocks(match, codecs, wanted)
    weights = new_weights(match, accounts, shapes, {name: codec.name for name, codec in codecs.items()}, layout)
    rules, obstacle = Rules.of(match.family.precision), family_obstacle(match.family)
    tied = frozenset(chain.from_iterable(tensors.ties.items()))
    writer = _Writer(match, prefix, wanted, bool(wanted.quantises or wanted.spelling or _is_saved(match)))
    chooser = Chooser(
        wanted=wanted,
        bundles=match.everything.weights,
        codecs=codecs,
        linears=frozenset() if obstacle else eligible_weights(model, rules, tied),
        rules=rules,
        decoded=_DTYPES[family_dtype(match.family.precision, match.bundles.values())[0]],
        respells=writer.respells,
        equal=writer.equal,
        hides_sizes=PaddedCodes(match.family, layout, {weight.name: weight.shape for weight in weights}).hides_sizes,
    )
    for weight in weights:
        writer.add(weight, chooser.choose(weight), codecs)
    if not stays and layout == "diffusers":
        writer.altered += _altered(match, accounts, shapes)
    contained = _contained(match)
    for bundle in contained:
        writer.add_contained(bundle)
    stayed = StayingLayers(chooser, model, tied, obstacle).reasons(weights, writer.formats)
    return writer.conversion(layout, _left_out(match, accounts, weights, contained, writer.lost), stayed)


def model_shapes(tensors: ModelTensors) -> dict[str, Shape]:
    """The shapes of a model's parameters and persistent buffers."""
    return {name: tuple(tensor.shape) for name, tensor in chain(tensors.parameters.items(), tensors.persistent.items())}


@dataclass
class _Writer:
    """Gathers the tensors of the output.

    Attributes:
        match: the identified model.
        prefix: what stands before each name.
        wanted: what is asked for.
        respells: whether side tensors get new names.
    """

    match: Match
    prefix: str
    wanted: Wanted
    respells: bool
    tensors: list[ConvertedTensor] = field(default_factory=list)
    quantised: list[QuantisedWeight] = field(default_factory=list)
    described: dict[str, list[str]] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    codecs: dict[str, str] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    full_precision: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    altered: list[str] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    legacy: bool = False

    def add(self, weight: NewWeight, choice: Choice, codecs: Mapping[str, Codec]) -> None:
        """Add the tensors of a weight."""
        bundles = {piece.source: self.match.everything.weights[piece.source] for piece in weight.pieces}
        held = [codecs[name] for name in bundles if name in codecs]
        codec = choice.codec or (held[0] if choice.how == "move" and held else None)
        self.formats[weight.name] = "plain" if codec is None else format_of(codec)
        if codec is not None:
            self.codecs[weight.name] = codec.name
        if codec is not None and _is_precise(choice, bundles.values()):
            self.full_precision.add(weight.name)
        if choice.reason:
            self.folded[weight.name] = choice.reason
        if choice.how == "encode":
            self.again.update({format_of(codec) for codec in held})
        if choice.how == "move":
            self._add_moved(weight, list(bundles.values()))
        elif choice.codec is None:
            target = _target(weight, choice)
            origin = origin_of(bundles[weight.pieces[0].source].weight)
            name = self.prefix + weight.name
            self.tensors.append(ConvertedTensor(name, choice.dtype, weight.shape, made=target, origin=origin))
        else:
            self._add_quantised(weight, choice, choice.codec, tuple(bundles.values()))

    def add_contained(self, bundle: Bundle) -> None:
        """Add a weight of a model that this one's family contains: as it is, for by it the file is recognised."""
        for tensor in bundle.tensors:
            name = self.prefix + tensor.name.removeprefix(self.match.prefix)
            self.tensors.append(ConvertedTensor(name, tensor.dtype, tensor.shape, (Extract(tensor),)))
        if not bundle.is_plain:
            name = self.prefix + bundle.name.removeprefix(self.match.prefix)
            self._keep_description(name.removesuffix(WEIGHT_SUFFIX), [bundle])

    def _add_moved(self, weight: NewWeight, bundles: list[Bundle]) -> None:
        """Values, or codes without a scale, of which rows are put together; or a weight with all that belongs to it."""
        extracts = tuple(
            Extract(
                self.match.everything.weights[piece.source].weight,
                piece.source_rows,
                piece.operation == "transpose" and len(piece.shape) == 2,
            )
            for piece in weight.pieces
        )
        name = self.prefix + weight.name
        as_stored = not bundles[0].is_plain and (weight.is_renamed or not weight.terms)
        shape = bundles[0].weight.shape if as_stored else weight.shape
        origin = origin_of(extracts[0].tensor, extracts[0].rows)
        self.tensors.append(ConvertedTensor(name, _one_dtype(name, extracts), shape, extracts, origin=origin))
        layer = name.removesuffix(WEIGHT_SUFFIX)
        if as_stored:
            self.tensors += renamed_sides(bundles[0], layer)
        if not bundles[0].is_plain:
            self._keep_description(layer, bundles)

    def _add_quantised(self, weight: NewWeight, choice: Choice, codec: Codec, sources: tuple[Bundle, ...]) -> None:
        spelling: Spelling | None = (self.wanted.spelling or "comfy") if self.respells else None
        precise = _is_precise(choice, sources)
        quantised = QuantisedWeight(
            self.prefix + weight.name, _target(weight, choice), codec, sources, spelling, precise
        )
        self.quantised.append(quantised)
        self.tensors += layer_tensors(quantised, self.equal, self.lost.__setitem__)
        if spelling is None:
            self._keep_description(quantised.layer, sources)

    def _keep_description(self, layer: str, sources: Sequence[Bundle]) -> None:
        self.described[layer] = [source.name.removesuffix(WEIGHT_SUFFIX) for source in sources]
        self.legacy = self.legacy or any(source.format == "fp8_scaled" for source in sources)

    def equal(self, bundles: list[Bundle], role: str) -> bool:
        """Whether the tensors in a role all hold the same bytes; of large ones nobody asks."""
        given = [bundle.sides.get(role) for bundle in bundles]
        known = [tensor for tensor in given if tensor is not None]
        if len({(tensor.dtype, tensor.elements) for tensor in known}) > 1 or len(known) < len(given):
            return False
        return len({self._bytes(tensor) for tensor in known}) == 1

    def _bytes(self, tensor: TensorInfo) -> bytes:
        return read_tensor_bytes(self.match.header, tensor, limit=_COMPARED)

    def conversion(self, layout: Layout, left_out: Mapping[str, str], stayed: Mapping[str, str]) -> Conversion:
        """The whole."""
        marker = self._file_marker()
        if marker is not None:
            self.tensors.append(marker)
        altered = [
            f"{count} weights were in {name}: they are decoded and quantised again, so that both errors add up"
            for name, count in self.again.items()
        ]
        metadata = renamed_metadata(self.match.header.metadata, self.described, altered.append)
        return Conversion(
            layout,
            self.prefix,
            tuple(sorted(self.tensors, key=_place)),
            left_out,
            (*self.altered, *altered),
            MappingProxyType(metadata),
            MappingProxyType(dict(Counter(self.formats.values()).most_common())),
            MappingProxyType(self.codecs),
            MappingProxyType(self.folded),
            frozenset(self.full_precision),
            MappingProxyType(stayed),
        )

    def _file_marker(self) -> ConvertedTensor | None:
        """The marker of the component, where codes are marked by one."""
        if self.respells:
            if self.wanted.spelling != "legacy" or not self.quantised:
                return None
            return legacy_marker(self.prefix, self.quantised, self.altered.append)
        own = next(iter(own_markers(self.match)), None)
        if own is None or not self.legacy:
            return None
        return ConvertedTensor(self.prefix + FILE_MARKER, own.dtype, own.shape, (Extract(own),))


def _is_precise(choice: Choice, sources: Iterable[Bundle]) -> bool:
    """Whether the codes of a weight stay, and the producer of some of them marks it for products in full precision."""
    return choice.how != "encode" and any(source.full_precision for source in sources)


def own_markers(match: Match) -> list[TensorInfo]:
    """The markers of the model's own component: each component of a file has its own."""
    return [marker for marker in match.everything.markers if marker.name == match.prefix + FILE_MARKER]


def _target(weight: NewWeight, choice: Choice) -> Target:
    how = "copy" if choice.how == "move" else choice.how
    codec = None if choice.codec is None else choice.codec.name
    return Target(name=weight.name, shape=weight.shape, how=how, codec=codec, pieces=weight.pieces)


def _place(tensor: ConvertedTensor) -> tuple[int, int, int]:
    """Wide items first, so that every tensor begins at a whole item; among equals in the order of the input's bytes."""
    origin = origin_of(tensor.extracts[0].tensor, tensor.extracts[0].rows) if tensor.extracts else tensor.origin
    return -item_bits(tensor.dtype), *origin


def codecs_of(match: Match, accounts: Accounts) -> dict[str, Codec]:
    """The codec of each weight that is used and in codes: a config.json's, where it names one, or what tensors show."""
    quantisation = saved_quantisation(match.header)
    saved, hint = quantisation.codecs, quantisation.nvfp4_layout or match.family.precision.nvfp4_layout
    found = {name: file_codec(match.everything.weights[name], hint) for name in accounts.shapes}
    codecs = {name: codec for name, codec in found.items() if codec is not None}
    for name, pieces in accounts.pieces.items():
        codec = saved.get(name.removesuffix(WEIGHT_SUFFIX))
        if codec is not None:
            bundle = match.everything.weights[pieces[0].source]
            codecs[pieces[0].source] = saved_codec(match.header, name, bundle, codec)
    return codecs


def _is_saved(match: Match) -> bool:
    """Whether a config.json says what the layers are in, which a file alone could not."""
    return bool(saved_quantisation(match.header).codecs)


def _refuse_blocks(match: Match, codecs: Mapping[str, Codec], wanted: Wanted) -> None:
    blocks = [name for name, codec in codecs.items() if format_of(codec) == "gguf"]
    if blocks and wanted.format is None:
        raise UnsupportedFormatError(
            f"{len(blocks)} weights in blocks of GGUF, to be written as they are",
            expected="weights that a safetensors file can hold",
            hint="choose a format, for example --format bf16",
            path=match.header.path,
            items=blocks,
        )


def known_arguments(match: Match) -> dict[str, object]:
    """The configuration without what only a folder's config.json has and the installed class does not know."""
    unknown = set(unknown_arguments(match.model, match.config)) - match.family.config_of(match.variant).keys()
    return {name: value for name, value in match.config.items() if name not in unknown}


def _one_dtype(name: str, extracts: Sequence[Extract]) -> str:
    dtypes = {extract.tensor.dtype for extract in extracts}
    if len(dtypes) > 1:
        raise AccountingError(
            f"{name} would be joined from tensors of several dtypes: {', '.join(sorted(dtypes))}",
            expected="tensors of one dtype, since values are converted as they are",
            hint="choose a format for all, for example --format bf16",
            items=[f"{extract.tensor.name} {extract.tensor.dtype}" for extract in extracts],
        )
    return dtypes.pop()


def _contained(match: Match) -> list[Bundle]:
    """The weights of contained models that belong to the evidence: without them the output would not be recognised."""
    key_map = match.family.key_map
    evidence = {content for name in match.family.identify.has if (content := key_map.contained(name)) is not None}
    return [
        bundle
        for bundle in match.everything.weights.values()
        if bundle.name.startswith(match.prefix)
        and key_map.contained(bundle.name.removeprefix(match.prefix)) in evidence
    ]


def _left_out(
    match: Match,
    accounts: Accounts,
    weights: Sequence[NewWeight],
    contained: Sequence[Bundle],
    lost: Mapping[str, str],
) -> dict[str, str]:
    """Tensors of the input that the output lacks, each with the reason; one without a reason is a fault."""
    bundles = [match.everything.weights[piece.source] for weight in weights for piece in weight.pieces]
    used = {tensor.name for bundle in [*bundles, *contained] for tensor in bundle.tensors}
    used |= {marker.name for marker in own_markers(match)}
    left_out = {fate.name: fate.reason for fate in accounts.unused if fate.name not in used} | dict(lost)
    missing = [name for name in match.header.tensors if name not in used and name not in left_out]
    if missing:
        raise AccountingError(
            f"{len(missing)} tensors would be lost in the conversion",
            expected="every tensor of the input in the output, or a reason why it is not",
            hint="this is a fault of the key map: see 'slipcast check'",
            path=match.header.path,
            items=missing,
        )
    return left_out


def _altered(match: Match, accounts: Accounts, shapes: Mapping[str, Shape]) -> list[str]:
    """What converting back would not write as it was: a shape that the model has otherwise, a second spelling."""
    found: list[str] = []
    for link, back in zip(
        match.key_map.links(shapes.keys(), match.bundles.keys()),
        match.key_map.links(shapes.keys()),
        strict=True,
    ):
        if link not in accounts.links or len(link.files) > 1:
            continue
        bundle = match.bundles[link.files[0]]
        before = f"{link.files[0]} {list(accounts.shapes[bundle.name])}"
        parts = [
            shape for term in link.terms if (shape := native_shape(term.operation, shapes[term.model])) is not None
        ]
        after = f"{back.files[0]} {list(joined_shape(parts) or parts[0])}"
        if before != after:
            found.append(f"{before} comes back as {after}")
    return found
