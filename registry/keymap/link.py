"""What a key map expands into: links between tensors of the file and tensors of the model."""

from __future__ import annotations

from dataclasses import dataclass

Operation = str
"""What the file's tensor is of the model's: a word, where it takes a number after a slash (``interleave/128``)."""


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor of the model, as the file holds it.

    Attributes:
        model: the tensor's name in the model.
        operation: what the file's tensor is of the model's; None where it is the same.
    """

    model: str
    operation: Operation | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The equation ``rows(files) == rows(operation(term) for term in terms)``.

    Rows stand one after another on both sides. At most one side has more than one member: several terms where the
    file is fused and the model apart (``qkv: to_q + to_k + to_v``), several files where it is the other way.
    Loading solves the equation for the terms, saving evaluates it.

    Attributes:
        files: native names, without the file's prefix; where the map allows spellings, the one that is meant.
        terms: the model's tensors.
    """

    files: tuple[str, ...]
    terms: tuple[Term, ...]
