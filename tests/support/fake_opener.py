"""Pipelines that take no time: what a session does with them can be watched, and made to fail at any place."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipcast.engine.pipeline.generate import Generated, GenerationProgress
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.plan import Decision
from slipcast.engine.policy.sizes import AskedSize
from slipcast.engine.session.opener import Validated
from slipcast.registry.errors import Cancelled, HeaderError
from slipcast.registry.settings import Settings

STEPS = 4
PARTS = 3
TOO_LARGE = 4096
"""A setting ``vae.tile_size`` with which a pipeline must be loaded anew."""


class FakePipeline:
    """A pipeline with weights, and a cycle through itself such as hooks make."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = nn.Linear(64, 64)
        self.itself = self


class FakeOpener:
    """Opens made-up pipelines. What stands in a path's name happens: ``missing``, ``bad``, ``huge``.

    Args:
        pause: seconds that each step and each part of a load takes.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.opened: list[Path] = []
        self.closed: list[Path] = []
        self.adjusted: list[Settings] = []
        self.sizes: list[AskedSize | None] = []
        self.recovered = 0
        self.most_alive = 0
        self.busy = threading.Lock()
        self._alive: weakref.WeakSet[FakePipeline] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._activations: list[weakref.ref[torch.Tensor]] = []

    @property
    def alive(self) -> int:
        """Pipelines that are in memory, whole or in part."""
        return len(self._models)

    @property
    def activations_alive(self) -> int:
        """Tensors of generations that are in memory."""
        return sum(each() is not None for each in self._activations)

    def validate(self, path: Path, settings: Settings, size: AskedSize | None, loaded: Validated | None) -> Validated:
        self.sizes.append(size)
        if "missing" in path.name:
            raise HeaderError("no file", expected="a file", hint="give its path", path=path)
        return Validated(path, settings, None, family="fake", pipeline="FakePipeline", device="cpu")

    def open(
        self, validated: Validated, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> FakePipeline:
        with Alone(self.busy):
            assert self.alive == 0, "another pipeline is in memory"
            pipe = FakePipeline(validated.path)
            self._models.add(pipe.model)
            self.most_alive = max(self.most_alive, self.alive)
            for part in range(PARTS):
                time.sleep(self.pause)
                if cancelled():
                    raise Cancelled("the load was cancelled", expected="its end", hint="load again")
                progress(part + 1, PARTS)
                if part == 1 and "bad" in validated.path.name:
                    raise HeaderError("a damaged file", expected="a whole one", hint="download it again")
                if part == 1 and "huge" in validated.path.name:
                    raise torch.OutOfMemoryError("out of memory: tried to allocate 1 TiB")
            self.opened.append(validated.path)
            self._alive.add(pipe)
            return pipe

    def adjust(self, pipe: Any, validated: Validated) -> bool:
        self.adjusted.append(validated.settings)
        return validated.settings.vae.tile_size != TOO_LARGE

    def decisions(self, pipe: Any) -> Mapping[str, Decision]:
        return {"memory": Decision(requested="auto", engaged="resident", reason="made up")}

    def check(self, validated: Validated, request: GenerationRequest) -> None:
        if "impossible" in request.prompt:
            raise HeaderError("an impossible prompt", expected="a possible one", hint="give another")

    def draw(
        self,
        pipe: FakePipeline,
        request: GenerationRequest,
        progress: Callable[[GenerationProgress], None],
        cancelled: Callable[[], bool],
    ) -> Generated:
        with Alone(self.busy):
            steps = request.steps or STEPS
            latents = torch.ones(1, 64)
            for step in range(steps):
                time.sleep(self.pause)
                if cancelled():
                    raise Cancelled("the generation was cancelled", expected="its end", hint="generate again")
                latents = pipe.model(latents)
                self._activations.append(weakref.ref(latents))
                if "huge" in request.prompt and step == 1:
                    raise torch.OutOfMemoryError("out of memory: tried to allocate 1 TiB")
                progress(GenerationProgress(step + 1, steps, latents))
        return Generated((str(pipe.path),), False, "FakePipeline", {"steps": steps}, 0.0)

    def recover(self, pipe: FakePipeline) -> None:
        self.recovered += 1

    def close(self, pipe: FakePipeline) -> None:
        self.closed.append(pipe.path)


class Alone:
    """A block that must be the only one of its kind at a time."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two jobs work at a time"

    def __exit__(self, *_: object) -> None:
        self._lock.release()
