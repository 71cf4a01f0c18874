"""Makes the plan's targets: for each tensor of the model how it comes to be and what it is stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from slipcast.engine.accounting import Accounts
from slipcast.engine.codecs.base import CODES
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.devices import Device
from slipcast.engine.model_tensors import ModelTensors
from slipcast.engine.module_precision import WeightChoice
from slipcast.engine.plan import How, Kind, Piece, Stored, Target
from slipcast.engine.precision import TORCH_NAMES, Rules
from slipcast.engine.reader import is_aligned
from slipcast.engine.weight_entries import WEIGHT, tensor_name
from slipcast.registry.header import Shape
from slipcast.registry.identify import Match

_VIEWS = frozenset({None, "reshape", "flat", "conv1x1"})
"""Operations whose inverse only looks at the same bytes in another shape."""


@dataclass(frozen=True, slots=True)
class TargetMaker:
    """What targets are decided on.

    Attributes:
        match: the identified checkpoint.
        accounts: which pieces of the file make which tensor.
        weights: the choice for each weight that a rule bears on.
        rules: the family's precision rules.
        compute_dtype: torch's name of the engaged compute dtype.
        device: where the model goes.
        mmap: whether tensors may be views of the file.
    """

    match: Match
    accounts: Accounts
    weights: Mapping[str, WeightChoice]
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
            parts = codec_named(choice.codec).parts(shape)
            stored = tuple(
                stored_tensor(
                    stored_name(name, part), "parameter" if part == CODES else "buffer", spec.dtype, spec.shape
                )
                for part, spec in parts.items()
            )
            how: How = "keep" if choice.keep else "encode"
            return Target(
                name=name, shape=shape, how=how, codec=choice.codec, stored=stored, pieces=pieces, reason=choice.reason
            )
        dtype = self._dtype(name, tensor)
        stored = (stored_tensor(name, kind, dtype, shape),)
        how = self._how(pieces, dtype)
        reason = choice.reason if choice is not None else ""
        if how == "decode" and not reason:
            reason = "dequantised: only weights of layers keep codes"
        return Target(name=name, shape=shape, how=how, stored=stored, pieces=pieces, reason=reason)

    def _pieces(self, name: str, ties: Mapping[str, str]) -> tuple[Piece, ...]:
        """The pieces of a tensor; of the first of several tied ones those of whichever the file has."""
        if name in self.accounts.pieces:
            return self.accounts.pieces[name]
        return next(
            self.accounts.pieces[other]
            for other, first in ties.items()
            if first == name and other in self.accounts.pieces
        )

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if self.rules.stays_fp32(name) else getattr(torch, self.compute_dtype)

    def _how(self, pieces: tuple[Piece, ...], dtype: torch.dtype) -> How:
        """Adopted where the file's bytes are the model's, dequantised where they are codes, else copied and cast."""
        bundles = [self.match.everything.weights[piece.source] for piece in pieces]
        if any(not bundle.is_plain for bundle in bundles):
            return "decode"
        adopted = (
            self.mmap
            and self.device.kind == "cpu"
            and len(pieces) == 1
            and pieces[0].operation in _VIEWS
            and TORCH_NAMES.get(bundles[0].weight.dtype) == str(dtype).removeprefix("torch.")
            and is_aligned(bundles[0].weight, pieces[0].source_rows)
        )
        return "adopt" if adopted else "copy"


def stored_tensor(name: str, kind: Kind, dtype: torch.dtype, shape: Shape) -> Stored:
    """A stored tensor with its bytes."""
    return Stored(
        name=name, kind=kind, dtype=str(dtype).removeprefix("torch."), shape=shape, nbytes=prod(shape) * dtype.itemsize
    )


def stored_name(weight: str, part: str) -> str:
    """The state dict's name of a codec's part: the scale of ``a.weight`` is ``a.weight_scale``."""
    return weight.removesuffix(WEIGHT) + tensor_name(part)
