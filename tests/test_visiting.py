"""Models that come to the device for each forward leave it again, however the forward ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine.policy.visiting import Turns, visit_

CPU = torch.device("cpu")


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.failure: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.failure is not None:
            raise self.failure
        result: Tensor = self.layers(x)
        return result


def homes(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes to the device is another tensor, as on a GPU."""
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: tensor.clone())


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("failure", [ArithmeticError, KeyboardInterrupt])  # of the second torch tells no hook
def test_a_model_leaves_after_a_forward_whatever_became_of_the_last(failure: type[BaseException]) -> None:
    model, x = Failing(), torch.randn(2, 4)
    before = homes(model)
    visit_(model, CPU)
    model.failure = failure
    with pytest.raises(failure):
        model(x)
    model.failure = None
    model(x)
    assert homes(model) == before


@pytest.mark.usefixtures("copied")
def test_a_model_leaves_also_after_a_hook_before_it_came_has_failed() -> None:
    model, x = Failing(), torch.randn(2, 4)
    before = homes(model)
    visit_(model, CPU)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ArithmeticError):
        model(x)
    handle.remove()
    model(x)
    assert homes(model) == before


@pytest.mark.usefixtures("copied")
def test_a_model_stays_for_a_visit_with_forwards_in_it_and_for_a_forward_with_visits_in_it() -> None:
    model, x = Failing(), torch.randn(2, 4)
    before = homes(model)
    visitor = visit_(model, CPU)
    with visitor.visit(model):
        there = homes(model)
        model(x)
        assert homes(model) == there != before
    assert homes(model) == before
    seen = []

    def visit(*_: Any) -> None:
        with visitor.visit(model):
            pass
        seen.append(homes(model) != before)

    model.layers.register_forward_hook(visit)
    model(x)
    assert seen == [True]
    assert homes(model) == before


@pytest.mark.parametrize("turns", [None, Turns()])
def test_a_model_for_which_memory_ran_out_comes_as_a_whole_the_next_time(
    turns: Turns | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Failing(), torch.randn(2, 4)
    before, count = homes(model), 0

    def short(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise torch.OutOfMemoryError
        return tensor.clone()

    monkeypatch.setattr(Tensor, "to", short)
    visit_(model, CPU, turns)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert homes(model) == before
    seen = []
    model.layers.register_forward_hook(lambda *_: seen.append(homes(model)))
    model(x)
    assert not set(seen[0]) & set(before)
