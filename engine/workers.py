"""Works on several chunks at a time, each on one core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock
from typing import TypeVar

import torch

Result = TypeVar("Result")
Job = Callable[[], Result]

_AHEAD = 2
"""Jobs for each thread that wait to be done."""
_starting = Lock()


@contextmanager
def workers(count: int) -> Iterator[Callable[[Iterable[Job[Result]]], Iterator[Result]]]:
    """Threads that do jobs side by side; gives a function from jobs to their results, in the same order.

    torch would share each operation on a chunk among all cores and wait for the last of them, several times a chunk:
    where another program keeps one of them busy, all wait for it. So each worker's operations stay on its own core.

    Args:
        count: how many threads; with one, jobs are done in the caller's.
    """
    if count < 2:
        yield lambda jobs: (job() for job in jobs)
        return
    pool = _one_core_each(count)
    try:
        yield lambda jobs: _in_order(pool, jobs, count * _AHEAD)
    finally:
        pool.shutdown(cancel_futures=True)


def _one_core_each(count: int) -> ThreadPoolExecutor:
    """A pool whose threads have all begun, with one thread of torch each.

    ``torch.set_num_threads`` sets the calling thread's number and the one that later threads begin with. The second is
    put back before anybody else's thread can begin with it, as far as slipcast's own loads go.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix="slipcast-load")
    barrier = Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first look at its number would take over the process's
        torch.set_num_threads(1)
        barrier.wait()

    with _starting:
        threads = torch.get_num_threads()
        for begun in [pool.submit(begin) for _ in range(count)]:
            begun.result()
        torch.set_num_threads(threads)
    return pool


def _in_order(pool: ThreadPoolExecutor, jobs: Iterable[Job[Result]], ahead: int) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque()
    for job in jobs:
        waiting.append(pool.submit(job))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
