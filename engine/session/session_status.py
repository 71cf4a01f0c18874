"""What a session is doing, as one immutable value that anybody can read at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipcast.engine.plan import Decision
from slipcast.registry.frozen import FrozenMapping

State = Literal["empty", "loading", "ready", "generating"]


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A session at one moment.

    Attributes:
        state: empty: nothing is loaded; loading; ready: a pipeline is loaded and idle; generating.
        path: what is loaded, or is being loaded; None where nothing is.
        family: id of its denoiser's family.
        pipeline: name of the pipeline's class.
        device: torch's name of the device that it computes on.
        settings: setting -> what became of it, of a pipeline that is loaded.
        done: of a load the bytes read so far, of a generation the steps taken.
        total: of a load the bytes to read, of a generation its steps; 0 while that is not known.
        failure: the message of the last load or generation, if it failed or was cancelled; "" if not.
    """

    state: State = "empty"
    path: str | None = None
    family: str = ""
    pipeline: str = ""
    device: str = ""
    settings: Mapping[str, Decision] = field(default_factory=FrozenMapping)
    done: int = 0
    total: int = 0
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "settings"}
        return {**plain, "settings": {name: decision.model_dump() for name, decision in self.settings.items()}}
