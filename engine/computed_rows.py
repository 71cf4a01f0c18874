"""What a key map's operations do to values: rows in another order, axes exchanged, other numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from slipcast.registry.keymap.link import Operation
from slipcast.registry.keymap.operations import NUMBERED, number_of, word_of


def undone(values: Tensor, operation: Operation | None) -> Tensor:
    """The model's values, of the file's whole tensor; a view's shape is left to the caller.

    Args:
        values: the file's; of codes only rows may change places.
        operation: what the file's tensor is of the model's.
    """
    order = row_order(operation, values.shape[0] if values.ndim else 1, values.device)
    if order is not None:
        return values.index_select(0, order)
    if operation == "transpose" and values.ndim == 2:
        return values.t()
    if operation in ("plus_one", "minus_one"):
        exact = values.float() if values.is_floating_point() else values
        return exact - 1 if operation == "plus_one" else exact + 1
    return values


def row_order(operation: Operation | None, rows: int, device: torch.device | str = "cpu") -> Tensor | None:
    """For each row of the model's tensor the row of the file's that it is, int64; None where they are in one order."""
    if operation is None or word_of(operation) not in NUMBERED:
        return None
    half = number_of(operation) // 2
    shape = (-1, half, 2) if word_of(operation) == "interleave" else (-1, 2, half)
    return torch.arange(rows, device=device).view(shape).transpose(1, 2).reshape(-1)
