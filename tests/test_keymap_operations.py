"""What operations do to shapes and to side tensors."""

from __future__ import annotations

import pytest
import torch

from slipcast.registry.keymap.operations import OPERATIONS, Change, SideLaw, accepts, native_shape, side_law, word_of
from support.links import NATIVE

FOLLOWS, COPIED, SPLIT, JOIN, SWAP, FOLDED = SideLaw


@pytest.mark.parametrize("shape", [(4,), (4, 6), (8, 3), (4, 3), (4, 6, 3, 3)])
@pytest.mark.parametrize("operation", NATIVE)
def test_shape_is_that_of_the_values(operation: str | None, shape: tuple[int, ...]) -> None:
    if native_shape(operation, shape) is None:
        odd = "/8" in str(operation) and shape[0] % 8
        assert odd or (operation, len(shape)) in {("one_frame", 2), ("transpose", 4), ("conv1x1", 4)}
        return
    assert native_shape(operation, shape) == tuple(NATIVE[operation](torch.empty(shape)).shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "file", "model", "accepted"),
    [
        ("reshape", (6,), (1, 6), True),
        ("reshape", (3, 2), (1, 6), True),
        ("reshape", (7,), (1, 6), False),
        ("flat", (6,), (2, 3), True),
        ("flat", (2, 3), (2, 3), True),
        ("flat", (3, 2), (2, 3), False),
        ("transpose", (3, 2), (2, 3), True),
        ("transpose", (2, 3), (2, 3), False),
        ("conv1x1", (2, 3, 1, 1), (2, 3), True),
        ("conv1x1", (2, 3), (2, 3), False),
        ("swap_halves", (3, 2), (3, 2), False),
        (None, (2, 3), (2, 3), True),
        (None, (3, 2), (2, 3), False),
    ],
)
def test_shapes_that_a_file_may_have(
    operation: str | None, file: tuple[int, ...], model: tuple[int, ...], accepted: bool
) -> None:
    assert accepts(operation, file, model) is accepted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "laws"),
    [
        (None, (FOLLOWS, FOLLOWS, FOLLOWS)),
        ("split", (COPIED, SPLIT, SPLIT)),
        ("join", (JOIN, JOIN, JOIN)),
        ("swap_halves", (FOLLOWS, SWAP, SWAP)),
        ("conv1x1", (FOLLOWS, FOLLOWS, FOLDED)),
        ("transpose", (FOLDED, FOLDED, FOLDED)),
        ("flat", (FOLDED, FOLDED, FOLDED)),
        ("reshape", (FOLDED, FOLDED, FOLDED)),
        ("interleave/64", (FOLLOWS, SWAP, SWAP)),
        ("plus_one", (FOLDED, FOLDED, FOLDED)),
    ],
)
def test_laws_for_scales(change: Change, laws: tuple[SideLaw, SideLaw, SideLaw]) -> None:
    assert (side_law(change, "tensor"), side_law(change, "row"), side_law(change, "block")) == laws


def test_every_operation_has_a_law_and_a_meaning() -> None:
    assert {word_of(operation) for operation in NATIVE} == {None, *OPERATIONS}
    assert all(isinstance(side_law(operation, "row"), SideLaw) for operation in OPERATIONS)


@pytest.mark.parametrize("operation", ["swap_halves", "conv1x1"])
def test_row_scales_agree_with_the_values(operation: Change) -> None:
    """Scaling rows before the operation, with the scales treated by the law, is scaling them after it."""
    values, scales = torch.randn(4, 3), torch.rand(4)
    moved = NATIVE["swap_halves"](scales) if side_law(operation, "row") is SWAP else scales
    after = NATIVE[operation](values)  # type: ignore[index]
    after = after * moved.reshape(-1, *[1] * (after.ndim - 1))
    assert torch.equal(after, NATIVE[operation](values * scales[:, None]))  # type: ignore[index]
