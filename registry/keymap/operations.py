"""What each operation of a key map does to shapes, and to the scales and markers beside a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import Literal

from slipcast.registry.header import Shape
from slipcast.registry.keymap.link import Operation

Granularity = Literal["tensor", "row", "block"]

OPERATIONS: tuple[str, ...] = (
    "swap_halves",
    "transpose",
    "flat",
    "reshape",
    "conv1x1",
    "one_frame",
    "interleave",
    "deinterleave",
    "plus_one",
    "minus_one",
)
"""The words of a key map's operations."""

NUMBERED = frozenset({"interleave", "deinterleave"})
"""Those that take a number of rows."""

COMPUTED = frozenset({"interleave", "deinterleave", "plus_one", "minus_one"})
"""Those whose values are no extract of the file's: rows in another order, or other numbers."""

_INVERSES: Mapping[str, str] = MappingProxyType(
    {
        "swap_halves": "swap_halves",
        "transpose": "transpose",
        "interleave": "deinterleave",
        "deinterleave": "interleave",
        "plus_one": "minus_one",
        "minus_one": "plus_one",
    }
)

Change = Operation | None
"""An operation, "split" or "join"; None for a change of name alone."""


class SideLaw(Enum):
    """What becomes of a side tensor when its weight is renamed, split, joined or viewed.

    Attributes:
        FOLLOWS: it stays as it is.
        COPIED: each part gets the same one.
        SPLIT_ROWS: it is split where the weight's rows are. A block scale is folded if its
            blocks span rows of two parts.
        JOIN_ROWS: the parts' scales are joined as the rows are. Equal scales of whole tensors stay one; others become
            one for each row. Block scales whose blocks would span rows of two parts are folded.
        SWAP_ROWS: its rows change places with the weight's.
        FOLDED: the weight is dequantised with it, in float32, and cast once; no scale is left.
    """

    FOLLOWS = "follows"
    COPIED = "copied"
    SPLIT_ROWS = "split rows"
    JOIN_ROWS = "join rows"
    SWAP_ROWS = "swap rows"
    FOLDED = "folded"


_LAWS: dict[str | None, tuple[SideLaw, SideLaw, SideLaw]] = {
    # change: for a scale of the whole tensor, one for each row, one for each block
    None: (SideLaw.FOLLOWS, SideLaw.FOLLOWS, SideLaw.FOLLOWS),
    "split": (SideLaw.COPIED, SideLaw.SPLIT_ROWS, SideLaw.SPLIT_ROWS),
    "join": (SideLaw.JOIN_ROWS, SideLaw.JOIN_ROWS, SideLaw.JOIN_ROWS),
    "swap_halves": (SideLaw.FOLLOWS, SideLaw.SWAP_ROWS, SideLaw.SWAP_ROWS),
    "interleave": (SideLaw.FOLLOWS, SideLaw.SWAP_ROWS, SideLaw.SWAP_ROWS),
    "deinterleave": (SideLaw.FOLLOWS, SideLaw.SWAP_ROWS, SideLaw.SWAP_ROWS),
    "plus_one": (SideLaw.FOLDED, SideLaw.FOLDED, SideLaw.FOLDED),
    "minus_one": (SideLaw.FOLDED, SideLaw.FOLDED, SideLaw.FOLDED),
    "conv1x1": (SideLaw.FOLLOWS, SideLaw.FOLLOWS, SideLaw.FOLDED),  # the rows stay the rows
    "one_frame": (SideLaw.FOLLOWS, SideLaw.FOLLOWS, SideLaw.FOLDED),
    "transpose": (SideLaw.FOLDED, SideLaw.FOLDED, SideLaw.FOLDED),
    "flat": (SideLaw.FOLDED, SideLaw.FOLDED, SideLaw.FOLDED),
    "reshape": (SideLaw.FOLDED, SideLaw.FOLDED, SideLaw.FOLDED),
}


def side_law(change: Change, granularity: Granularity) -> SideLaw:
    """What a change of the weight does to a side tensor.

    Args:
        change: an operation, ``"split"`` (file fused, model apart), ``"join"`` (file apart, model fused), or None for
            a change of name alone.
        granularity: how many weights share one scale: the whole tensor, a row, or a block of a row.
    """
    return _LAWS[word_of(change)][("tensor", "row", "block").index(granularity)]


def word_of(operation: Operation | None) -> str | None:
    """The word of an operation, without its number."""
    return None if operation is None else operation.partition("/")[0]


def number_of(operation: Operation) -> int:
    """The number of rows that an operation takes."""
    return int(operation.partition("/")[2])


def inverse(operation: Operation | None) -> Operation | None:
    """The operation that takes an operation back.

    Raises:
        KeyError: a view, whose shape only the model knows.
    """
    if operation is None:
        return None
    word, slash, number = operation.partition("/")
    return _INVERSES[word] + slash + number


def has_inverse(operation: Operation | None) -> bool:
    """Whether another operation takes it back, whatever the shapes are."""
    return operation is None or word_of(operation) in _INVERSES


def native_shape(operation: Operation | None, shape: Shape) -> Shape | None:
    """The shape in the file of a tensor that has this shape in the model.

    Vectors are left alone by ``transpose``, ``conv1x1`` and ``one_frame``, so that an operation can be said of a whole
    module.

    Returns:
        The shape as saving writes it, or None where the operation can't be done: halves of an odd number of rows, rows
        that do not come out even, ``transpose`` or ``conv1x1`` of more than two dimensions, ``one_frame`` of others
        than one or four.
    """
    if operation == "swap_halves":
        return shape if shape and shape[0] % 2 == 0 else None
    if word_of(operation) in NUMBERED:
        rows = number_of(operation or "")
        return shape if shape and rows % 2 == 0 and shape[0] % rows == 0 else None
    if operation in ("transpose", "conv1x1") and len(shape) > 2:
        return None
    if operation == "transpose":
        return shape[::-1]
    if operation == "conv1x1":
        return (*shape, 1, 1) if len(shape) == 2 else shape
    if operation == "one_frame":
        return (*shape[:2], 1, *shape[2:]) if len(shape) == 4 else shape if len(shape) == 1 else None
    if operation == "flat":
        return (prod(shape),)
    return shape


def accepts(operation: Operation | None, file_shape: Shape, model_shape: Shape) -> bool:
    """Whether a tensor of the file can be what the operation says of the model's tensor.

    ``reshape`` takes any shape with as many elements, ``flat`` also the shape that the tensor has in the model; the
    others take exactly what saving writes.
    """
    if operation == "reshape":
        return prod(file_shape) == prod(model_shape)
    written = native_shape(operation, model_shape)
    return file_shape == written or (operation == "flat" and file_shape == model_shape)


def joined_shape(shapes: Sequence[Shape]) -> Shape | None:
    """The shape of tensors put one after another by rows, or None where they don't fit: scalars, or unequal rows."""
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        return None
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def shared_shapes(shape: Shape, parts: int) -> tuple[Shape, ...] | None:
    """The shapes of equal row blocks of a tensor, or None where its rows don't come out even."""
    if not shape or shape[0] % parts:
        return None
    return ((shape[0] // parts, *shape[1:]),) * parts
