"""What the models of YAML files have in common: their base, texts, lists, and mappings that can't be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, Strict, StringConstraints

from slipcast.registry.forms import of_form
from slipcast.registry.frozen import FrozenMapping

Item = TypeVar("Item")


def _as_dicts(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(entry) if isinstance(entry, FrozenMapping) else entry for key, entry in entries.items()}


Text = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, *of_form(r"^[a-z][a-z0-9_]*$", "a word of small letters, digits and underscores")]
Several = Annotated[tuple[Item, ...], Strict(False)]
"""A list in the file, which is no tuple to a strict model."""

FROZEN = (AfterValidator(FrozenMapping), PlainSerializer(_as_dicts, return_type=dict[str, Any]))
"""What makes a mapping of a model one that can't be changed, as annotations."""

Named = Annotated[Mapping[str, Item], *FROZEN]


class Section(BaseModel):
    """A section of a file: frozen, without unknown keys; docstrings of fields are their descriptions in editors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
