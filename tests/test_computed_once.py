"""What a graph asks for several times is computed once, with the same results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipcast.engine.computed_once import ComputedOnce


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted(ComputedOnce):
    """Counts the operators before and after."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.before = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        super().__call__(graph)
        graph.lint()
        self.after = [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> None:  # not cached
        return None


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / 448
    return (rows / scale).round(), scale


def projected(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    (codes, scale), (same, equal) = quantised(rows), quantised(rows)
    return (codes @ first) * scale, (same @ second) * equal


def twice_returned(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.exp(), rows.exp()


def views_returned(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.exp().view(2, 2), rows.exp().view(4, 1), rows.exp()[1:].view(3, 1)[1:], rows.exp().split(2)[1]


def random_twice(rows: Tensor) -> Tensor:
    return torch.rand_like(rows) - torch.rand_like(rows)


def written_between(rows: Tensor) -> Tensor:
    before = rows.sin()
    rows = rows.clone()
    rows.add_(1)
    return before * rows.sin()


def test_what_is_quantised_twice_is_computed_once() -> None:
    counted = Counted()
    given = (torch.randn(8, 16), torch.randn(16, 4), torch.randn(16, 4))
    compiled = torch.compile(projected, options={"post_grad_custom_pre_pass": counted})
    for result, expected in zip(compiled(*given), projected(*given), strict=True):
        assert torch.allclose(result, expected, rtol=1e-5, atol=1e-4)
    for name in ("aten.amax.default", "aten.abs.default", "aten.round.default"):
        assert (counted.before.count(name), counted.after.count(name)) == (2, 1)
    assert counted.after.count("aten.mm.default") == counted.before.count("aten.mm.default") == 2


def test_results_that_a_caller_may_write_to_stay_apart() -> None:
    first, second = torch.compile(twice_returned, options={"post_grad_custom_pre_pass": Counted()})(torch.randn(4))
    second.zero_()
    assert bool((first != 0).all())


def test_results_that_are_views_stay_apart() -> None:
    compiled = torch.compile(views_returned, options={"post_grad_custom_pre_pass": Counted()})
    given = torch.randn(4)
    for written in range(4):
        results, expected = compiled(given), views_returned(given)
        results[written].zero_()
        expected[written].zero_()
        for result, plain in zip(results, expected, strict=True):
            assert torch.allclose(result, plain)


def test_what_is_drawn_twice_differs() -> None:
    drawn = torch.compile(random_twice, options={"post_grad_custom_pre_pass": Counted()})(torch.randn(64))
    assert bool((drawn != 0).any())


def test_what_was_written_to_in_between_is_computed_anew() -> None:
    given = torch.randn(16)
    compiled = torch.compile(written_between, options={"post_grad_custom_pre_pass": Counted()})
    assert torch.allclose(compiled(given), written_between(given), atol=1e-6)


def test_the_pass_is_known_to_the_compilers_cache() -> None:
    assert ComputedOnce().uuid()
