"""Cuts the steps of a load to a GPU into windows, each of which is read ahead and lies on the device as it was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipcast.engine.reader import is_aligned
from slipcast.engine.steps import Span, Step, spans
from slipcast.registry.quantisation import Bundle

ALIGNMENT = 512
"""Bytes at whose multiples the spans of a window begin in memory, as torch's own allocations do."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps that are done one after another, and what they read.

    Attributes:
        steps: in file order.
        spans: of each weight at most one, which covers all that the steps take of it.
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the spans take in memory, one behind the other."""
        return _nbytes(self.spans)


def windows(taken: Iterable[Step], bundles: Mapping[str, Bundle], size: int, *, prefetch: bool) -> Iterator[Window]:
    """Windows of ``size`` bytes at most.

    Args:
        taken: the steps of a load, in order.
        bundles: the file's weights.
        size: in bytes; of prefetch a window is larger where a single step needs more.
        prefetch: whether safetensors' prefetch reads them, else slabs. See ``left_out``.
    """
    gathered: list[Step] = []
    covered: dict[str, Span] = {}
    for step in taken:
        needed = [span for span in spans(step, bundles) if not left_out(span, bundles, size, prefetch=prefetch)]
        wider = _widened(covered, needed)
        if gathered and _nbytes(wider.values()) > size:
            yield Window(tuple(gathered), tuple(covered.values()))
            gathered, wider = [], _widened({}, needed)
        gathered.append(step)
        covered = wider
    if gathered:
        yield Window(tuple(gathered), tuple(covered.values()))


def left_out(span: Span, bundles: Mapping[str, Bundle], size: int, *, prefetch: bool) -> bool:
    """Whether a span is in no window, but read when its step is done: what no slab holds, and what prefetch refuses."""
    return not is_aligned(bundles[span.source].weight) if prefetch else span.nbytes > size


def most_under_way(cut: Sequence[Window], count: int) -> int:
    """The most bytes that so many windows in a row take."""
    sizes = [window.nbytes for window in cut]
    return max((sum(sizes[first : first + count]) for first in range(len(sizes))), default=0)


def _nbytes(taken: Iterable[Span]) -> int:
    return sum(aligned(span.nbytes) for span in taken)


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _widened(covered: Mapping[str, Span], more: Iterable[Span]) -> dict[str, Span]:
    wider = dict(covered)
    for span in more:
        known = wider.get(span.source, span)
        wider[span.source] = Span(span.source, min(known.first, span.first), max(known.last, span.last))
    return wider
