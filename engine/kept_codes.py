"""Whether a layer can keep the codes that a file holds, and in which codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from slipcast.engine.codecs.base import CODES, Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.file_codec import matrix_shape, part_tensors
from slipcast.engine.layers import layer_codec, quantisation_obstacle
from slipcast.engine.plan import Piece
from slipcast.engine.reader import torch_dtype
from slipcast.registry.errors import ConfigError
from slipcast.registry.header import Header
from slipcast.registry.keymap.operations import NUMBERED, Granularity, SideLaw, side_law, word_of
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import SECOND_SCALE, WEIGHT_SCALE


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of the file that become rows of one weight.

    Attributes:
        piece: which rows, and how they lie in the weight.
        bundle: the file's tensors.
        codec: what they are in; None of plain values.
    """

    piece: Piece
    bundle: Bundle
    codec: Codec | None


def saved_codec(header: Header, path: str, bundle: Bundle, codec: Codec) -> Codec:
    """The codec that a config.json names for the layer ``path``, held against the tensors beside it.

    Raises:
        ConfigError: codes of another dtype, or scales of another shape, than the codec stores.
    """
    if not _stores(codec, bundle):
        raise ConfigError(
            f"config.json says that {path} is stored as {codec.name}, which its tensors are not",
            expected=f"the tensors of {codec.name} for a weight of shape {list(bundle.shape)}",
            hint="put the config.json that was saved with these weights beside them",
            path=header.path,
            items=[f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in bundle.tensors],
        )
    return codec


def _stores(codec: Codec, bundle: Bundle) -> bool:
    """Whether a bundle's tensors are what a codec stores: no part missing, none of another size, no scale left over."""
    if codec.obstacle(bundle.shape) is not None:
        return False
    parts = codec.parts(bundle.shape)
    tensors = part_tensors(bundle, codec)
    scales = [bundle.sides[role] for role in (WEIGHT_SCALE, SECOND_SCALE) if role in bundle.sides]
    return (
        tensors.keys() == parts.keys()
        and all(scale in tensors.values() for scale in scales)
        and all(tensors[name].elements == prod(part.shape) for name, part in parts.items())
        and torch_dtype(tensors[CODES]) is parts[CODES].dtype
    )


def kept_codec(module: nn.Module, rows: Sequence[CodedRows], saved: Codec | None) -> tuple[Codec | None, str]:
    """The codec in which a layer keeps its file's codes, or None and the reason why it can't.

    Args:
        module: the layer, plain, on the meta device.
        rows: what makes its weight.
        saved: the codec that a config.json names for the layer; such codes are slipcast's own.
    """
    codec, reason = _common_codec(rows)
    if codec is None:
        return None, reason
    if saved is None and type(module) is not nn.Linear:
        return None, f"a {type(module).__name__} does not keep codes of another producer"
    codec = saved or layer_codec(module, codec)
    obstacle = quantisation_obstacle(module, codec)
    return (None, obstacle) if obstacle is not None else (codec, "")


def _common_codec(rows: Sequence[CodedRows]) -> tuple[Codec | None, str]:
    """One codec for all rows of a weight, or None and why there is none."""
    codecs = {each.codec for each in rows}
    if None in codecs:
        return None, "quantised and plain rows make one weight"
    for each in rows:
        codec = each.codec
        assert codec is not None
        if isinstance(codec, Float8) and codec.dtype is torch.float8_e5m2:
            return None, "its codes are e5m2, which no layer keeps"
        if side_law(each.piece.operation, granularity_of(codec)) is SideLaw.FOLDED:
            return None, f"the key map's {each.piece.operation} breaks its scale"
        if not codec.takes_rows(matrix_shape(each.bundle.shape)):
            if each.piece.source_rows is not None:
                return None, "only some of its rows are wanted, and codes run across rows"
            if word_of(each.piece.operation) in NUMBERED:
                return None, "its rows change places, and codes run across rows"
    if len({each.bundle.name for each in rows}) == 1:
        return rows[0].codec, ""
    by_row = {_by_row(codec) for codec in codecs}
    if len(by_row) != 1 or None in by_row:
        return None, "rows of several tensors make one weight, and their codes can't be put together"
    return by_row.pop(), ""


def _by_row(codec: Codec | None) -> Codec | None:
    """The codec of codes that are joined with those of other tensors: each row then carries its own scale."""
    if not isinstance(codec, ScaledCodec) or codec.granularity not in ("row", "tensor") or codec.axis:
        return None
    return replace(codec, granularity="row")


def granularity_of(codec: Codec) -> Granularity:
    """How many weights share one scale of a codec, as the laws of the key map's operations put it."""
    if not isinstance(codec, ScaledCodec) or codec.granularity == "block":
        return "block"
    return "row" if codec.granularity == "row" else "tensor"
