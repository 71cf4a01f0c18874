"""Jobs side by side: in order, on one core each, and without a trace in torch's number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from slipcast.engine.workers import workers


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(count: int) -> None:
    with workers(count) as done:
        assert list(done((lambda number=number: number) for number in range(100))) == list(range(100))


def test_as_many_jobs_run_at_a_time_as_asked_for() -> None:
    together = threading.Barrier(3, timeout=10)
    with workers(3) as done:
        assert len(list(done([together.wait] * 9))) == 9


@pytest.mark.usefixtures("four_threads")
def test_each_worker_has_one_thread_of_torch_and_everybody_else_keeps_theirs() -> None:
    def threads() -> int:
        torch.randn(1 << 16).add_(1)  # a first parallel operation takes over the process's number
        return torch.get_num_threads()

    with workers(2) as done:
        assert set(done([threads] * 6)) == {1}
    assert torch.get_num_threads() == 4
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(threads()))
    later.start()
    later.join()
    assert found == [4]


def test_jobs_are_not_made_far_ahead() -> None:
    made: list[int] = []

    def jobs() -> Iterator[object]:
        for number in range(50):
            made.append(number)
            yield lambda: None

    with workers(2) as done:
        results = done(jobs())
        next(results)
        assert len(made) <= 6


def test_an_error_ends_the_work() -> None:
    def fail() -> None:
        raise ValueError("no")

    started = []
    with pytest.raises(ValueError, match="no"), workers(2) as done:
        for _ in done([fail, *[lambda: started.append(1)] * 100]):
            pass
    assert len(started) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slipcast-load")]
