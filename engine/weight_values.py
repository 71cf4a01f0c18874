"""Computes the weights of a written checkpoint: casts, decodes, encodes, or puts the parts of codes together anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from slipcast.engine.chunks import chunks, piece_rows
from slipcast.engine.codecs.base import CODES, SCALE, Codec, Parts, bits
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.computed_rows import undone
from slipcast.engine.file_weight import FileWeight
from slipcast.engine.plan import Piece, Target
from slipcast.engine.reader import torch_dtype
from slipcast.registry.errors import QuantisationError

Open = Callable[[Piece], FileWeight]
"""The weight of the input that a piece is cut from."""

_CHUNK_MIB = 4


def weight_parts(target: Target, dtype: torch.dtype, weight_of: Open) -> Iterator[tuple[str, int, Tensor]]:
    """The parts of a weight, or its values.

    Args:
        target: how it comes to be.
        dtype: of the values of one without codes.
        weight_of: opens the input's weights.

    Yields:
        The part ("" for values), its first element, and elements from there on, flat; valid until the next.

    Raises:
        QuantisationError: values that are not finite, or that the dtype can't hold.
    """
    if target.how == "keep":
        parts = _kept_parts(target, weight_of)
    elif target.how == "encode":
        parts = _encoded_parts(target, weight_of)
    else:
        for first, values in _values(target, weight_of):
            yield "", first, _cast(target, values, dtype)
        return
    for name, part in parts.items():
        yield name, 0, part.reshape(-1)


def _values(target: Target, weight_of: Open) -> Iterator[tuple[int, Tensor]]:
    """A weight's values, some rows at a time: in the input's dtype, of codes in float32."""
    width = prod(target.shape[1:])
    for piece in target.pieces:
        weight = weight_of(piece)
        for chunk in chunks(target, piece, _CHUNK_MIB):
            values = weight.values(*chunk.rows, torch.float32)
            yield chunk.target_rows[0] * width, undone(values, piece.operation).reshape(-1)


def _cast(target: Target, values: Tensor, dtype: torch.dtype) -> Tensor:
    cast = values.to(dtype)
    if dtype is torch.float16 and bool((torch.isinf(cast) & ~torch.isinf(values)).any()):
        raise QuantisationError(
            f"{target.name}: values beyond the 65504 at which float16 ends",
            expected="weights that float16 can hold",
            hint="write the checkpoint in bf16",
        )
    return cast


def _encoded_parts(target: Target, weight_of: Open) -> Parts:
    dtypes = {_plain_dtype(weight_of(piece)) for piece in target.pieces}
    whole = torch.empty(target.shape, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32)
    for first, values in _values(target, weight_of):
        whole.view(-1)[first : first + values.numel()] = values
    try:
        return codec_named(target.codec or "").encode(whole)
    except QuantisationError as error:
        raise QuantisationError(f"{target.name}: {error.found}", expected=error.expected, hint=error.hint) from error


def _plain_dtype(weight: FileWeight) -> torch.dtype:
    """The dtype of a weight's values."""
    return torch.float32 if weight.codec is not None else torch_dtype(weight.bundle.weight)


def _kept_parts(target: Target, weight_of: Open) -> Parts:
    """The parts of rows of one weight or several, in the target's codec."""
    codec = codec_named(target.codec or "")
    several: list[tuple[Parts, int]] = []
    for _, pieces in groupby(target.pieces, key=lambda piece: piece.source):
        ranges = [(piece, piece_rows(piece)) for piece in pieces]
        weight = weight_of(ranges[0][0])
        rows = sum(last - first for _, (first, last) in ranges)
        parts = weight.selected([each for _, each in ranges], ranges[0][0].operation)
        if ranges[0][0].operation == "transpose":  # only codes without scales stay codes then
            parts = {CODES: bits(parts[CODES]).t().contiguous().view(parts[CODES].dtype)}
        several.append((_adapted(parts, weight.codec, codec, rows), rows))
    return several[0][0] if len(several) == 1 else codec.join_rows(several)


def _adapted(parts: Parts, given: Codec | None, wanted: Codec, rows: int) -> Parts:
    """Parts as a codec of the same codes has them, in memory of their own."""
    held = {name: part.clone() if name == CODES else part for name, part in parts.items()}
    if isinstance(given, NVFP4) and given != wanted:
        return given.in_comfy_layout(held, rows)
    if isinstance(given, ScaledCodec) and isinstance(wanted, ScaledCodec) and given.granularity != wanted.granularity:
        scale = held.get(SCALE, torch.ones(()))
        held[SCALE] = scale.expand(rows) if wanted.granularity == "row" else scale
    return held
