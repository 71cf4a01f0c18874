"""Decides of each weight of a written checkpoint whether its values or codes stay, are cast, decoded or encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from torch import nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.file_codec import matrix_shape
from slipcast.engine.kept_codes import granularity_of
from slipcast.engine.new_weights import NewWeight
from slipcast.engine.plan import Piece
from slipcast.engine.precision import Rules
from slipcast.engine.wanted import Wanted
from slipcast.engine.written_format import codec_for, format_of
from slipcast.registry.dtypes import is_float
from slipcast.registry.keymap.operations import COMPUTED, SideLaw, side_law, word_of
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import SECOND_SCALE, WEIGHT_SCALE

WEIGHT_SUFFIX = ".weight"

How = Literal["move", "copy", "decode", "keep", "encode"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a weight.

    Attributes:
        how: ``move`` (the bytes as they are), ``copy`` (cast), ``decode`` (dequantise in float32, then cast once),
            ``keep`` (the codes, their scales split, joined or respelt) or ``encode`` (quantise).
        codec: what the result is in; None of plain values, and of what is moved.
        dtype: of a cast or decoded result, as the container spells it.
        reason: why codes are decoded without having been asked for.
    """

    how: How
    codec: Codec | None = None
    dtype: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Chooser:
    """What the choice rests on.

    Attributes:
        wanted: what is asked for.
        bundles: the input's weights by name.
        codecs: the codec of each that is in codes.
        linears: names of the model's weights that may be quantised.
        rules: the family's precision rules.
        decoded: the dtype of weights that are decoded without having been asked for, as the container spells it.
        respells: whether codes get the side tensors that ``wanted`` or its default names.
        equal: whether the tensors of some input weights in a role all hold the same bytes.
        hides_sizes: whether a weight in a codec would show a model of other sizes, since its codes are padded.
    """

    wanted: Wanted
    bundles: Mapping[str, Bundle]
    codecs: Mapping[str, Codec]
    linears: frozenset[str]
    rules: Rules
    decoded: str
    respells: bool
    equal: Callable[[list[Bundle], str], bool]
    hides_sizes: Callable[[NewWeight, Codec], bool]

    def choose(self, weight: NewWeight) -> Choice:
        """The choice for one weight."""
        codecs = [self.codecs.get(piece.source) for piece in weight.pieces]
        if not weight.terms:
            return Choice("move")
        if self.wanted.dtype is not None:
            return self._as_dtype(weight, self.wanted.dtype, in_codes=any(codecs))
        if self._may_encode(codecs) and (new := self._new_codec(weight)) is not None:
            return Choice("encode", new)
        if all(codec is None for codec in codecs):
            return self._plain(weight)
        codec, reason = self._kept_codec(weight, codecs)
        if codec is None:
            fp32 = any(self.rules.stays_fp32(term.model) for term in weight.terms)
            return Choice("decode", dtype="F32" if fp32 else self.decoded, reason=reason)
        bare = _is_raw(codec) and not any(self.bundles[piece.source].sides for piece in weight.pieces)
        as_it_is = weight.is_renamed and not self.respells
        return Choice("move") if bare or as_it_is else Choice("keep", codec)

    def _as_dtype(self, weight: NewWeight, dtype: str, *, in_codes: bool) -> Choice:
        """Every float in one dtype, but for what the family keeps in float32."""
        held = {self.bundles[piece.source].weight.dtype for piece in weight.pieces}
        stays = any(self.rules.stays_fp32(term.model) for term in weight.terms)
        if in_codes:
            return Choice("decode", dtype="F32" if stays else dtype)
        if stays or held == {dtype} or not all(is_float(each) for each in held):
            return self._plain(weight)
        return Choice("copy", dtype=dtype)

    def _plain(self, weight: NewWeight) -> Choice:
        """Values that stay as they are: moved, but where an operation computes them."""
        if not any(word_of(piece.operation) in COMPUTED for piece in weight.pieces):
            return Choice("move")
        return Choice("copy", dtype=self.bundles[weight.pieces[0].source].weight.dtype)

    def _may_encode(self, codecs: list[Codec | None]) -> bool:
        """Whether a weight in these codecs is one to bring into the wanted format, if it can be."""
        if not self.wanted.quantises:
            return False
        present = {format_of(codec) for codec in codecs if codec is not None}
        if None in codecs:
            return not self.codecs or self.wanted.remainder == "quantise"
        alike = {"fp8_scaled", "fp8_raw"} if self.wanted.format == "fp8_scaled" else {self.wanted.format}
        return not present <= alike

    def _new_codec(self, weight: NewWeight) -> Codec | None:
        """The codec to quantise a weight with; None where it stays as it is."""
        if not self._is_linear(weight):
            return None
        codec = codec_for(self.wanted, weight.shape[1])
        if codec.obstacle(weight.shape) is not None or self.hides_sizes(weight, codec):
            return None
        return codec

    def _is_linear(self, weight: NewWeight) -> bool:
        """Whether a weight is rows of Linears that may be quantised, and nothing else."""
        return (
            len(weight.shape) == 2
            and weight.name.endswith(WEIGHT_SUFFIX)
            and all(term.model in self.linears and term.operation in (None, "swap_halves") for term in weight.terms)
        )

    def _kept_codec(self, weight: NewWeight, codecs: list[Codec | None]) -> tuple[Codec | None, str]:
        """The codec in which codes stay, or None and why they can't."""
        known = [codec for codec in codecs if codec is not None]
        if len(known) < len(codecs):
            return None, "quantised and plain rows make one weight"
        if all(_is_raw(codec) for codec in known):
            return self._raw_codec(weight, known)
        if any(isinstance(codec, GGUF) for codec in known):
            return None, "the file that is written can't hold blocks of GGUF"
        if not weight.name.endswith(WEIGHT_SUFFIX):
            return None, f"a scale belongs to a layer's weight, which {weight.name} is not"
        for piece, codec in zip(weight.pieces, known, strict=True):
            if side_law(piece.operation, granularity_of(codec)) is SideLaw.FOLDED:
                return None, f"the key map's {piece.operation} breaks its scale"
            if not weight.is_renamed and not codec.takes_rows(matrix_shape(piece.shape)):
                return None, "only some of its rows are wanted, and codes run across rows"
        joined, reason = self._joined(weight.pieces, known)
        if joined is None:
            return None, reason
        codec = NVFP4("comfy") if isinstance(joined, NVFP4) and self.respells else joined
        obstacle = codec.obstacle(matrix_shape(weight.shape))
        return (codec, "") if obstacle is None else (None, obstacle)

    def _raw_codec(self, weight: NewWeight, codecs: list[Codec]) -> tuple[Codec | None, str]:
        """Codes without a scale. They get one where the others have it, or they a marker: none may look lost."""
        (codec, *others) = set(codecs)
        if others:
            return None, "rows in different codes make one weight"
        marked = self.respells and any(self.bundles[piece.source].full_precision for piece in weight.pieces)
        scaled = marked or self.wanted.format == "fp8_scaled" or self.wanted.spelling == "legacy"
        if scaled and len(weight.shape) == 2 and weight.name.endswith(WEIGHT_SUFFIX) and isinstance(codec, Float8):
            return replace(codec, granularity="tensor"), ""
        return codec, ""

    def _joined(self, pieces: tuple[Piece, ...], codecs: list[Codec]) -> tuple[Codec | None, str]:
        """One codec for the rows of several weights."""
        names = [name for name, _ in groupby(piece.source for piece in pieces)]
        if len(names) == 1:
            return codecs[0], ""
        bundles = [self.bundles[name] for name in names]
        (first, *others) = dict.fromkeys(codecs)
        by_row = {_by_row(codec) for codec in codecs}
        if len(by_row) == 1 and (common := by_row.pop()) is not None:
            shared = not others and (granularity_of(first) == "row" or self.equal(bundles, WEIGHT_SCALE))
            return first if shared else common, ""
        if others:
            return None, "rows in different codes make one weight"
        if isinstance(first, NVFP4) and not self.equal(bundles, SECOND_SCALE):
            return None, "the weights whose rows make it have different scales, of which nvfp4 has one"
        return first, ""


def _by_row(codec: Codec) -> Codec | None:
    """The codec with a scale for each row, where scales of rows or of the whole weight can become that."""
    if not isinstance(codec, ScaledCodec) or codec.granularity not in ("row", "tensor"):
        return None
    return replace(codec, granularity="row")


def _is_raw(codec: Codec) -> bool:
    return isinstance(codec, Float8) and codec.granularity == "none"


def eligible_weights(model: nn.Module, rules: Rules, tied: frozenset[str]) -> frozenset[str]:
    """Names of a model's weights that may be quantised: of plain Linears, but for those that the family keeps."""
    return frozenset(
        f"{path}{WEIGHT_SUFFIX}"
        for path, module in model.named_modules()
        if type(module) is nn.Linear and not rules.stays_plain(path, tied)
    )


def pads(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Whether a weight's codes are padded, so that their shape does not show the weight's."""
    return isinstance(codec, MXFP8 | NVFP4) and stored_shape(codec, shape) != shape


def stored_shape(codec: Codec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The logical shape that the codes of a weight show."""
    codes = next(iter(codec.parts(matrix_shape(shape)).values())).shape
    return (codes[0], codes[1] * 2) if isinstance(codec, NVFP4) else codes
