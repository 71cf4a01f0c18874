"""Whether a layer can keep the codes and scales that its file holds, and in which codec."""

from __future__ import annotations

from collections.abc import Sequence

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import layer_codec, quantisation_obstacle
from slipcast.engine.plan import Piece
from slipcast.registry.quantisation import Bundle
from torch import nn

FLOAT8_FORMATS = frozenset({"fp8_scaled", "fp8_raw"})


def kept_codec(
    module: nn.Module, pieces: Sequence[Piece], bundles: Sequence[Bundle], saved: Codec | None
) -> tuple[Codec | None, str]:
    """The codec in which a layer keeps its file's codes, or None and the reason why it can't.

    Args:
        module: the layer, plain, on the meta device.
        pieces: the rows of the file that make its weight.
        bundles: the weight of each piece.
        saved: the codec that a config.json names for the layer; such codes are slipcast's own.
    """
    reason = _foreign_rows(pieces, bundles)
    if reason:
        return None, reason
    if saved is None and type(module) is not nn.Linear:
        return None, f"a {type(module).__name__} does not keep codes of another producer"
    codec = saved or layer_codec(module, _codec_of(bundles))
    obstacle = quantisation_obstacle(module, codec)
    return (None, obstacle) if obstacle is not None else (codec, "")


def _foreign_rows(pieces: Sequence[Piece], bundles: Sequence[Bundle]) -> str:
    """Why the codes of some rows can't be put together under one codec, or ""."""
    if any(bundle.format not in FLOAT8_FORMATS for bundle in bundles):
        return "quantised and plain rows make one weight"
    if any(bundle.weight.dtype != "F8_E4M3" for bundle in bundles):
        return "its codes are e5m2, which no layer keeps"
    if any(piece.operation is not None for piece in pieces):
        return f"the key map's {pieces[0].operation} breaks its scale"
    if len({bundle.format for bundle in bundles}) > 1:
        return "rows with and without a scale make one weight"
    return "its scales are block-wise" if any(bundle.granularity == "block" for bundle in bundles) else ""


def _codec_of(bundles: Sequence[Bundle]) -> Codec:
    """Rows joined from several tensors need a scale for each row; one tensor keeps the reach of its scale."""
    if bundles[0].format == "fp8_raw":
        return Float8("none")
    one = len({bundle.name for bundle in bundles}) == 1
    return Float8("tensor" if one and bundles[0].granularity == "tensor" else "row")
