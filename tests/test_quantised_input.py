"""What layers are given is quantised once, and never again taken for what it no longer is: as on a GPU, on the CPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from slipcast.engine import quantised_input as module
from slipcast.engine.quantised_input import quantised_input

COLUMNS = 16


class OnGpu(Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Gpu:
    """A GPU's streams, and what was quantised on it."""

    def __init__(self) -> None:
        self.stream, self.capturing = 0, False
        self.quantised: list[Tensor] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made, quantise = Gpu(), module.quantise_rows
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(
        module, "quantise_rows", lambda rows, *given: made.quantised.append(rows) or quantise(rows, *given)
    )
    yield made
    module._last.slot.clear()


def given() -> Tensor:
    return torch.randn(4, COLUMNS).as_subclass(OnGpu)


def is_right(input: Tensor) -> bool:
    """Whether codes and scales are those of the tensor as it is now."""
    codes, scale = quantised_input(input, COLUMNS, None)
    rows = input.reshape(-1, COLUMNS).as_subclass(Tensor)
    return torch.allclose(codes.as_subclass(Tensor).float() * scale.as_subclass(Tensor), rows, rtol=0.07, atol=0.01)


def test_the_same_tensor_is_quantised_once(gpu: Gpu) -> None:
    input = given()
    assert all(is_right(input) for _ in range(3))
    assert len(gpu.quantised) == 1
    assert is_right(input[:])  # a view is another tensor
    assert len(gpu.quantised) == 2


def exchange(input: Tensor) -> None:
    input.data = torch.randn(4, COLUMNS)


def transpose(input: Tensor) -> None:
    input.data = input.data.view(COLUMNS, 4).t()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "written to": lambda input: input.mul_(-3),
    "written to through a view": lambda input: input[1:].zero_(),
    "resized": lambda input: input.resize_(2, COLUMNS),
    "given other data": exchange,
    "read in another order": transpose,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changes_is_quantised_anew(gpu: Gpu, change: str) -> None:
    input = given()
    assert is_right(input)
    CHANGES[change](input)
    assert is_right(input)
    assert len(gpu.quantised) == 2


def test_another_stream_computes_its_own(gpu: Gpu) -> None:
    input = given()
    assert is_right(input)
    gpu.stream = 1
    assert is_right(input)
    assert len(gpu.quantised) == 2


def test_a_recorded_graph_computes_codes_itself_and_leaves_none(gpu: Gpu) -> None:
    """What was computed before is no part of a graph; what is recorded is computed in a replay only."""
    input = given()
    for gpu.capturing, count in ((False, 1), (True, 2), (True, 3), (False, 3)):
        assert is_right(input)
        assert len(gpu.quantised) == count
    other = given()
    for gpu.capturing, count in ((True, 4), (False, 5)):
        assert is_right(other)
        assert len(gpu.quantised) == count


def test_codes_die_with_their_tensor_wherever_it_dies(gpu: Gpu) -> None:
    inputs = [given()]
    assert is_right(inputs[0])
    gpu.quantised.clear()
    thread = threading.Thread(target=inputs.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert not module._last.slot
