"""The models of a checkpoint by what a user calls them, and what lies beside them that no family claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipcast.registry.errors import IdentificationError
from slipcast.registry.identify import Match
from slipcast.registry.validation import counted

_SETTING = "component"


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """Tensors that lie in a file beside the recognised models, in a part that no family claims.

    Attributes:
        name: what their names begin with, up to the first dot.
        tensors: their number.
        reason: what a recognised model's family says of them, or "".
    """

    name: str
    tensors: int
    reason: str

    def __str__(self) -> str:
        said = f": {self.reason}" if self.reason else ""
        begin = "begins" if self.tensors == 1 else "begin"
        return f"no family claims {counted(self.tensors, 'tensor')} that {begin} with {self.name}{said}"


def unclaimed_parts(matches: Iterable[Match]) -> tuple[Unclaimed, ...]:
    """What lies in a file beside the recognised models and belongs to none, the largest first.

    Single tensors that a family drops, such as a counter, are no part.
    """
    files: dict[str, list[Match]] = {}
    for match in matches:
        files.setdefault(match.component, []).append(match)
    return tuple(part for own in files.values() for part in _parts_beside(own))


def _parts_beside(own: Sequence[Match]) -> Iterable[Unclaimed]:
    prefixes = tuple(match.prefix for match in own)
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for name in own[0].everything.weights:
        beginning, dot, _ = name.partition(".")
        reason = next(filter(None, (match.family.key_map.drop_reason(name) for match in own)), "")
        if not name.startswith(prefixes) and (dot or not reason):
            counts[beginning] += 1
            reasons.setdefault(beginning, reason)
    return (Unclaimed(name, count, reasons[name]) for name, count in counts.most_common())


def choose_component(wanted: str, matches: Sequence[Match], unclaimed: Iterable[Unclaimed]) -> Match:
    """The one model that the setting ``component`` means: by name, folder, family or kind, the first that finds any.

    Of several in one folder a sole denoiser is meant.

    Args:
        wanted: the setting.
        matches: the recognised models.
        unclaimed: what lies beside them.

    Raises:
        IdentificationError: it means none of them, or several.
    """
    ways: tuple[Callable[[Match], str], ...] = (
        lambda match: match.name,
        lambda match: match.component,
        lambda match: match.family.id,
        lambda match: match.family.kind,
    )
    found = next(filter(None, ([match for match in matches if way(match) == wanted] for way in ways)), [])
    denoisers = [match for match in found if match.family.kind == "denoiser"]
    if len(found) == 1 or len(denoisers) == 1:
        return (denoisers or found)[0]
    if found:
        raise IdentificationError(
            f"the component {wanted!r}, which {len(found)} models of this checkpoint are",
            expected="one of them, by a name that only it has",
            hint="choose with " + " or ".join(f"{_SETTING}={_name_alone(match, matches)}" for match in found),
            path=found[0].header.path,
            items=_lines(found, matches),
        )
    part = next((part for part in unclaimed if part.name == wanted), None)
    raise IdentificationError(
        f"the component {wanted!r}" + (f", which can't be loaded: {part}" if part is not None else ""),
        expected="one of the models that are recognised, by its name, its folder, its family's id or its kind:",
        hint=f"correct the setting {_SETTING}" + ("" if part is None else ", or load this part with another program"),
        path=matches[0].header.path,
        items=_lines(matches, matches),
    )


def _name_alone(match: Match, matches: Sequence[Match]) -> str:
    """What to type for a model: its family's id where no other has that, else its name."""
    alone = sum(other.family.id == match.family.id for other in matches) == 1
    return match.family.id if alone or not match.name else match.name


def _lines(shown: Iterable[Match], matches: Sequence[Match]) -> list[str]:
    return [
        f"{_name_alone(match, matches)}: {match.family.kind}, family {match.family.id}"
        + (f", in {match.name}" if match.name else "")
        for match in shown
    ]
