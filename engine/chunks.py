"""Cuts the pieces of a target into chunks of rows, so that casting holds one at a time, and says what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.plan import Piece, Target
from slipcast.engine.reader import torch_dtype
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import WEIGHT_SCALE

_FLOAT32 = 4
_PER_ROW = 32
"""Bytes for each row that is encoded: its largest magnitude, scale and flags, as small tensors."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of a tensor of the file that are rows of a target.

    Attributes:
        start: first element of the file's tensor.
        stop: one past the last.
        rows: the rows of the target that they are.
    """

    start: int
    stop: int
    rows: tuple[int, int]


def is_whole(target: Target, piece: Piece) -> bool:
    """Whether a piece is read in one go: its rows do not lie as the target's do, or one scale needs all of them."""
    if piece.operation == "transpose" or (target.how == "decode" and piece.operation in ("reshape", "flat")):
        return True
    return target.how == "encode" and not _codec(target).streams


def chunks(target: Target, piece: Piece, bundle: Bundle, chunk_mib: int) -> Iterator[Chunk]:
    """The chunks of one piece, in file order. ``chunk_mib`` counts float32 elements."""
    rows = piece.target_rows or (0, target_rows(target))
    width = row_elements(target)
    first = 0 if piece.source_rows is None else piece.source_rows[0] * prod(bundle.weight.shape[1:])
    step = rows[1] - rows[0] if is_whole(target, piece) else rows_per_chunk(target, chunk_mib)
    for row in range(rows[0], max(rows[1], rows[0] + 1), max(step, 1)):  # also a tensor without rows has its chunk
        stop = min(row + step, rows[1])
        yield Chunk(first + (row - rows[0]) * width, first + (stop - rows[0]) * width, (row, stop))


def target_rows(target: Target) -> int:
    """Rows of a target; a tensor without axes has one."""
    return target.shape[0] if target.shape else 1


def row_elements(target: Target) -> int:
    """Elements of one row."""
    return prod(target.shape[1:])


def rows_per_chunk(target: Target, chunk_mib: int) -> int:
    """Whole rows of about ``chunk_mib`` MiB in float32, at least one."""
    return max(1, chunk_mib * 2**20 // _FLOAT32 // max(1, row_elements(target)))


def chunk_bytes(target: Target, bundles: Mapping[str, Bundle], chunk_mib: int) -> int:
    """Bytes of scratch that casting a target takes at most, beside its result."""
    return max((_scratch_bytes(target, piece, bundles[piece.source], chunk_mib) for piece in target.pieces), default=0)


def slab_bytes(target: Target, bundles: Mapping[str, Bundle], chunk_mib: int) -> int:
    """Bytes of the largest chunk, or of the largest scale, as it lies in the file."""
    return max((_slab_bytes(target, piece, bundles[piece.source], chunk_mib) for piece in target.pieces), default=0)


def _scratch_bytes(target: Target, piece: Piece, bundle: Bundle, chunk_mib: int) -> int:
    rows = _largest(target, piece, chunk_mib)
    elements = rows * row_elements(target)
    if target.how == "encode":
        in_one_go = 0 if _codec(target).streams else elements * (_FLOAT32 + torch_dtype(bundle.weight).itemsize)
        return elements * _FLOAT32 + in_one_go + rows * _PER_ROW
    scale = bundle.sides.get(WEIGHT_SCALE) if piece.codec is not None else None
    scaled = 0 if scale is None else scale.elements * _FLOAT32
    return scaled + (elements * 2 * _FLOAT32 if target.how == "decode" else 0)


def _slab_bytes(target: Target, piece: Piece, bundle: Bundle, chunk_mib: int) -> int:
    scale = bundle.sides.get(WEIGHT_SCALE) if piece.codec is not None else None
    chunk = _largest(target, piece, chunk_mib) * row_elements(target) * torch_dtype(bundle.weight).itemsize
    return max(0 if target.mapped else chunk, 0 if scale is None else scale.nbytes)


def _largest(target: Target, piece: Piece, chunk_mib: int) -> int:
    """Rows of the largest chunk."""
    rows = piece.target_rows or (0, target_rows(target))
    count = rows[1] - rows[0]
    return count if is_whole(target, piece) else min(count, rows_per_chunk(target, chunk_mib))


def _codec(target: Target) -> Codec:
    assert target.codec is not None  # an encoded target has one
    return codec_named(target.codec)
