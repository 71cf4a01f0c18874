"""What a load does, step by step in file order: rows of the file's weights that become rows of a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from slipcast.engine.chunks import Chunk, chunks, is_cut, piece_rows, rows_of
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.file_codec import matrix_shape
from slipcast.engine.plan import Piece, Target
from slipcast.registry.keymap.operations import NUMBERED, word_of
from slipcast.registry.quantisation import Bundle

Action = Literal["fill", "keep", "sort", "static scale"]


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work.

    Attributes:
        target: what is filled.
        action: ``fill`` (bring values there, or quantise them), ``keep`` (codes and scales as they are), ``sort``
            (ranges of their rows, or all in another order), ``static scale`` (the checkpoint's scale of activations).
        pieces: whose rows; several only of what is sorted.
        chunk: which rows of the piece, and of the target; of what is sorted all.
    """

    target: Target
    action: Action
    pieces: tuple[Piece, ...]
    chunk: Chunk | None = None

    @property
    def only(self) -> tuple[Target, Piece, Chunk]:
        """The target, the one piece and the chunk of a step that fills or keeps."""
        assert self.chunk is not None  # only what is sorted has none
        return self.target, self.pieces[0], self.chunk

    @property
    def rows(self) -> tuple[tuple[Piece, tuple[int, int]], ...]:
        """The rows of the file's weights that are read."""
        if self.action == "static scale":
            return ()
        return tuple((piece, piece_rows(piece) if self.chunk is None else self.chunk.rows) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one tensor of the file.

    Attributes:
        source: name of the bundle whose weight the tensor is.
        first: the first byte, counted from the tensor's own.
        last: one past the last byte.
    """

    source: str
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.last - self.first


def steps(targets: Iterable[Target], bundles: Mapping[str, Bundle], chunk_mib: int) -> Iterator[Step]:
    """The steps that fill the targets, in the order of the bytes that they read.

    Args:
        targets: of one plan.
        bundles: the file's weights.
        chunk_mib: size of a chunk in MiB of float32 elements.
    """
    for target in sorted((target for target in targets if target.pieces), key=lambda target: _place(target, bundles)):
        if target.how == "keep":
            yield from _keeping(target, chunk_mib)
        else:
            for piece in target.pieces:
                for chunk in chunks(target, piece, chunk_mib):
                    yield Step(target, "fill", (piece,), chunk)


def spans(step: Step, bundles: Mapping[str, Bundle]) -> Iterator[Span]:
    """The bytes of weights that a step reads; scales beside codes, which are few, are not among them."""
    for piece, rows in step.rows:
        weight = bundles[piece.source].weight
        total = rows_of(piece.shape)
        if step.action == "sort" or _taken_whole(piece) or weight.nbytes % max(total, 1) or _is_padded(piece, bundles):
            yield Span(piece.source, 0, weight.nbytes)
        else:
            yield Span(piece.source, weight.nbytes // total * rows[0], weight.nbytes // total * rows[1])


def _place(target: Target, bundles: Mapping[str, Bundle]) -> tuple[int, int, int]:
    piece = target.pieces[0]
    weight = bundles[piece.source].weight
    return weight.file, weight.start, piece_rows(piece)[0]


def _keeping(target: Target, chunk_mib: int) -> Iterator[Step]:
    """Take over the file's codes and scales: as they lie there, sorted anew, or joined from several weights."""
    pieces = tuple(sorted(target.pieces, key=lambda piece: piece.target_rows or (0, 0)))
    if len({piece.source for piece in pieces}) > 1:
        for piece in pieces:
            yield Step(target, "keep", (piece,), Chunk(piece_rows(piece), piece.target_rows or (0, 0)))
    elif len(pieces) > 1 or not is_cut(pieces[0]) or word_of(pieces[0].operation) in NUMBERED:
        yield Step(target, "sort", pieces)
    else:
        for chunk in chunks(target, pieces[0], chunk_mib):
            yield Step(target, "keep", (pieces[0],), chunk)
    yield Step(target, "static scale", pieces)


def _taken_whole(piece: Piece) -> bool:
    """Whether all codes of a weight are needed for any of its rows."""
    if piece.codec is None:
        return False
    return not is_cut(piece) or not codec_named(piece.codec).takes_rows(matrix_shape(piece.shape))


def _is_padded(piece: Piece, bundles: Mapping[str, Bundle]) -> bool:
    """Whether a weight has more rows in the file than it means."""
    bundle = bundles[piece.source]
    return piece.codec is not None and bundle.format != "gguf" and bundle.weight.shape[:1] != piece.shape[:1]
