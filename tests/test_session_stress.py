"""Two hundred operations by eight threads, faults among them: nothing hangs, nothing is left, one pipeline at most."""

from __future__ import annotations

import faulthandler
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slipcast import Session
from slipcast.engine.session.session_status import SessionStatus
from slipcast.registry.errors import Cancelled, DeviceError, HeaderError, SessionError
from support.fake_opener import FakeOpener

THREADS = 8
OPERATIONS = 200
DEADLINE = 120
"""Seconds after which the watchdog takes it for a deadlock; the work itself takes a few."""


class CallersError(Exception):
    """What a callback of the caller raises."""


EXPECTED = (Cancelled, DeviceError, HeaderError, SessionError, CallersError)


def failing(*_: object) -> None:
    raise CallersError


def operations(session: Session, folder: Path) -> dict[str, Callable[[random.Random], object]]:
    """What a thread may do, by name."""

    def cancelling(*_: object) -> None:
        session.cancel()

    def load(dice: random.Random) -> SessionStatus:
        settings = dice.choice([{}, {"threads": 1}, {"vae.tiling": "on"}, {"fp8": "storage"}])
        return session.load(folder / dice.choice("aaab"), **settings)

    return {
        "load": load,
        "load what is missing": lambda _: session.load(folder / "missing"),
        "load what is bad": lambda dice: session.load(folder / f"bad {dice.random()}"),
        "load what is huge": lambda dice: session.load(folder / f"huge {dice.random()}"),
        "load and fail": lambda dice: session.load(folder / f"a {dice.random()}", progress=failing),
        "load and cancel": lambda dice: session.load(folder / f"a {dice.random()}", progress=cancelling),
        "generate": lambda dice: session.generate("a seven", steps=dice.randint(1, 6)),
        "generate what is huge": lambda _: session.generate("a huge thing"),
        "generate what is impossible": lambda _: session.generate("an impossible thing"),
        "generate and fail": lambda _: session.generate("a seven", progress=failing),
        "generate and cancel": lambda _: session.generate("a seven", progress=cancelling),
        "unload": lambda _: session.unload(),
        "cancel": lambda _: session.cancel(),
        "status": lambda _: session.status(),
    }


WEIGHTS = {"load": 8, "generate": 12, "status": 2}
"""How often an operation comes; the others once."""


@pytest.fixture
def _watchdog() -> Iterator[None]:
    """Ends the whole run with the stacks of all threads if it hangs: a thread that waits for a lock can't be ended."""
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.usefixtures("_watchdog")
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_of_many_threads(tmp_path: Path, seed: int) -> None:
    opener = FakeOpener(pause=0.002)
    session = Session(opener=opener)
    tensors = tensors_alive()
    outcomes: Counter[str] = Counter()
    done, watched = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            status = session.status()
            watched.append(status.state)
            assert (status.state == "empty") == (status.path is None)
            assert opener.alive <= 1
            time.sleep(0.0005)

    def work(number: int) -> list[BaseException]:
        dice = random.Random(1000 * seed + number)
        things = operations(session, tmp_path)
        names = list(things)
        kept: list[BaseException] = []
        for _ in range(OPERATIONS // THREADS):
            time.sleep(dice.random() / 5)
            name = dice.choices(names, [WEIGHTS.get(each, 1) for each in names])[0]
            try:
                things[name](dice)
                outcomes[f"{name}: done"] += 1
            except EXPECTED as error:
                outcomes[f"{name}: {type(error).__name__}"] += 1
                kept.append(error)  # its traceback must keep nothing alive
        return kept

    with ThreadPoolExecutor(THREADS + 1) as pool:
        watcher = pool.submit(watch)
        workers = [pool.submit(work, number) for number in range(THREADS)]
        kept = [error for worker in workers for error in worker.result()]
        done.set()
        watcher.result()
    assert sum(outcomes.values()) == OPERATIONS
    assert opener.most_alive == 1
    assert opener.alive <= 1
    assert session._jobs._asked == []
    assert not session._jobs._line
    assert kept
    session.load(tmp_path / "a")
    assert session.generate("a seven").images
    assert opener.alive == 1
    session.unload()
    assert session.status() == SessionStatus()
    assert opener.alive == 0
    assert opener.activations_alive == 0
    assert tensors_alive() == tensors
    assert {"loading", "ready", "generating", "empty"} >= set(watched)


def test_the_faults_are_among_the_outcomes(tmp_path: Path) -> None:
    session = Session(opener=FakeOpener())
    things = operations(session, tmp_path)
    seen: dict[str, Any] = {}
    for name, thing in things.items():
        session.load(tmp_path / "a")
        try:
            thing(random.Random(0))
            seen[name] = None
        except EXPECTED as error:
            seen[name] = type(error)
    assert seen == {
        "load": None,
        "load what is missing": HeaderError,
        "load what is bad": HeaderError,
        "load what is huge": DeviceError,
        "load and fail": CallersError,
        "load and cancel": Cancelled,
        "generate": None,
        "generate what is huge": DeviceError,
        "generate what is impossible": HeaderError,
        "generate and fail": CallersError,
        "generate and cancel": Cancelled,
        "unload": None,
        "cancel": None,
        "status": None,
    }
