"""Operations that compute: rows of heads in another order, and values that are one more."""

from __future__ import annotations

import pytest
import torch

from slipcast.engine.computed_rows import row_order, undone
from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.operations import has_inverse, inverse
from slipcast.registry.keymap.rules import parse_rules


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("half", [1, 4])
def test_rows_are_those_of_llama_cpp(heads: int, half: int) -> None:
    """Its converter views the rows as heads x 2 x halves, exchanges the two last axes, and flattens them again."""
    model = torch.randn(heads * 2 * half, 5)
    file = model.view(heads, 2, half, 5).transpose(1, 2).reshape(-1, 5)
    assert undone(file, f"interleave/{2 * half}").equal(model)
    assert undone(model, f"deinterleave/{2 * half}").equal(file)
    bias = model[:, 0]
    assert undone(undone(bias, f"deinterleave/{2 * half}"), f"interleave/{2 * half}").equal(bias)


def test_heads_turned_by_neighbours_are_those_turned_by_halves() -> None:
    """What the order of rows is for: both ways to turn pairs give the same products of queries and keys."""
    width, tokens, heads = 8, 5, 2
    angles = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(width // 2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def by_halves(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def by_neighbours(x: torch.Tensor) -> torch.Tensor:
        one, other = x[..., 0::2], x[..., 1::2]
        return torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)

    query, key = torch.randn(heads * width, 16), torch.randn(heads * width, 16)
    inputs = torch.randn(tokens, 16)

    def products(query: torch.Tensor, key: torch.Tensor, turn: object) -> torch.Tensor:
        q, k = ((inputs @ weight.t()).view(tokens, heads, width) for weight in (query, key))
        return torch.einsum("ahd,bhd->hab", turn(q), turn(k))  # type: ignore[operator]

    file = [undone(weight, f"deinterleave/{width}") for weight in (query, key)]
    torch.testing.assert_close(products(*file, by_neighbours), products(query, key, by_halves))
    assert not torch.allclose(products(query, key, by_neighbours), products(query, key, by_halves))


def test_one_more_or_less() -> None:
    norm = torch.tensor([0.25, -1.0], dtype=torch.bfloat16)
    assert undone(norm + 1, "plus_one").equal(norm.float())
    assert undone(norm - 1, "minus_one").equal(norm.float())
    assert undone(torch.tensor([2**60 + 1]), "plus_one").tolist() == [2**60]  # whole numbers stay exact


def test_other_operations_keep_their_order() -> None:
    assert row_order("transpose", 8) is None
    assert row_order(None, 8) is None
    values = torch.randn(4, 2)
    assert undone(values, "reshape") is values


@pytest.mark.parametrize("operation", [None, "swap_halves", "transpose", "interleave/64", "plus_one"])
def test_an_inverse_takes_back(operation: str | None) -> None:
    assert has_inverse(operation)
    assert inverse(inverse(operation)) == operation
    assert not has_inverse("reshape")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("interleave(a)", "interleave(place, rows)"),
        ("transpose(a, 4)", "transpose(place)"),
        ("interleave(a, 04)", "segments of letters"),
        ("interleaved(a, 4)", "one of swap_halves"),
    ],
)
def test_a_number_that_is_missing_or_too_much(value: str, expected: str) -> None:
    with pytest.raises(KeyMapError) as caught:
        parse_rules({"x": value})
    assert expected in caught.value.expected


def test_rules_show_their_number() -> None:
    (rule,) = parse_rules({"x": "interleave(a.b, 64)"})
    assert str(rule) == "x: interleave(a.b, 64)"
    assert rule.terms[0].operation == "interleave/64"
