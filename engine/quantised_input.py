"""Quantises what layers are given, once for all that are given the same tensor, as queries, keys and values are."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from slipcast.engine.kernels.operators import quantise_rows


@dataclass(frozen=True, slots=True)
class _Quantised:
    """Codes and scales of a tensor.

    Attributes:
        input: the tensor.
        state: how often it had been written to, where its elements lay, and the stream that codes and scales were
            computed on; another one would have to wait for it.
        codes: float8 ``[M, K]``.
        scale: float32 ``[M, 1]``.
    """

    input: weakref.ref[Tensor]
    state: tuple[object, ...]
    codes: Tensor
    scale: Tensor


class _Last(threading.local):
    """What a thread has quantised last, until the tensor dies."""

    def __init__(self) -> None:
        self.slot: list[_Quantised] = []


_last = _Last()


def quantised_input(input: Tensor, columns: int, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of a layer's input: see ``quantise_rows``.

    On a GPU they are kept until the tensor dies or the next one is quantised, for other layers that are given it. Not
    under a static scale, of which each layer has its own; nor of tensors that don't count how often they were written
    to, as in inference mode; nor in compiled code, which a compiler makes of all layers together; nor in a graph of
    CUDA's, which computes anew in each replay what it was not given when it was recorded. What is written through
    ``data`` is seen as little as by autograd.

    Args:
        input: float ``[..., columns]``.
        columns: of a row.
        input_scale: a static scale, float32 ``[]``, or None for a scale of each row.
    """
    rows = input.reshape(-1, columns)
    if torch.compiler.is_compiling() or input_scale is not None or not input.is_cuda or input.is_inference():
        return quantise_rows(rows, input_scale)
    if torch.cuda.is_current_stream_capturing():
        return quantise_rows(rows)
    slot = _last.slot
    state = input._version, input.data_ptr(), input.shape, input.stride(), torch.cuda.current_stream(input.device)
    for known in slot:
        if known.input() is input and known.state == state:
            return known.codes, known.scale
    slot.clear()  # its memory is free for the next
    codes, scale = quantise_rows(rows)
    slot.append(_Quantised(weakref.ref(input, lambda dead: _forget(slot, dead)), state, codes, scale))
    return codes, scale


def _forget(slot: list[_Quantised], dead: weakref.ref[Tensor]) -> None:
    slot[:] = [quantised for quantised in slot if quantised.input is not dead]
