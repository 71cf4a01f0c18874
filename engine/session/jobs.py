"""The jobs of a session: one works at a time, in the order in which they came, and each can be cancelled."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Literal

from slipcast.registry.errors import Cancelled, SessionError

Kind = Literal["load", "generate", "unload"]


class Job:
    """One call of a session, from when it is asked until it returns.

    Attributes:
        kind: what it does.
        number: its place among all calls, by when they were made.
        key: of a load, what tells it from others that would leave another pipeline; None until it is known.
    """

    def __init__(self, kind: Kind, number: int) -> None:
        self.kind: Kind = kind
        self.number = number
        self.key: Hashable = None
        self._lock = threading.Lock()
        self._reason = ""
        self._finished = False

    def cancel(self, reason: str) -> bool:
        """Ask it to end; an unload can't be, as it takes no time.

        Args:
            reason: who wants it, as a clause.

        Returns:
            Whether it will end with ``Cancelled``; not if it has come to its end, or has been cancelled before.
        """
        with self._lock:
            if self._finished or self._reason or self.kind == "unload":
                return False
            self._reason = reason
            return True

    def cancelled(self) -> bool:
        """Whether it was asked to end."""
        return bool(self._reason)

    def check(self) -> None:
        """Go on, if nobody asked it to end.

        Raises:
            Cancelled: somebody did.
        """
        if self._reason:
            raise Cancelled(
                f"the {_NAMES[self.kind]} was cancelled: {self._reason}",
                expected="to be left to its end",
                hint="call again, if it is still wanted",
            )

    def finish(self) -> None:
        """Come to the end, after which nobody can cancel it.

        Raises:
            Cancelled: somebody did before.
        """
        with self._lock:
            self.check()
            self._finished = True


_NAMES: dict[Kind, str] = {"load": "load", "generate": "generation", "unload": "unloading"}


class Jobs:
    """All jobs of a session that have not returned."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._asked: list[Job] = []
        self._line: deque[Job] = deque()
        self._newest_load = 0
        self._calling_back = threading.local()

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """A block that calls what the caller gave; calls out of it that would have to wait for this job are refused."""
        self._calling_back.now = True
        try:
            yield
        finally:
            self._calling_back.now = False

    @contextmanager
    def asked(self, kind: Kind) -> Iterator[Job]:
        """Make a job; it is gone at the end of the block, whatever happens in it.

        Raises:
            SessionError: a callback of the job that works now has called: it would wait for itself.
        """
        if getattr(self._calling_back, "now", False):
            raise SessionError(
                f"a call of {kind} in a callback of the session itself",
                expected="a call when that job has returned, or from another thread",
                hint="call only status and cancel in a callback",
            )
        with self._changed:
            job = Job(kind, next(self._numbers))
            self._asked.append(job)
        try:
            yield job
        finally:
            with self._changed:
                self._asked.remove(job)
                if job in self._line:
                    self._line.remove(job)
                self._changed.notify_all()

    def put_in_line(self, job: Job, present_key: Callable[[], Hashable] = lambda: None) -> None:
        """Give a job its place. A load or an unload cancels the loads and generations before it.

        A load that would leave the same pipeline that is there by then, or comes, cancels nothing.

        Args:
            job: the job; of a load with its key.
            present_key: the key of the pipeline that is loaded now.

        Raises:
            Cancelled: a later load was put in line before this one.
        """
        with self._changed:
            if job.kind == "unload" or (job.kind == "load" and job.key != self._coming_key(present_key)):
                if job.kind == "load" and job.number < self._newest_load:
                    job.cancel("a later load took its place")
                job.check()
                for other in self._line:
                    other.cancel(f"a later {job.kind} took its place")
            job.check()
            if job.kind == "load":
                self._newest_load = max(self._newest_load, job.number)
            self._line.append(job)
            self._changed.notify_all()

    def wait(self, job: Job) -> None:
        """Wait until all jobs before it have returned.

        Raises:
            Cancelled: it was cancelled before its turn.
        """
        with self._changed:
            while self._line[0] is not job:
                job.check()
                self._changed.wait()
            job.check()

    def cancel_all(self, reason: str) -> int:
        """Ask all jobs to end that were asked for until now.

        Returns:
            How many will end with ``Cancelled`` for it.
        """
        with self._changed:
            cancelled = [job.cancel(reason) for job in self._asked]
            self._changed.notify_all()
        return sum(cancelled)

    def _coming_key(self, present_key: Callable[[], Hashable]) -> Hashable:
        """The key of the pipeline that is there once all in line have returned, if nothing goes wrong."""
        for job in reversed(self._line):
            if job.kind != "generate" and not job.cancelled():
                return job.key
        return present_key()
