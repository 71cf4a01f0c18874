"""What codec a file's codes are in, and whether a layer can keep them as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import layer_codec, quantisation_obstacle
from slipcast.engine.plan import Piece
from slipcast.engine.reader import torch_dtype
from slipcast.registry.errors import ConfigError
from slipcast.registry.header import Header
from slipcast.registry.keymap.operations import SideLaw, side_law
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import WEIGHT_SCALE

FLOAT8_FORMATS = frozenset({"fp8_scaled", "fp8_raw"})


def file_codec(bundle: Bundle) -> Codec | None:
    """The codec that decodes a weight of the file; None of a plain one. Only of the formats in ``FLOAT8_FORMATS``."""
    if bundle.is_plain:
        return None
    dtype = torch_dtype(bundle.weight)
    if bundle.granularity == "block":
        return Float8("block", block=bundle.shape[1] // bundle.sides[WEIGHT_SCALE].shape[1], dtype=dtype)
    if bundle.granularity == "column":
        return Float8("row", axis=1, dtype=dtype)
    return Float8(bundle.granularity or "none", dtype=dtype)


def saved_codec(header: Header, path: str, bundle: Bundle, codec: Codec) -> Codec:
    """The codec that a config.json names for the layer ``path``, held against the tensors beside it.

    Raises:
        ConfigError: codes of another dtype, or scales of another shape, than the codec stores.
    """
    scale = bundle.sides.get(WEIGHT_SCALE)
    found = {CODES: torch_dtype(bundle.weight), **({} if scale is None else {SCALE: scale.elements})}
    parts = {} if codec.obstacle(bundle.shape) else codec.parts(bundle.shape)
    expected = {name: part.dtype if name == CODES else torch.Size(part.shape).numel() for name, part in parts.items()}
    if found != expected:
        raise ConfigError(
            f"config.json says that {path} is stored as {codec.name}, which its tensors are not",
            expected=f"the tensors of {codec.name} for a weight of shape {list(bundle.shape)}",
            hint="put the config.json that was saved with these weights beside them",
            path=header.path,
            items=[f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in bundle.tensors],
        )
    return codec


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
    if any(bundle.granularity == "block" for bundle in bundles):
        return "its scales are block-wise"
    for piece, bundle in zip(pieces, bundles, strict=True):
        by_row = bundle.granularity not in (None, "tensor")
        if side_law(piece.operation, "row" if by_row else "tensor") is SideLaw.FOLDED:
            return f"the key map's {piece.operation} breaks its scale"
    return "rows with and without a scale make one weight" if len({bundle.format for bundle in bundles}) > 1 else ""


def _codec_of(bundles: Sequence[Bundle]) -> Codec:
    """Rows joined from several tensors need a scale for each row; one tensor keeps the reach of its scale."""
    if bundles[0].format == "fp8_raw":
        return Float8("none")
    one = len({bundle.name for bundle in bundles}) == 1
    return Float8("tensor" if one and bundles[0].granularity == "tensor" else "row")
