"""Executes links on real tensors, written from the meaning of the language alone: a second opinion on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise

import torch

from slipcast.registry.keymap.link import Link, Operation

Tensors = dict[str, torch.Tensor]


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


NATIVE: Mapping[Operation | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda tensor: tensor,
    "swap_halves": _swap_halves,
    "transpose": lambda tensor: tensor.T if tensor.ndim == 2 else tensor,
    "flat": lambda tensor: tensor.flatten(),
    "reshape": lambda tensor: tensor,
    "interleave/4": lambda tensor: torch.cat([group[[0, 2, 1, 3]] for group in tensor.split(4)]),
    "deinterleave/4": lambda tensor: torch.cat([group[[0, 2, 1, 3]] for group in tensor.split(4)]),
    "interleave/8": lambda tensor: torch.cat([group[[0, 4, 1, 5, 2, 6, 3, 7]] for group in tensor.split(8)]),
    "deinterleave/8": lambda tensor: torch.cat([group[[0, 2, 4, 6, 1, 3, 5, 7]] for group in tensor.split(8)]),
    "plus_one": lambda tensor: tensor + 1,
    "minus_one": lambda tensor: tensor - 1,
    "conv1x1": lambda tensor: tensor[:, :, None, None] if tensor.ndim == 2 else tensor,
    "one_frame": lambda tensor: tensor[:, :, None] if tensor.ndim == 4 else tensor,
}
"""The file's tensor as a function of the model's."""


def _to_model(operation: Operation | None, native: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if operation == "swap_halves":
        return _swap_halves(native)
    if operation == "transpose":
        return native.T if native.ndim == 2 else native
    if operation in ("plus_one", "minus_one"):
        return native - 1 if operation == "plus_one" else native + 1
    if operation is not None and "interleave" in operation:
        other = operation.removeprefix("de") if operation.startswith("de") else f"de{operation}"
        return NATIVE[other](native)
    return native.reshape(shape)


def load(links: Iterable[Link], native: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The model's tensors, of these shapes, out of the file's."""
    model: Tensors = {}
    for link in links:
        whole = native[link.files[0]]
        if len(link.files) > 1:
            whole = torch.cat([native[file] for file in link.files])
        targets = [torch.empty(shapes[term.model], device="meta") for term in link.terms]
        if len(targets) == 1:
            pieces = [whole]
        else:
            rows = [NATIVE[term.operation](target).shape[0] for term, target in zip(link.terms, targets, strict=True)]
            pieces = [whole[start:stop] for start, stop in pairwise(accumulate(rows, initial=0))]
        for term, target, piece in zip(link.terms, targets, pieces, strict=True):
            model[term.model] = _to_model(term.operation, piece, target.shape)
    return model


def save(links: Iterable[Link], model: Mapping[str, torch.Tensor]) -> Tensors:
    """The file's tensors out of the model's; several files of one term get equal rows."""
    native: Tensors = {}
    for link in links:
        parts = [NATIVE[term.operation](model[term.model]) for term in link.terms]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if len(link.files) == 1:
            native[link.files[0]] = whole
        else:
            native |= zip(link.files, whole.chunk(len(link.files)), strict=True)
    return native


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Tensors of these shapes of which every element is another number."""
    tensors: Tensors = {}
    start = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return tensors
