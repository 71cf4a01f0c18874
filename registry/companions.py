"""A part of a pipeline, and where it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipcast.registry.family import Serves
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.identify import Match

PartKind = Literal["model", "tokenizer", "scheduler"]


@dataclass(frozen=True, slots=True)
class Companion:
    """One part of a pipeline, and where it was found.

    Attributes:
        role: the pipeline's own name of it.
        kind: a model with weights, a tokenizer or another processor of inputs, or a scheduler.
        class_name: what is made of it, ``library.Name``.
        found: why it is this one.
        path: the file or folder that it is in; None of a scheduler that is made from the family's arguments.
        match: the model as it was identified; None of one without a family, which its own library reads.
        beside: the other models in the file of ``match``.
        arguments: of a scheduler without a file.
        serves: how the model becomes the ``class_name`` that the pipeline needs, where that is another than its own.
    """

    role: str
    kind: PartKind
    class_name: str
    found: str
    path: Path | None = None
    match: Match | None = None
    beside: tuple[Match, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=FrozenMapping)
    serves: Serves | None = None

    @property
    def component(self) -> str | None:
        """Which part of its path it is; None where it is all of it."""
        return (self.match.name or None) if self.match is not None else None

    @property
    def family(self) -> str | None:
        """Id of its family; None where it has none."""
        return self.match.family.id if self.match is not None else None


def kind_of_role(role: str) -> PartKind:
    """What a part is, by its name in diffusers' pipelines."""
    if role.startswith("scheduler"):
        return "scheduler"
    processes = "tokenizer" in role or role.endswith("processor") or role == "feature_extractor"
    return "tokenizer" if processes else "model"


def is_class(companion: str) -> bool:
    """Whether a family file names a class, ``library.Name``, where others name a family."""
    return companion.startswith(("diffusers.", "transformers."))
