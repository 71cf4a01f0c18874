"""Evidence for and against a family: names that must be there, names that must not, and conditions on shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from slipcast.registry.errors import ExpressionError
from slipcast.registry.expression import holds
from slipcast.registry.names import Names

_NAME = re.compile(r"\b(?:size|count|has)\(\s*([^\s,()]+)")
"""What the functions that look at tensors are given."""


class Criteria(Protocol):
    """What is looked for: a family's ``identify:`` or a variant."""

    @property
    def has(self) -> tuple[str, ...]:
        """Tensors, or the beginnings of names at a dot, that must be there."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """The same, that must not be there."""

    @property
    def where(self) -> tuple[str, ...]:
        """Conditions on logical shapes."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found of some criteria.

    Attributes:
        found: names that must be there and are.
        missing: what speaks against a claim: names not found, names that should not be there, conditions that fail.
        absent: names that must not be there and are not.
        held: conditions that hold.
    """

    found: tuple[str, ...]
    missing: tuple[str, ...]
    absent: tuple[str, ...]
    held: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether all of it was found."""
        return not self.missing

    @property
    def share(self) -> float:
        """Found positive evidence as a share of all that was asked, 0 to 1."""
        return (len(self.found) + len(self.held)) / max(1, len(self.found) + len(self.held) + len(self.missing))


def absence(evidence: Evidence) -> list[str]:
    """A sentence on the names that are rightly not there; none where nothing was to be absent."""
    if len(evidence.absent) > 1:
        return ["none of " + ", ".join(evidence.absent)]
    return [f"no {name}" for name in evidence.absent]


def asked_of(condition: str) -> tuple[str, ...]:
    """The names that a condition on shapes is about, each once."""
    return tuple(dict.fromkeys(_NAME.findall(condition)))


def weigh(criteria: Criteria, names: Names) -> Evidence:
    """Hold criteria against native names and logical shapes."""
    found = tuple(name for name in criteria.has if names.is_there(name))
    present = tuple(name for name in criteria.excluded if names.is_there(name))
    missing = [name for name in criteria.has if name not in found] + [f"{name} should not be there" for name in present]
    held: list[str] = []
    for condition in criteria.where:
        try:
            true = not missing and holds(condition, names)
        except ExpressionError:
            true = False
        if true:
            held.append(condition)
        else:
            missing.append(condition)
    return Evidence(
        found, tuple(missing), tuple(name for name in criteria.excluded if name not in present), tuple(held)
    )
