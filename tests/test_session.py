"""A session holds one pipeline at a time, whatever several threads ask of it and whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slipcast import Session
from slipcast.engine.pipeline.generate import GenerationProgress
from slipcast.engine.policy.sizes import AskedSize
from slipcast.engine.session.bearing import WITHOUT_BEARING, bearing_settings
from slipcast.registry.errors import Cancelled, CompanionError, DeviceError, HeaderError, SessionError, SettingsError
from slipcast.registry.settings import resolve_settings, setting_names
from support.fake_opener import PARTS, STEPS, TOO_LARGE, FakeOpener

SOON = 20
"""Seconds after which something that should have happened has not, on a busy machine."""


@pytest.fixture
def opener() -> FakeOpener:
    return FakeOpener()


@pytest.fixture
def session(opener: FakeOpener) -> Session:
    return Session(opener=opener)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Gate:
    """A progress callback that stops at its first call until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened, self.steps = threading.Event(), threading.Event(), 0

    def __call__(self, *_: object) -> None:
        self.steps += 1
        self.reached.set()
        assert self.opened.wait(SOON)


def begun(pool: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any, **more: Any) -> tuple[Future[Any], Gate]:
    """A load or generation that works, and stands still."""
    gate = Gate()
    future = pool.submit(call, *arguments, progress=gate, **more)
    assert gate.reached.wait(SOON)
    return future, gate


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)


# loading


def test_a_pipeline_is_loaded_drawn_with_and_given_up(session: Session, opener: FakeOpener, tmp_path: Path) -> None:
    assert session.status().state == "empty"
    seen: list[tuple[int, int]] = []
    status = session.load(tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert (status.state, status.path, status.family) == ("ready", str(tmp_path / "a"), "fake")
    assert status == session.status()
    assert status.to_json()["settings"]["memory"]["engaged"] == "resident"
    assert seen == [(part + 1, PARTS) for part in range(PARTS)]
    steps: list[GenerationProgress] = []
    drawn = session.generate("a seven", progress=steps.append, steps=3)
    assert drawn.images == (str(tmp_path / "a"),)
    assert [(at.step, at.total) for at in steps] == [(1, 3), (2, 3), (3, 3)]
    assert all(at.latents is not None and at.latents.shape == (1, 64) for at in steps)
    session.unload()
    assert session.status().state == "empty"
    assert opener.closed == [tmp_path / "a"]
    assert opener.alive == 0


def test_a_block_gives_the_pipeline_up_at_its_end(opener: FakeOpener, tmp_path: Path) -> None:
    with Session(opener=opener) as session:
        session.load(tmp_path / "a")
        assert opener.alive == 1
    assert opener.alive == 0


def test_the_old_pipeline_is_gone_before_the_new_one_comes(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    session.load(tmp_path / "b")  # the opener refuses to open beside another
    assert opener.opened == [tmp_path / "a", tmp_path / "b"]
    assert opener.most_alive == 1


def test_what_validation_refuses_leaves_the_pipeline_alone(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    before = session.load(tmp_path / "a")
    with pytest.raises(HeaderError):
        session.load(tmp_path / "missing")
    with pytest.raises(SettingsError):
        session.load(tmp_path / "b", memory="plenty")
    assert session.status() == before
    assert session.generate("a seven").images == (str(tmp_path / "a"),)
    assert opener.closed == []


def test_validation_happens_beside_a_generation_and_does_not_disturb_it(
    session: Session, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    future, gate = begun(pool, session.generate, "a seven")
    with pytest.raises(HeaderError):
        session.load(tmp_path / "missing")
    gate.opened.set()
    assert future.result(SOON).images == (str(tmp_path / "a"),)


@pytest.mark.parametrize(("name", "error"), [("bad", HeaderError), ("huge", DeviceError)])
def test_a_failed_load_leaves_the_session_empty_and_usable(
    session: Session, opener: FakeOpener, tmp_path: Path, name: str, error: type[Exception]
) -> None:
    session.load(tmp_path / "a")
    with pytest.raises(error) as caught:  # the error is kept, with its traceback and causes
        session.load(tmp_path / name)
    status = session.status()
    assert (status.state, status.path) == ("empty", None)
    assert str(caught.value).splitlines()[0] in status.failure or status.failure
    assert opener.alive == 0
    assert session.load(tmp_path / "a").failure == ""


def test_an_error_of_a_loads_callback_comes_out_and_leaves_nothing(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own") as caught:
        session.load(tmp_path / "a", progress=fail)
    assert caught.value.__traceback__ is not None
    assert opener.alive == 0
    assert session.status().state == "empty"


@pytest.mark.parametrize("grouped", [False, True])
def test_the_causes_of_an_error_keep_nothing_alive(
    session: Session, opener: FakeOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    opens = opener.open

    def through_a_library(*arguments: Any) -> Any:
        try:
            return opens(*arguments)
        except HeaderError as error:
            if grouped:
                raise ExceptionGroup("of several", [error]) from None
            raise CompanionError("a folder", expected="another", hint="download it again") from error

    monkeypatch.setattr(opener, "open", through_a_library)
    with pytest.raises((CompanionError, ExceptionGroup)) as caught:
        session.load(tmp_path / "bad")
    assert caught.value.__cause__ is not None or grouped
    assert opener.alive == 0


# reloading


def test_every_setting_either_bears_on_loading_or_does_not() -> None:
    names = set(setting_names())
    assert names >= WITHOUT_BEARING
    bearing = {name for name, _ in bearing_settings(resolve_settings({}).values)}
    assert bearing == names - WITHOUT_BEARING


@pytest.mark.parametrize(
    ("settings", "reloads"),
    [
        ({}, False),
        ({"threads": 1}, False),
        ({"vae": {"tiling": "on"}}, False),
        ({"vae.tile_size": 64}, False),
        ({"fp8": "storage"}, True),
        ({"fp8.remainder": "quantise"}, True),
        ({"dtype": "float32"}, True),
        ({"text_encoder": "fp8"}, True),
        ({"memory": "low"}, True),
        ({"companions": {"vae": "other"}}, True),
    ],
)
def test_a_setting_reloads_if_it_bears_on_loading(
    session: Session, opener: FakeOpener, tmp_path: Path, settings: dict[str, Any], reloads: bool
) -> None:
    session.load(tmp_path / "a")
    assert session.load(tmp_path / "a", **settings).state == "ready"
    assert len(opener.opened) == (2 if reloads else 1)
    assert len(opener.adjusted) == (0 if reloads else 1)


def test_a_pipeline_that_does_not_serve_is_loaded_anew(session: Session, opener: FakeOpener, tmp_path: Path) -> None:
    session.load(tmp_path / "a")
    assert session.load(tmp_path / "a", vae={"tile_size": TOO_LARGE}).state == "ready"
    assert opener.opened == [tmp_path / "a"] * 2


def test_the_size_to_draw_is_validated(session: Session, opener: FakeOpener, tmp_path: Path) -> None:
    session.load(tmp_path / "a", size=(2048, 0))
    assert opener.sizes == [AskedSize(2048, 0)]


def test_settings_of_the_session_are_below_those_of_a_load(opener: FakeOpener, tmp_path: Path) -> None:
    session = Session(opener=opener, dtype="float32", vae={"tiling": "on"})
    session.load(tmp_path / "a")
    session.load(tmp_path / "a", dtype="float32", vae={"tiling": "off"})
    (adjusted,) = opener.adjusted
    assert (adjusted.dtype, adjusted.vae.tiling) == ("float32", "off")


def test_a_pipeline_that_can_not_be_adjusted_is_given_up(
    session: Session, opener: FakeOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.load(tmp_path / "a")

    def fail(pipe: object, validated: object) -> None:
        raise RuntimeError("half of it is done")

    monkeypatch.setattr(opener, "adjust", fail)
    with pytest.raises(RuntimeError):
        session.load(tmp_path / "a", vae={"tiling": "on"})
    assert session.status().state == "empty"
    assert opener.alive == 0


# generating


def test_nothing_is_drawn_without_a_pipeline(session: Session) -> None:
    with pytest.raises(SessionError, match="call load first"):
        session.generate("a seven")


def test_what_the_pipeline_can_not_draw_is_refused_before_it_begins(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    with pytest.raises(HeaderError, match="impossible"):
        session.generate("an impossible thing")
    assert session.status().state == "ready"


def test_memory_that_runs_out_in_a_generation_leaves_the_pipeline(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    with pytest.raises(DeviceError, match="memory ran out during the generation") as caught:
        session.generate("a huge thing")
    assert "smaller picture" in caught.value.hint
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert opener.activations_alive == 0
    assert opener.recovered == 1
    assert "memory ran out" in session.status().failure or "out of memory" in session.status().failure
    assert session.generate("a seven").images
    assert session.status().failure == ""


def test_an_error_of_a_generations_callback_comes_out_and_leaves_the_pipeline(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")

    def fail(at: GenerationProgress) -> None:
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        session.generate("a seven", progress=fail)
    assert opener.activations_alive == 0
    assert session.status().state == "ready"
    assert session.generate("a seven").images


def test_a_pipeline_that_can_not_be_brought_back_is_given_up(
    session: Session, opener: FakeOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.load(tmp_path / "a")

    def fail(pipe: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(opener, "recover", fail)
    with pytest.raises(DeviceError):
        session.generate("a huge thing")
    assert session.status().state == "empty"
    assert opener.alive == 0


def test_status_does_not_wait_for_a_generation_or_a_load(
    session: Session, pool: ThreadPoolExecutor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loading, gate = begun(pool, session.load, tmp_path / "a")
    status = session.status()
    assert (status.state, status.path, status.done, status.total) == ("loading", str(tmp_path / "a"), 1, PARTS)
    gate.opened.set()
    loading.result(SOON)
    generating, gate = begun(pool, session.generate, "a seven")
    seconds = []
    for _ in range(100):
        began = time.perf_counter()
        status = session.status()
        seconds.append(time.perf_counter() - began)
    assert (status.state, status.done, status.total) == ("generating", 1, STEPS)
    gate.opened.set()
    generating.result(SOON)
    with capsys.disabled():
        print(f"\nstatus during a generation that stands still: {max(seconds) * 1000:.3f} ms at most")


# cancelling


def test_cancel_stops_a_generation_within_one_step(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    future, gate = begun(pool, session.generate, "a seven", steps=1000)
    assert session.cancel() == 1
    assert session.cancel() == 0
    gate.opened.set()
    with pytest.raises(Cancelled):
        future.result(SOON)
    assert gate.steps == 1
    assert session.status().state == "ready"
    assert session.generate("a seven").images


def test_a_callback_may_cancel_and_ask_but_not_call(session: Session, tmp_path: Path) -> None:
    session.load(tmp_path / "a")
    refused: list[str] = []

    def callback(at: GenerationProgress) -> None:
        assert session.status().state == "generating"
        for call in (lambda: session.generate("more"), lambda: session.load(tmp_path / "b"), session.unload):
            with pytest.raises(SessionError, match="callback") as caught:
                call()
            refused.append(caught.value.found)
        assert session.cancel() == 1

    with pytest.raises(Cancelled):
        session.generate("a seven", progress=callback)
    assert len(refused) == 3
    session.unload()


def test_cancel_stops_a_load_and_leaves_nothing_of_it(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    future, gate = begun(pool, session.load, tmp_path / "a")
    assert session.cancel() == 1
    gate.opened.set()
    with pytest.raises(Cancelled):
        future.result(SOON)
    assert opener.opened == []
    assert opener.alive == 0


def test_what_is_cancelled_at_its_last_step_is_cancelled_all_the_same(
    session: Session, opener: FakeOpener, tmp_path: Path
) -> None:
    def at_the_end(done: int, total: int) -> None:
        if done == total:
            assert session.cancel() == 1

    with pytest.raises(Cancelled):
        session.load(tmp_path / "a", progress=at_the_end)
    assert session.status().state == "empty"
    assert opener.alive == 0
    session.load(tmp_path / "a")
    with pytest.raises(Cancelled):
        session.generate("a seven", progress=lambda at: at_the_end(at.step, at.total))
    assert session.status().state == "ready"


def test_cancel_reaches_those_who_wait(session: Session, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    session.load(tmp_path / "a")
    first, gate = begun(pool, session.generate, "a seven")
    waiting = [pool.submit(session.generate, "another") for _ in range(3)]
    eventually(lambda: len(session._jobs._line) == 4)
    assert session.cancel() == 4
    for future in waiting:  # they need not wait for the one that works
        with pytest.raises(Cancelled):
            future.result(SOON)
    gate.opened.set()
    with pytest.raises(Cancelled):
        first.result(SOON)


def test_cancel_of_an_idle_session_cancels_nothing(session: Session, tmp_path: Path) -> None:
    assert session.cancel() == 0
    session.load(tmp_path / "a")
    assert session.cancel() == 0
    assert session.generate("a seven").images


# several threads


def test_a_load_cancels_what_works_and_waits_for_it(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    drawing, gate = begun(pool, session.generate, "a seven")
    loading = pool.submit(session.load, tmp_path / "b")
    eventually(lambda: len(session._jobs._line) == 2)
    assert opener.closed == []  # the pipeline stays while it draws
    gate.opened.set()
    with pytest.raises(Cancelled):
        drawing.result(SOON)
    assert loading.result(SOON).path == str(tmp_path / "b")
    assert opener.opened == [tmp_path / "a", tmp_path / "b"]


def test_a_load_cancels_an_earlier_load(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    first, gate = begun(pool, session.load, tmp_path / "a")
    second = pool.submit(session.load, tmp_path / "b")
    eventually(lambda: len(session._jobs._line) == 2)
    gate.opened.set()
    with pytest.raises(Cancelled):
        first.result(SOON)
    assert second.result(SOON).path == str(tmp_path / "b")
    assert opener.opened == [tmp_path / "b"]


def test_a_load_that_takes_long_to_validate_does_not_replace_a_later_one(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, validate = Gate(), opener.validate

    def slowly(path: Path, *more: Any) -> Any:
        if path.name == "slow":
            gate()
        return validate(path, *more)

    monkeypatch.setattr(opener, "validate", slowly)
    slow = pool.submit(session.load, tmp_path / "slow")
    assert gate.reached.wait(SOON)
    session.load(tmp_path / "b")
    gate.opened.set()
    with pytest.raises(Cancelled, match="a later load took its place"):
        slow.result(SOON)
    assert session.status().path == str(tmp_path / "b")


def test_a_load_of_what_is_there_disturbs_nobody(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    first, gate = begun(pool, session.load, tmp_path / "a")
    again = [pool.submit(session.load, tmp_path / "a") for _ in range(3)]
    eventually(lambda: len(session._jobs._line) == 4)
    gate.opened.set()
    assert {future.result(SOON).path for future in [first, *again]} == {str(tmp_path / "a")}
    drawing, gate = begun(pool, session.generate, "a seven")
    again = [pool.submit(session.load, tmp_path / "a", threads=1)]
    eventually(lambda: len(session._jobs._line) == 2)
    gate.opened.set()
    assert drawing.result(SOON).images
    assert again[0].result(SOON).state == "ready"
    assert opener.opened == [tmp_path / "a"]


def test_a_load_of_the_same_that_waited_for_a_failed_one_loads_itself(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    def fail(done: int, total: int) -> None:
        reached.set()
        assert opened.wait(SOON)
        raise ZeroDivisionError

    reached, opened = threading.Event(), threading.Event()
    first = pool.submit(session.load, tmp_path / "a", progress=fail)
    assert reached.wait(SOON)
    second = pool.submit(session.load, tmp_path / "a")
    eventually(lambda: len(session._jobs._line) == 2)
    opened.set()
    with pytest.raises(ZeroDivisionError):
        first.result(SOON)
    assert second.result(SOON).state == "ready"


def test_unload_cancels_what_works_and_is_not_cancelled(
    session: Session, opener: FakeOpener, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    session.load(tmp_path / "a")
    drawing, gate = begun(pool, session.generate, "a seven")
    unloading = pool.submit(session.unload)
    eventually(lambda: len(session._jobs._line) == 2)
    assert session.cancel() == 0
    gate.opened.set()
    with pytest.raises(Cancelled):
        drawing.result(SOON)
    unloading.result(SOON)
    assert opener.alive == 0
