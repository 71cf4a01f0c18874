"""What a session needs of whatever makes, runs and ends its pipelines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipcast.engine.plan import Decision
from slipcast.registry.settings import Settings

if TYPE_CHECKING:
    from slipcast.engine.pipeline.generate import Generated, GenerationProgress
    from slipcast.engine.pipeline.request import GenerationRequest
    from slipcast.engine.policy.sizes import AskedSize


@dataclass(frozen=True, slots=True)
class Validated:
    """A load that can be done.

    Attributes:
        path: what is loaded, absolute.
        settings: those of the load.
        plan: what ``open`` needs of it.
        family: id of the denoiser's family.
        pipeline: name of the pipeline's class.
        device: torch's name of the device.
        content: what tells the files from others, or from a later state of the same.
    """

    path: Path
    settings: Settings
    plan: Any
    family: str = ""
    pipeline: str = ""
    device: str = ""
    content: Hashable = field(default=())


class Opener(Protocol):
    """Makes, runs and ends pipelines. A session calls ``validate`` at any time, the others one at a time."""

    def validate(self, path: Path, settings: Settings, size: AskedSize | None, loaded: Validated | None) -> Validated:
        """Find out all that could stand against a load, and take no memory of the device for it.

        Args:
            path: what to load, absolute.
            settings: those of the load.
            size: what is to be drawn; None: what is usual.
            loaded: what is loaded now, whose memory will be free by then.

        Raises:
            SlipcastError: it can't be done.
        """

    def open(self, validated: Validated, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> Any:
        """Make the pipeline. Leaves nothing if it fails.

        Args:
            validated: what to load.
            progress: called with the bytes read so far and in all.
            cancelled: asked now and then; once it says True, ``open`` ends with ``Cancelled``.
        """

    def adjust(self, pipe: Any, validated: Validated) -> bool:
        """Lay settings on a pipeline that is there already, of which none bears on loading.

        Returns:
            Whether that can be done; if not, the pipeline is loaded anew.
        """

    def decisions(self, pipe: Any) -> Mapping[str, Decision]:
        """What became of each setting."""

    def check(self, validated: Validated, request: GenerationRequest) -> None:
        """Refuse what ``draw`` would refuse.

        Raises:
            SlipcastError: the pipeline can't do it.
        """

    def draw(
        self,
        pipe: Any,
        request: GenerationRequest,
        progress: Callable[[GenerationProgress], None],
        cancelled: Callable[[], bool],
    ) -> Generated:
        """Draw.

        Args:
            pipe: what ``open`` returned.
            request: what is to be drawn.
            progress: called after each step; what it raises ends the drawing.
            cancelled: asked at least once a step; once it says True, ``draw`` ends with ``Cancelled``.
        """

    def recover(self, pipe: Any) -> None:
        """Bring a pipeline whose drawing has failed back into the state before it."""

    def close(self, pipe: Any) -> None:
        """Undo whatever ``open`` changed outside the pipeline. The session gives up the pipeline itself."""
