"""The weights of a checkpoint in another naming: each one's name and shape, and of which rows of the input it is made.

Native names become the model's by solving the key map's links, the model's become native by evaluating the same links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from slipcast.engine.accounting import Accounts
from slipcast.engine.plan import Piece
from slipcast.registry.claims import Layout
from slipcast.registry.errors import AccountingError
from slipcast.registry.header import Shape
from slipcast.registry.identify import Match
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.link import Link, Term
from slipcast.registry.keymap.operations import (
    COMPUTED,
    inverse,
    joined_shape,
    native_shape,
    shared_shapes,
    word_of,
)

Codecs = Mapping[str, str]
"""Name of a weight's bundle in the input -> name of the codec that it is in."""


@dataclass(frozen=True, slots=True)
class NewWeight:
    """A weight of the output.

    Attributes:
        name: its name without the prefix.
        shape: its logical shape.
        pieces: whose rows it is, one after another. Of their operations only ``transpose`` moves values; the others
            are the same values in another shape.
        terms: the tensors of the model that it holds; none where no model loads it.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    terms: tuple[Term, ...] = ()

    @property
    def is_renamed(self) -> bool:
        """Whether it is a weight of the input under another name, and nothing else."""
        (first, *others) = self.pieces
        return not others and first.source_rows is None and first.operation is None and first.shape == self.shape


def new_weights(
    match: Match, accounts: Accounts, shapes: Mapping[str, Shape], codecs: Codecs, layout: Layout
) -> list[NewWeight]:
    """The weights in a naming.

    Args:
        match: the identified model.
        accounts: how its tensors add up to the model.
        shapes: the model's tensors.
        codecs: what the input's weights are in.
        layout: whose names to give.

    Raises:
        AccountingError: tensors that can't be joined.
    """
    if match.layout is None or match.layout == layout:
        return _renamed(match, accounts, codecs)
    if layout == "diffusers":
        return [
            NewWeight(name, shapes[name], _in_order(pieces, accounts, codecs), (Term(name),))
            for name, pieces in accounts.pieces.items()
        ]
    return _evaluated(match.family.key_map_of(layout), accounts, shapes, codecs)


def _renamed(match: Match, accounts: Accounts, codecs: Codecs) -> list[NewWeight]:
    """Every weight as it is; also those that no model loads: the naming has a place for them."""
    terms = {link.files[0]: link.terms for link in accounts.links if len(link.files) == 1}
    terms |= {name: link.terms for link in accounts.links if len(link.files) > 1 for name in link.files}
    found: list[NewWeight] = []
    for name, bundle in match.bundles.items():
        shape = accounts.shapes.get(bundle.name)
        if shape is not None:
            piece = Piece(source=bundle.name, codec=codecs.get(bundle.name), shape=shape)
            found.append(NewWeight(name, shape, (piece,), terms[name]))
        elif match.key_map.drop_reason(name) is not None:
            found.append(NewWeight(name, bundle.shape, (Piece(source=bundle.name, shape=bundle.shape),)))
    return found


def _in_order(pieces: Sequence[Piece], accounts: Accounts, codecs: Codecs) -> tuple[Piece, ...]:
    return tuple(
        piece.model_copy(update={"codec": codecs.get(piece.source), "shape": accounts.shapes[piece.source]})
        for piece in sorted(pieces, key=lambda piece: piece.target_rows or (0, 0))
    )


def _evaluated(key_map: KeyMap, accounts: Accounts, shapes: Mapping[str, Shape], codecs: Codecs) -> list[NewWeight]:
    """Evaluate a key map's links on the tensors of a file of which each is one of the model's."""
    sources = {name: pieces[0] for name, pieces in accounts.pieces.items()}
    found: list[NewWeight] = []
    for link in key_map.links(shapes.keys()):
        if not all(term.model in sources for term in link.terms):
            continue  # a tie: the file has the tensor under its other name
        pieces: list[Piece] = []
        row = 0
        for term in link.terms:
            shape = native_shape(term.operation, shapes[term.model]) or ()
            pieces += _native_pieces(term, sources[term.model], row, shape[0] if shape else 1)
            row += shape[0] if shape else 1
        ordered = _in_order(pieces, accounts, codecs)
        found += [NewWeight(*share, link.terms) for share in _shares(link, ordered, shapes)]
    return found


def _native_pieces(term: Term, piece: Piece, row: int, rows: int) -> list[Piece]:
    """What the operation makes of the model's tensor, which a piece of the input is, at some rows of the file's."""
    source, operation = piece.source, term.operation
    if word_of(piece.operation) in COMPUTED:
        if operation is not None:
            raise AccountingError(
                f"{source} is {piece.operation} of {term.model}, of which {operation} is to be written",
                expected="an operation in one of the two namings",
                hint="convert to the model's names first (layout diffusers), then these",
            )
        operation = piece.operation
    elif operation == "swap_halves":
        half = rows // 2
        return [
            Piece(source=source, source_rows=(half, rows), target_rows=(row, row + half)),
            Piece(source=source, source_rows=(0, half), target_rows=(row + half, row + rows)),
        ]
    elif word_of(operation) in COMPUTED:
        operation = inverse(operation)  # a piece says what the input is of the output
    return [Piece(source=source, operation=operation, target_rows=(row, row + rows))]


def _shares(
    link: Link, pieces: tuple[Piece, ...], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape, tuple[Piece, ...]]]:
    """The link's tensors in the file. Where they are several, each has the same share of the model's rows."""
    parts = [native_shape(term.operation, shapes[term.model]) for term in link.terms]
    known = [part for part in parts if part is not None]
    whole = known[0] if len(known) == 1 else joined_shape(known)
    if whole is not None and len(known) == len(parts) and len(link.files) == 1:
        yield link.files[0], whole, pieces
        return
    shared = None if whole is None else shared_shapes(whole, len(link.files))
    if shared is None or len(pieces) > 1 or word_of(pieces[0].operation) in {"transpose"} | COMPUTED:
        raise AccountingError(
            f"{' + '.join(link.files)} can't be made of " + " + ".join(term.model for term in link.terms),
            expected="tensors whose rows can be joined, or shared out equally",
            hint="the checkpoint's shapes are not those of the family, or its key map is wrong: see 'slipcast check'",
            items=[f"{term.model} {list(shapes[term.model])}" for term in link.terms],
        )
    stops = accumulate((shape[0] for shape in shared), initial=0)
    for name, shape, rows in zip(link.files, shared, pairwise(stops), strict=True):
        yield name, shape, (pieces[0].model_copy(update={"source_rows": rows, "target_rows": None}),)
