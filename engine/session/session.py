"""The session: a pipeline that is loaded, drawn with and replaced by several threads, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slipcast.engine.pipeline.request import checked_size, make_request, with_default_size
from slipcast.engine.session.bearing import bearing_settings
from slipcast.engine.session.jobs import Job, Jobs
from slipcast.engine.session.opener import Opener, Validated
from slipcast.engine.session.release import ran_out_of_memory, release_frames, release_memory
from slipcast.engine.session.session_status import SessionStatus
from slipcast.registry.errors import Cancelled, DeviceError, SessionError
from slipcast.registry.settings import checkpoint_path, resolve_settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.generate import Generated, GenerationProgress
    from slipcast.engine.pipeline.request import GenerationRequest
    from slipcast.engine.policy.sizes import AskedSize

logger = logging.getLogger("slipcast")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Present:
    """What is loaded, but for the pipeline itself; both None where nothing is."""

    validated: Validated | None = None
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    pipe: Any
    validated: Validated
    key: Hashable
    size: AskedSize | None
    """What the last load was for; None: the pipeline's own."""


class Session:
    """Holds one pipeline at a time, for applications: every method may be called from any thread.

    Loads, generations and unloads work one after another, in the order in which they come. A load is validated first,
    beside whatever works; once it is found to be possible it cancels what works and waits, and waits for that to end,
    gives up the pipeline that is loaded, and only then takes memory. Whatever fails leaves the session ready for the
    next call: a generation with its pipeline, a load empty.

    Args:
        settings: those of every load, over which a load lays its own; see configs/defaults.yaml.
        opener: what makes the pipelines, by default of checkpoints as ``slipcast.pipeline`` does.

    Raises:
        SettingsError: a setting is unknown or has a wrong value.
    """

    def __init__(self, *, opener: Opener | None = None, **settings: Any) -> None:
        resolve_settings(settings)
        if opener is None:
            from slipcast.engine.session.pipeline_opener import PipelineOpener

            opener = PipelineOpener()
        self._opener = opener
        self._settings = settings
        self._jobs = Jobs()
        self._loaded: _Loaded | None = None
        """Belongs to the job whose turn it is."""
        self._status = SessionStatus()
        """Written by the job whose turn it is, as a whole; read by anybody."""

    def load(
        self,
        path: str | Path,
        *,
        size: tuple[int, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> SessionStatus:
        """Load a pipeline, unless it is loaded already with the same files and the same settings that bear on it.

        Args:
            path: as for ``slipcast.pipeline``.
            size: width and height in pixels of what is to be drawn, for which there must be memory; the pipeline's own
                if left out. ``generate`` draws it where it is told no other, which can be drawn as well where it fits.
            progress: called with the bytes read so far and in all.
            settings: as for ``slipcast.pipeline``.

        Returns:
            The status with the pipeline loaded.

        Raises:
            SlipcastError: as ``slipcast.pipeline`` does. What is found before the load begins, a wrong path, an unknown
                family or too little memory, leaves the session untouched; what happens later leaves it empty.
            DeviceError: memory ran out during the load.
            Cancelled: by ``cancel``, or by a later load or unload.
            SessionError: called in a callback of this session.
        """
        with self._jobs.asked("load") as job:
            whole = checkpoint_path(path).absolute()
            wanted = None if size is None else checked_size(size)
            values = resolve_settings({**self._settings, **settings}, checkpoint=whole).values
            validated = self._opener.validate(whole, values, wanted, self._present().validated)
            job.key = (validated.path, validated.content, bearing_settings(values))
            self._jobs.put_in_line(job, lambda: self._present().key)
            return self._in_turn(job, lambda: self._load(job, validated, wanted, progress))

    def generate(
        self, prompt: str, *, progress: Callable[[GenerationProgress], None] | None = None, **asked: Any
    ) -> Generated:
        """Draw with the pipeline that is loaded.

        Args:
            prompt: what is to be seen.
            progress: called after each step. An error that it raises ends the generation, and comes out here.
            asked: the other fields of ``GenerationRequest``: steps, guidance, seed, width, height, image, strength, ...
                A width or height that is left out is the picture's to start from, else that of the load's ``size``.

        Returns:
            The pictures, and how they were drawn.

        Raises:
            SessionError: nothing is loaded, or this is called in a callback of this session.
            SettingsError: a value is of a wrong type or out of its range, or the pipeline can't do what is asked.
            DeviceError: memory ran out. The pipeline stays.
            Cancelled: by ``cancel``, or by a later load or unload; within one step.
        """
        request = make_request(prompt=prompt, **asked)
        with self._jobs.asked("generate") as job:
            self._jobs.put_in_line(job)
            return self._in_turn(job, lambda: self._generate(job, request, progress))

    def unload(self) -> None:
        """Give up the pipeline. Cancels what works and waits, and waits for that to end.

        Raises:
            SessionError: called in a callback of this session.
        """
        with self._jobs.asked("unload") as job:
            self._jobs.put_in_line(job)
            self._in_turn(job, self._drop)

    def cancel(self) -> int:
        """Cancel all loads and generations that were asked for until now. Does not wait for them to end.

        Returns:
            How many end with ``Cancelled`` for it.
        """
        return self._jobs.cancel_all("by cancel()")

    def status(self) -> SessionStatus:
        """What the session is doing. Waits for nothing."""
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up the pipeline."""
        self.unload()

    def _in_turn(self, job: Job, work: Callable[[], Result]) -> Result:
        """Do the work of a job when its turn comes, and clear up behind it if it fails."""
        self._jobs.wait(job)
        try:
            result = work()
            self._status = self._idle_status()
        except BaseException as error:
            release_frames(error)
            self._after_failure(job, error)
            if ran_out_of_memory(error):
                raise _out_of_memory(job, error) from error
            raise
        return result

    def _load(
        self,
        job: Job,
        validated: Validated,
        size: AskedSize | None,
        progress: Callable[[int, int], None] | None,
    ) -> SessionStatus:
        if self._loaded is not None and self._loaded.key == job.key and self._adjusted(job, validated, size):
            return self._idle_status()
        self._drop()
        self._status = SessionStatus(
            "loading", str(validated.path), validated.family, validated.pipeline, validated.device
        )

        def report(done: int, total: int) -> None:
            self._status = replace(self._status, done=done, total=total)
            if progress is not None:
                with self._jobs.calling_back():
                    progress(done, total)

        self._loaded = _Loaded(self._opener.open(validated, report, job.cancelled), validated, job.key, size)
        try:
            job.finish()
        except Cancelled:
            self._drop()
            raise
        return self._idle_status()

    def _generate(
        self, job: Job, request: GenerationRequest, progress: Callable[[GenerationProgress], None] | None
    ) -> Generated:
        loaded = self._loaded
        if loaded is None:
            raise SessionError(
                "a generation without a pipeline",
                expected="a session that has loaded one",
                hint="call load first",
            )
        request = with_default_size(request, loaded.size)
        self._opener.check(loaded.validated, request)
        self._status = replace(self._status, state="generating", done=0, total=0, failure="")

        def report(at: GenerationProgress) -> None:
            self._status = replace(self._status, done=at.step, total=at.total)
            if progress is not None:
                with self._jobs.calling_back():
                    progress(at)

        drawn = self._opener.draw(loaded.pipe, request, report, job.cancelled)
        job.finish()
        return drawn

    @property
    def _pipe(self) -> Any:
        """The pipeline. To be handed on, not to be kept in a variable: that would keep it alive."""
        assert self._loaded is not None
        return self._loaded.pipe

    def _present(self) -> _Present:
        loaded = self._loaded
        return _Present() if loaded is None else _Present(loaded.validated, loaded.key)

    def _adjusted(self, job: Job, validated: Validated, size: AskedSize | None) -> bool:
        """Whether the pipeline that is there serves a load as well."""
        job.check()
        try:
            if not self._opener.adjust(self._pipe, validated):
                return False
        except BaseException:
            self._drop()
            raise
        assert self._loaded is not None
        self._loaded = replace(self._loaded, validated=validated, size=size)
        job.finish()
        return True

    def _drop(self) -> None:
        """Give up the pipeline, come what may."""
        if self._loaded is None:
            return
        try:
            self._opener.close(self._pipe)
        except Exception as error:
            logger.warning("a pipeline that is given up could not be closed: %r", error)
            release_frames(error)
        self._loaded = None
        release_memory()

    def _after_failure(self, job: Job, error: BaseException) -> None:
        """Bring back the pipeline of a generation that failed, and say what went wrong."""
        if job.kind == "generate" and self._loaded is not None:
            try:
                self._opener.recover(self._pipe)
            except Exception as second:
                logger.warning("the pipeline is given up, as it can't be used after %r: %r", error, second)
                release_frames(second)
                self._drop()
        if job.kind == "load" or ran_out_of_memory(error):  # looking through all objects takes a while
            release_memory()
        self._status = self._idle_status(str(error) or type(error).__name__)

    def _idle_status(self, failure: str = "") -> SessionStatus:
        if self._loaded is None:
            return SessionStatus(failure=failure)
        made, decisions = self._loaded.validated, self._opener.decisions(self._pipe)
        return SessionStatus(
            "ready", str(made.path), made.family, made.pipeline, made.device, decisions, failure=failure
        )


def _out_of_memory(job: Job, error: BaseException) -> DeviceError:
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return DeviceError(
        f"memory ran out during the {'load' if job.kind == 'load' else 'generation'}: {first_line}",
        expected="memory for the weights, and for the activations at this size",
        hint="load with memory=balanced or memory=low, or draw a smaller picture",
    )
