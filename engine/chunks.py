"""Cuts the pieces of a target into chunks of rows, so that casting holds one at a time, and says what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.file_codec import matrix_shape
from slipcast.engine.plan import Piece, Target
from slipcast.registry.keymap.operations import COMPUTED, NUMBERED, word_of
from slipcast.registry.quantisation import Bundle

_FLOAT32 = 4
_PER_ROW = 32
"""Bytes for each row that is encoded: its largest magnitude, scale and flags, as small tensors."""
_DECODING = 12
"""Bytes for each element that is decoded by codes times scales: the codes in float32, the product and the result."""
_UNPACKING = 24
"""The same where codes have to be unpacked first."""
_WHOLE = NUMBERED | {"transpose"}
"""Operations for which a tensor is read in one go."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of the file's weight that are rows of a target.

    Attributes:
        rows: first and one past the last row of the file's weight.
        target_rows: the rows of the target that they are.
    """

    rows: tuple[int, int]
    target_rows: tuple[int, int]


def chunks(target: Target, piece: Piece, chunk_mib: int) -> Iterator[Chunk]:
    """The chunks of one piece, in file order. ``chunk_mib`` counts float32 elements."""
    first, last = piece_rows(piece)
    wanted = piece.target_rows or (0, rows_of(target.shape))
    if target.mapped or _is_whole(target, piece):
        yield Chunk((first, last), wanted)
        return
    step = _step(piece, chunk_mib)
    start = first
    while start < last:
        stop = min(last, (start // step + 1) * step)
        yield Chunk((start, stop), (wanted[0] + start - first, wanted[0] + stop - first))
        start = stop


def piece_rows(piece: Piece) -> tuple[int, int]:
    """The rows of the file's weight that a piece takes."""
    return piece.source_rows or (0, rows_of(piece.shape))


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows of a tensor; one without axes has one."""
    return shape[0] if shape else 1


def rows_per_chunk(shape: tuple[int, ...], chunk_mib: int) -> int:
    """Whole rows of about ``chunk_mib`` MiB in float32, at least one."""
    return max(1, chunk_mib * 2**20 // _FLOAT32 // max(1, prod(shape[1:])))


def multiplies(target: Target) -> bool:
    """Whether bringing the file's weights into a target multiplies matrices."""
    codecs = [target.codec] if target.how == "encode" else [piece.codec for piece in target.pieces]
    return target.how in ("encode", "decode") and any(name and codec_named(name).multiplies for name in codecs)


def is_cut(piece: Piece) -> bool:
    """Whether a piece's rows can be cut out of the parts that hold them; else the parts are sorted anew."""
    tile = _tile(piece)
    first, last = piece_rows(piece)
    return first % tile == 0 and (last % tile == 0 or last == rows_of(piece.shape))


def share(bundle: Bundle, piece: Piece, rows: tuple[int, int]) -> int:
    """Bytes of a weight's own tensor that some of its rows are; shares of all rows add up to all bytes."""
    total = max(rows_of(piece.shape), 1)
    return bundle.weight.nbytes * rows[1] // total - bundle.weight.nbytes * rows[0] // total


def chunk_bytes(target: Target, bundles: Mapping[str, Bundle], chunk_mib: int, device: torch.device) -> int:
    """Bytes of scratch that casting a target takes at most, beside its result."""
    each = (_scratch_bytes(target, piece, bundles[piece.source], chunk_mib, device) for piece in target.pieces)
    return max(each, default=0)


def slab_bytes(target: Target, bundles: Mapping[str, Bundle], chunk_mib: int) -> int:
    """Bytes of the largest tensor that is read at a time, as it lies in the file."""
    return max((_slab_bytes(target, piece, bundles[piece.source], chunk_mib) for piece in target.pieces), default=0)


def side_bytes(target: Target, bundles: Mapping[str, Bundle]) -> int:
    """Bytes of the largest tensor beside codes that is read for a target."""
    coded = [bundles[piece.source] for piece in target.pieces if piece.codec is not None]
    return max((side.nbytes for bundle in coded for side in bundle.sides.values()), default=0)


def _is_whole(target: Target, piece: Piece) -> bool:
    """Whether a piece is read in one go: its rows are not the target's, or can't be taken apart."""
    if word_of(piece.operation) in _WHOLE or prod(piece.shape[1:]) != prod(target.shape[1:]) or not piece.shape:
        return True
    if target.how == "encode" and not _codec(target).streams:
        return True
    return piece.codec is not None and not is_cut(piece)


def _step(piece: Piece, chunk_mib: int) -> int:
    """Rows of a chunk: whole tiles of them."""
    tile = _tile(piece)
    return max(rows_per_chunk(piece.shape, chunk_mib) // tile, 1) * tile


def _tile(piece: Piece) -> int:
    return 1 if piece.codec is None else codec_named(piece.codec).tile_rows(matrix_shape(piece.shape))


def _scratch_bytes(target: Target, piece: Piece, bundle: Bundle, chunk_mib: int, device: torch.device) -> int:
    rows = _largest(target, piece, chunk_mib)
    elements = rows * prod(piece.shape[1:])
    moved = elements * max(_FLOAT32, _item(bundle)) if word_of(piece.operation) in COMPUTED else 0
    decoding = 0 if piece.codec is None else _decoding_bytes(target, piece, bundle, elements)
    if target.how == "encode":
        if _codec(target).defers(device):
            widened = elements * _FLOAT32 if _item(bundle) > _FLOAT32 else 0
            return decoding + moved + widened + rows * _PER_ROW
        in_one_go = 0 if _codec(target).streams else elements * (_FLOAT32 + _item(bundle))
        return decoding + elements * _FLOAT32 + in_one_go + rows * _PER_ROW
    return decoding if target.how == "keep" else decoding + moved


def _decoding_bytes(target: Target, piece: Piece, bundle: Bundle, elements: int) -> int:
    """Bytes that so many elements of a piece in codes take while they are decoded, or that codes take while sorted."""
    sorted_anew = 2 * _nbytes(bundle) if not is_cut(piece) or word_of(piece.operation) in NUMBERED else 0
    if target.how == "keep":
        return sorted_anew
    codec = codec_named(piece.codec or "")
    if not codec.takes_rows(matrix_shape(piece.shape)):
        elements = prod(piece.shape)  # decoded whole, whatever rows of it are wanted
    return sorted_anew + elements * (_DECODING if isinstance(codec, ScaledCodec) else _UNPACKING)


def _slab_bytes(target: Target, piece: Piece, bundle: Bundle, chunk_mib: int) -> int:
    sides = max((side.nbytes for side in bundle.sides.values()), default=0) if piece.codec is not None else 0
    if target.mapped:
        return sides
    if piece.codec is not None and not is_cut(piece):
        return max(sides, bundle.weight.nbytes)
    rows = _largest(target, piece, chunk_mib)
    return max(sides, -(-bundle.weight.nbytes * rows // max(rows_of(piece.shape), 1)))


def _largest(target: Target, piece: Piece, chunk_mib: int) -> int:
    """Rows of the largest chunk."""
    first, last = piece_rows(piece)
    return last - first if _is_whole(target, piece) else min(last - first, _step(piece, chunk_mib))


def _nbytes(bundle: Bundle) -> int:
    return sum(tensor.nbytes for tensor in bundle.tensors)


def _item(bundle: Bundle) -> int:
    return bundle.weight.nbytes // max(bundle.weight.elements, 1)


def _codec(target: Target) -> Codec:
    assert target.codec is not None  # an encoded target has one
    return codec_named(target.codec)
