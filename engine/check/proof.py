"""What a proof comes to: it holds, is refuted, or can't be led."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slipcast.registry.errors import SlipcastError

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a proof that nothing refutes comes to.

    Attributes:
        status: ``ok``, or ``skipped`` where it can't be led.
        detail: what was proven, or why it can't be.
    """

    status: Literal["ok", "skipped"]
    detail: str


@dataclass(frozen=True, slots=True)
class Proof:
    """One proof of one family file.

    Attributes:
        name: a word or two.
        status: how it ended.
        detail: what was proven, what refutes it, or why it can't be led.
        error: what refutes it, in full.
    """

    name: str
    status: Status
    detail: str
    error: SlipcastError | None = None

    def to_dict(self) -> dict[str, Any]:
        """A proof in the contract of ``slipcast check --json``."""
        error = None if self.error is None else self.error.to_dict()
        return {"name": self.name, "status": self.status, "detail": self.detail, "error": error}


@dataclass(frozen=True, slots=True)
class CheckedFamily:
    """All proofs of one family file.

    Attributes:
        id: the family's id.
        source: the file.
        proofs: in the order in which they were led.
    """

    id: str
    source: str
    proofs: tuple[Proof, ...]

    @property
    def failed(self) -> tuple[Proof, ...]:
        """The proofs that are refuted."""
        return tuple(proof for proof in self.proofs if proof.status == "failed")

    def to_dict(self) -> dict[str, Any]:
        """A family in the contract of ``slipcast check --json``."""
        return {"id": self.id, "source": self.source, "proofs": [proof.to_dict() for proof in self.proofs]}


def proved(detail: str) -> Outcome:
    """The proof holds."""
    return Outcome("ok", detail)


def skipped(reason: str) -> Outcome:
    """The proof can't be led."""
    return Outcome("skipped", reason)
