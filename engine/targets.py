"""Makes the plan's targets: for each tensor of the model how it comes to be and what it is stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from slipcast.engine.accounting import Accounts
from slipcast.engine.chunks import is_cut
from slipcast.engine.codecs.base import CODES, Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.devices import Device
from slipcast.engine.file_codec import part_tensors
from slipcast.engine.kept_codes import saved_codec
from slipcast.engine.model_tensors import ModelTensors
from slipcast.engine.module_precision import WeightChoice
from slipcast.engine.plan import Kind, Piece, Stored, Target
from slipcast.engine.precision import Rules
from slipcast.engine.reader import is_aligned, torch_dtype
from slipcast.engine.saved_quantisation import SavedQuantisation
from slipcast.engine.weight_entries import WEIGHT, tensor_name
from slipcast.registry.checkpoint import read_tensor_bytes
from slipcast.registry.errors import AccountingError
from slipcast.registry.header import Shape
from slipcast.registry.identify import Match
from slipcast.registry.quantisation import Bundle
from slipcast.registry.side_tensors import INPUT_SCALE
from slipcast.registry.validation import counted

_VIEWS = frozenset({None, "reshape", "flat", "conv1x1", "one_frame"})
"""Operations whose inverse only looks at the same bytes in another shape."""


@dataclass(frozen=True, slots=True)
class TargetMaker:
    """What targets are decided on.

    Attributes:
        match: the identified checkpoint.
        accounts: which pieces of the file make which tensor.
        codecs: the codec of each weight of the file that is in codes.
        weights: the choice for each weight that a rule bears on.
        saved: what a config.json says of layers that slipcast quantised.
        rules: the family's precision rules.
        compute_dtype: torch's name of the engaged compute dtype.
        device: where the model goes.
        mmap: whether tensors may be views of the file.
    """

    match: Match
    accounts: Accounts
    codecs: Mapping[str, Codec]
    weights: Mapping[str, WeightChoice]
    saved: SavedQuantisation
    rules: Rules
    compute_dtype: str
    device: Device
    mmap: bool

    def targets(self, tensors: ModelTensors) -> Iterator[Target]:
        """One target for each parameter and buffer of the model."""
        for name, tensor in tensors.parameters.items():
            yield self._target(name, tensor, "parameter", tensors.ties)
        for name, tensor in tensors.persistent.items():
            yield self._target(name, tensor, "buffer", tensors.ties)
        for name, tensor in tensors.computed.items():
            shape = tuple(tensor.shape)
            if name in tensors.ties:
                yield Target(name=name, shape=shape, how="tie", tied_to=tensors.ties[name])
            else:
                stored = stored_tensor(name, "buffer", tensor.dtype, shape)
                yield Target(
                    name=name, shape=shape, how="computed", stored=(stored,), reason="a buffer that the class computes"
                )

    def _target(self, name: str, tensor: torch.Tensor, kind: Kind, ties: Mapping[str, str]) -> Target:
        shape = tuple(tensor.shape)
        if name in ties:
            return Target(
                name=name, shape=shape, how="tie", tied_to=ties[name], reason=f"the same tensor as {ties[name]}"
            )
        pieces = self._pieces(name, ties)
        choice = self.weights.get(name)
        if choice is not None and choice.codec is not None:
            return self._quantised(name, shape, pieces, choice.codec, choice)
        dtype = self._dtype(name, tensor)
        decoded = any(piece.codec is not None for piece in pieces)
        reason = choice.reason if choice is not None else ""
        if decoded and not reason:
            reason = "dequantised: only weights of layers keep codes"
        return Target(
            name=name,
            shape=shape,
            how="decode" if decoded else "copy",
            mapped=not decoded and self._is_mapped(pieces, dtype),
            stored=(stored_tensor(name, kind, dtype, shape),),
            pieces=pieces,
            reason=reason,
        )

    def _quantised(
        self, name: str, shape: Shape, pieces: tuple[Piece, ...], codec: str, choice: WeightChoice
    ) -> Target:
        parts = codec_named(codec).parts(shape)
        stored = tuple(
            stored_tensor(stored_name(name, part), "parameter" if part == CODES else "buffer", spec.dtype, spec.shape)
            for part, spec in parts.items()
        )
        if choice.products.static_scale:
            stored += (stored_tensor(stored_sibling(name, INPUT_SCALE), "buffer", torch.float32, ()),)
        return Target(
            name=name,
            shape=shape,
            how="keep" if choice.keep else "encode",
            mapped=choice.keep and self._is_mapped(pieces, parts[CODES].dtype),
            codec=codec,
            stored=stored,
            pieces=pieces,
            reason=choice.reason,
        )

    def _pieces(self, name: str, ties: Mapping[str, str]) -> tuple[Piece, ...]:
        """The pieces of a tensor, with their codecs; of the first of several tied ones those of one that has some."""
        tied = (other for other, first in ties.items() if first == name)
        pieces = next(self.accounts.pieces[other] for other in (name, *tied) if other in self.accounts.pieces)
        saved = self.saved.codecs.get(name.removesuffix(f".{WEIGHT}"))
        return tuple(self._with_codec(name, piece, saved) for piece in pieces)

    def _with_codec(self, name: str, piece: Piece, saved: Codec | None) -> Piece:
        bundle = self.match.everything.weights[piece.source]
        codec = self.codecs.get(piece.source)
        if saved is not None:
            codec = saved_codec(self.match.header, name, bundle, saved)
        named = None if codec is None else codec.name
        return piece.model_copy(update={"codec": named, "shape": self.accounts.shapes[piece.source]})

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if self.rules.stays_fp32(name) else getattr(torch, self.compute_dtype)

    def _is_mapped(self, pieces: tuple[Piece, ...], dtype: torch.dtype) -> bool:
        """Whether bytes of the file can be the model's tensor as they lie there."""
        if not self.mmap or self.device.kind != "cpu" or len(pieces) > 1 or pieces[0].operation not in _VIEWS:
            return False
        (piece,) = pieces
        bundle = self.match.everything.weights[piece.source]
        if piece.codec is None:
            return torch_dtype(bundle.weight) is dtype and is_aligned(bundle.weight, piece.source_rows)
        codes = part_tensors(bundle, codec_named(piece.codec))[CODES]
        return is_cut(piece) and torch_dtype(codes).itemsize == dtype.itemsize and is_aligned(codes, piece.source_rows)


def refuse_other_kinds(match: Match, accounts: Accounts, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse integers where the model has floats, and the like: a cast would make values of codes.

    Raises:
        AccountingError: it lists them.
    """
    wrong = [
        f"{bundle.name} {bundle.weight.dtype}, for {name} {str(tensors[name].dtype).removeprefix('torch.')}"
        for name, pieces in accounts.pieces.items()
        for bundle in (match.everything.weights[piece.source] for piece in pieces)
        if bundle.is_plain
        and _kind(torch_dtype(bundle.weight)) != _kind(tensors[name].dtype)
        and not _is_whole(match, bundle, tensors[name].dtype)
    ]
    if wrong:
        raise AccountingError(
            f"{counted(len(wrong), 'tensor')} in integers where the model has floats, or the other way round",
            expected="floats for the model's floats, integers for its integers, or one number that is whole",
            hint="take another copy of the file: it is damaged, or in a format that is not known, and no cast helps",
            path=match.header.path,
            items=wrong,
        )


def _is_whole(match: Match, bundle: Bundle, dtype: torch.dtype) -> bool:
    """Whether a tensor is one float that an integer of the model takes without loss, as a counter of steps."""
    tensor = bundle.weight
    if _kind(dtype) != "integer" or tensor.elements != 1 or not torch_dtype(tensor).is_floating_point:
        return False
    raw = bytearray(read_tensor_bytes(match.header, tensor))
    value = float(torch.frombuffer(raw, dtype=torch_dtype(tensor))[0])
    return value.is_integer() and float(torch.iinfo(dtype).min) <= value < float(torch.iinfo(dtype).max)


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def stored_tensor(name: str, kind: Kind, dtype: torch.dtype, shape: Shape) -> Stored:
    """A stored tensor with its bytes."""
    return Stored(
        name=name, kind=kind, dtype=str(dtype).removeprefix("torch."), shape=shape, nbytes=prod(shape) * dtype.itemsize
    )


def stored_sibling(weight: str, leaf: str) -> str:
    """The name of a tensor beside a weight."""
    return weight.removesuffix(WEIGHT) + leaf


def stored_name(weight: str, part: str) -> str:
    """The state dict's name of a codec's part: the scale of ``a.weight`` is ``a.weight_scale``."""
    return stored_sibling(weight, tensor_name(part))
