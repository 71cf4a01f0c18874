"""What a checkpoint is in another naming: names, dtypes and shapes, and where each tensor's values come from.

Reads no weight. Native names become the model's by solving the key map's links, the model's become native by
evaluating the same links; values are only ever moved, never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import prod

from slipcast.engine.accounting import Accounts, account
from slipcast.engine.build import build_on_meta, unknown_arguments
from slipcast.engine.model_tensors import model_tensors
from slipcast.engine.plan import Piece
from slipcast.registry.claims import Layout
from slipcast.registry.dtypes import item_bits
from slipcast.registry.errors import AccountingError, SettingsError, UnsupportedFormatError
from slipcast.registry.header import Shape, TensorInfo
from slipcast.registry.identify import Match
from slipcast.registry.keymap.link import Link, Term
from slipcast.registry.keymap.operations import joined_shape, native_shape, shared_shapes
from slipcast.registry.quantisation import Bundle, count_formats

Rows = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Extract:
    """Values of one tensor of the input, row-major.

    Attributes:
        tensor: the tensor.
        rows: first and one past the last row; None for all of it.
        transposed: whether the matrix's axes are exchanged; only of a whole one.
    """

    tensor: TensorInfo
    rows: Rows | None = None
    transposed: bool = False

    @property
    def elements(self) -> Rows:
        """First and one past the last element."""
        if self.rows is None:
            return 0, self.tensor.elements
        width = prod(self.tensor.shape[1:])
        return self.rows[0] * width, self.rows[1] * width


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor of the output.

    Attributes:
        name: its name in the file.
        dtype: that of its source, as the container spells it.
        shape: its shape.
        extracts: whose values it holds, one after another.
    """

    name: str
    dtype: str
    shape: Shape
    extracts: tuple[Extract, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * item_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint in another naming, before anything of it is read.

    Attributes:
        layout: whose names the output bears.
        prefix: what stands before each of them.
        tensors: every tensor of the output, in the order in which it is written.
        left_out: tensors of the input that the output lacks, with the reason.
        altered: tensors that come back under another name or in another shape, as sentences; their values do come back.
    """

    layout: Layout
    prefix: str
    tensors: tuple[ConvertedTensor, ...]
    left_out: Mapping[str, str]
    altered: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(tensor.nbytes for tensor in self.tensors)


def convert_header(
    match: Match,
    layout: Layout,
    *,
    prefix: str | None = None,
    others: Sequence[Match] = (),
    unexpected: Sequence[str] = (),
) -> Conversion:
    """Say what a model is in another naming.

    Args:
        match: the identified model.
        layout: whose names to give it.
        prefix: what to put before each of them. Left out, the input's own where the layout stays as it is, else none.
        others: the other models found in the same file; they are left out.
        unexpected: globs of plain tensors that may be left over; they are left out.

    Raises:
        UnsupportedFormatError: quantised weights.
        SettingsError: a prefix that the family doesn't know.
        AccountingError: tensors that do not add up to the model, or that can't be joined.
        ConfigError: the model class refuses its arguments.
    """
    _refuse_quantised(match)
    stays = match.layout is None or match.layout == layout
    prefix = _checked_prefix(match, (match.prefix if stays else "") if prefix is None else prefix)
    model = model_tensors(build_on_meta(match.family.model, _known_arguments(match)))
    shapes: dict[str, Shape] = {
        name: tuple(tensor.shape) for name, tensor in chain(model.parameters.items(), model.persistent.items())
    }
    accounts = account(match, shapes, model.ties, others=others, unexpected=unexpected)
    altered: tuple[str, ...] = ()
    if stays:
        tensors = _renamed(match, accounts, prefix)
    elif layout == "diffusers":
        tensors = _in_model_names(match, accounts, shapes, prefix)
        altered = tuple(_altered(match, accounts, shapes))
    else:
        tensors = _in_native_names(match, accounts, shapes, prefix)
    return Conversion(layout, prefix, _ordered(tensors), _left_out(match, accounts, tensors), altered)


def _refuse_quantised(match: Match) -> None:
    """Only plain weights are converted: what a key map does to codes and their scales is for ``side_law`` to say."""
    counts = count_formats(bundle for bundle in match.bundles.values() if not bundle.is_plain)
    if counts:
        raise UnsupportedFormatError(
            "quantised weights, which can't be converted yet: "
            + ", ".join(f"{name} ({count} weights)" for name, count in counts.items()),
            expected="plain weights, in any float dtype",
            hint="convert an unquantised version of the checkpoint",
            path=match.header.path,
        )


def _checked_prefix(match: Match, prefix: str) -> str:
    known = match.family.prefixes
    if prefix not in known and prefix != match.prefix:
        raise SettingsError(
            f"the prefix {prefix!r}, under which no {match.family.id} would be found again",
            expected="one of " + ", ".join(map(repr, known)),
            hint="take one of these, or add it to prefixes: in the family file",
            field="prefix",
        )
    return prefix


def _known_arguments(match: Match) -> dict[str, object]:
    """The configuration without what only a folder's config.json has and the installed class does not know."""
    unknown = set(unknown_arguments(match.family.model, match.config)) - match.family.config.keys()
    return {name: value for name, value in match.config.items() if name not in unknown}


def _renamed(match: Match, accounts: Accounts, prefix: str) -> list[ConvertedTensor]:
    """Every tensor as it is, under another prefix; also those that no model loads: the naming has a place for them."""
    used = {piece.source for pieces in accounts.pieces.values() for piece in pieces}
    native = match.layout != "diffusers"
    return [
        ConvertedTensor(prefix + name, bundle.weight.dtype, bundle.weight.shape, (Extract(bundle.weight),))
        for name, bundle in match.bundles.items()
        if bundle.name in used or (native and match.family.key_map.drop_reason(name) is not None)
    ]


def _in_model_names(
    match: Match, accounts: Accounts, shapes: Mapping[str, Shape], prefix: str
) -> list[ConvertedTensor]:
    """Solve the links for the model's tensors."""
    found: list[ConvertedTensor] = []
    for name, pieces in accounts.pieces.items():
        ordered = sorted(pieces, key=lambda piece: piece.target_rows or (0, 0))
        extracts = tuple(_extract(piece, match.everything.weights[piece.source]) for piece in ordered)
        found.append(ConvertedTensor(prefix + name, _one_dtype(name, extracts), shapes[name], extracts))
    return found


def _extract(piece: Piece, bundle: Bundle) -> Extract:
    transposed = piece.operation == "transpose" and len(bundle.weight.shape) == 2
    return Extract(bundle.weight, piece.source_rows, transposed)


def _in_native_names(
    match: Match, accounts: Accounts, shapes: Mapping[str, Shape], prefix: str
) -> list[ConvertedTensor]:
    """Evaluate the links on the tensors of a file in the model's names."""
    sources = {name: match.everything.weights[pieces[0].source].weight for name, pieces in accounts.pieces.items()}
    found: list[ConvertedTensor] = []
    for link in match.family.key_map.links(shapes.keys()):
        if not all(term.model in sources for term in link.terms):
            continue  # a tie: the file has the tensor under its other name
        extracts = tuple(extract for term in link.terms for extract in _native_extracts(term, sources[term.model]))
        for name, shape, own in _shares(link, extracts, shapes):
            found.append(ConvertedTensor(prefix + name, _one_dtype(name, own), shape, own))
    return found


def _native_extracts(term: Term, tensor: TensorInfo) -> tuple[Extract, ...]:
    """What the operation makes of the model's tensor. All but two are the same values in another shape."""
    if term.operation == "swap_halves":
        half, rows = tensor.shape[0] // 2, tensor.shape[0]
        return Extract(tensor, (half, rows)), Extract(tensor, (0, half))
    return (Extract(tensor, transposed=term.operation == "transpose" and len(tensor.shape) == 2),)


def _shares(
    link: Link, extracts: tuple[Extract, ...], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape, tuple[Extract, ...]]]:
    """The link's tensors in the file. Where they are several, each has the same share of the model's rows."""
    parts = [native_shape(term.operation, shapes[term.model]) for term in link.terms]
    known = [part for part in parts if part is not None]
    whole = known[0] if len(known) == 1 else joined_shape(known)
    if whole is not None and len(known) == len(parts) and len(link.files) == 1:
        yield link.files[0], whole, extracts
        return
    shared = None if whole is None else shared_shapes(whole, len(link.files))
    if shared is None or len(extracts) > 1 or extracts[0].transposed:
        raise AccountingError(
            f"{' + '.join(link.files)} can't be made of " + " + ".join(term.model for term in link.terms),
            expected="tensors whose rows can be joined, or shared out equally",
            hint="the checkpoint's shapes are not those of the family, or its key map is wrong: see 'slipcast check'",
            items=[f"{term.model} {list(shapes[term.model])}" for term in link.terms],
        )
    stops = accumulate((shape[0] for shape in shared), initial=0)
    for name, shape, rows in zip(link.files, shared, pairwise(stops), strict=True):
        yield name, shape, (Extract(extracts[0].tensor, rows),)


def _one_dtype(name: str, extracts: Sequence[Extract]) -> str:
    dtypes = {extract.tensor.dtype for extract in extracts}
    if len(dtypes) > 1:
        raise AccountingError(
            f"{name} would be joined from tensors of several dtypes: {', '.join(sorted(dtypes))}",
            expected="tensors of one dtype, since values are converted as they are",
            hint="bring them into one dtype first",
            items=[f"{extract.tensor.name} {extract.tensor.dtype}" for extract in extracts],
        )
    return dtypes.pop()


def _ordered(tensors: Sequence[ConvertedTensor]) -> tuple[ConvertedTensor, ...]:
    """Wide items first, so that every tensor begins at a whole item; among equals in the order of the input's bytes."""

    def place(tensor: ConvertedTensor) -> tuple[int, int, int]:
        first = tensor.extracts[0]
        return -item_bits(tensor.dtype), first.tensor.file, first.tensor.start + first.elements[0]

    return tuple(sorted(tensors, key=place))


def _left_out(match: Match, accounts: Accounts, tensors: Sequence[ConvertedTensor]) -> dict[str, str]:
    """Tensors of the input that the output lacks, each with the reason; one without a reason is a fault."""
    written = {extract.tensor.name for tensor in tensors for extract in tensor.extracts}
    left_out = {fate.name: fate.reason for fate in accounts.unused if fate.name not in written}
    lost = [name for name in match.header.tensors if name not in written and name not in left_out]
    if lost:
        raise AccountingError(
            f"{len(lost)} tensors would be lost in the conversion",
            expected="every tensor of the input in the output, or a reason why it is not",
            hint="this is a fault of the key map: see 'slipcast check'",
            path=match.header.path,
            items=lost,
        )
    return left_out


def _altered(match: Match, accounts: Accounts, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """What converting back would not write as it was: a shape that the model has otherwise, a second spelling."""
    for link, back in zip(
        match.family.key_map.links(shapes.keys(), match.bundles.keys()),
        match.family.key_map.links(shapes.keys()),
        strict=True,
    ):
        if link not in accounts.links or len(link.files) > 1:
            continue
        before = f"{link.files[0]} {list(match.bundles[link.files[0]].shape)}"
        parts = [
            shape for term in link.terms if (shape := native_shape(term.operation, shapes[term.model])) is not None
        ]
        after = f"{back.files[0]} {list(joined_shape(parts) or parts[0])}"
        if before != after:
            yield f"{before} comes back as {after}"
