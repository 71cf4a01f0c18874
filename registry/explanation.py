"""Why each family did or did not match a checkpoint: the answer of ``slipcast explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import ARCHITECTURE, Answer, ask
from slipcast.registry.quantisation import assemble, count_formats
from slipcast.registry.settings import Settings


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every family's answer to one component of a checkpoint.

    Attributes:
        component: its folder in a pipeline folder; "" for a file.
        formats: format name -> number of weights.
        answers: the families that claim it first, then those that found most of their evidence.
    """

    component: str
    formats: Mapping[str, int]
    answers: tuple[Answer, ...]

    @property
    def claims(self) -> tuple[str, ...]:
        """Ids of the families that claim it; it is recognised where there is exactly one."""
        return tuple(answer.family.id for answer in self.answers if answer.evidence.complete)

    def to_dict(self) -> dict[str, Any]:
        """An entry of ``components`` in ``slipcast explain --json``."""
        return {
            "component": self.component,
            "formats": dict(self.formats),
            "claims": list(self.claims),
            "families": [_answer_to_dict(answer) for answer in self.answers],
        }


def explain_path(path: str | Path, settings: Settings) -> tuple[Explanation, ...]:
    """Ask every family about every component of a checkpoint.

    Raises:
        SlipcastError: the path can't be read, or a family file is wrong.
    """
    catalogue = load_catalogue(settings.families)
    checkpoint = read_checkpoint(path, limit_mib=settings.header_limit_mib)
    found = []
    for component, header in checkpoint.headers.items():
        weights = assemble(header).weights
        answers = ask(weights, catalogue, header.metadata.get(ARCHITECTURE))
        found.append(Explanation(component, count_formats(weights.values()), answers))
    return tuple(found)


def _answer_to_dict(answer: Answer) -> dict[str, Any]:
    evidence = answer.evidence
    return {
        "family": answer.family.id,
        "claims": evidence.complete,
        "prefix": answer.prefix,
        "layout": answer.layout,
        "found": [*evidence.found, *evidence.held],
        "missing": list(evidence.missing),
        "absent": list(evidence.absent),
    }
