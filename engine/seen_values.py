"""Gathers what a user should know of the values that are read, also where a GPU has yet to look at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite

import torch

_LARGEST_FINITE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
"""The byte of the largest positive number; those above mean NaN or infinity."""
_SIGN = 0x80


class SeenValues:
    """Sentences on values, each once."""

    def __init__(self) -> None:
        self._sentences: set[str] = set()
        self._open: dict[str, list[torch.Tensor]] = {}
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._suspects: set[str] = set()

    def add(self, sentence: str) -> None:
        """Take down a sentence."""
        self._sentences.add(sentence)

    def add_where(self, condition: torch.Tensor, sentence: str) -> None:
        """Take down a sentence if a condition (bool ``[]``) holds; a GPU's is looked at in the end, without waiting."""
        if condition.is_cuda:
            self._open.setdefault(sentence, []).append(condition)
        elif condition:
            self.add(sentence)

    def look_at(self, name: str, values: torch.Tensor) -> None:
        """Take down the name of a tensor of the result some of whose values may not be finite.

        A sum of finite numbers may overflow as well; in the end such a tensor is looked at as a whole. While values are
        in the processor's caches their sum takes a fraction of the time that it took to bring them there.

        Args:
            name: of the tensor.
            values: some of its values, in any dtype.
        """
        if values.is_floating_point() and values.dtype.itemsize > 1 and values.numel():
            total = values.sum(dtype=torch.float32 if values.is_cuda else None)
            if values.is_cuda:
                self._sums.setdefault(name, []).append(total)
            elif not isfinite(total.item()):
                self._suspects.add(name)

    def suspects(self) -> frozenset[str]:
        """Names of tensors whose values were looked at and may not be finite; waits for the GPU."""
        names = [name for name, sums in self._sums.items() for _ in sums]
        sums = [total for sums in self._sums.values() for total in sums]
        finite = torch.stack(sums).isfinite().tolist() if sums else []
        return frozenset(self._suspects.union(name for name, good in zip(names, finite, strict=True) if not good))

    def sentences(self) -> tuple[str, ...]:
        """All of them, sorted; waits for the GPU."""
        seen = {sentence for sentence, conditions in self._open.items() if bool(torch.stack(conditions).any())}
        return tuple(sorted(self._sentences | seen))


def hold_no_number(codes: torch.Tensor) -> torch.Tensor | None:
    """Whether float8 codes include NaN or infinity, bool ``[]``; None of other dtypes, that can't. Takes no memory."""
    largest = _LARGEST_FINITE.get(codes.dtype)
    if largest is None or codes.numel() == 0:
        return None
    raw = codes.view(torch.uint8)
    return (raw.view(torch.int8).amax() > largest) | (raw.amax() > largest + _SIGN)


def not_finite(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """A sentence on values that are NaN or infinite; None where there are none.

    Args:
        names: of the tensors to look at.
        tensors: name -> tensor.
    """
    counts = {name: count for name in sorted(names) if (count := _count_not_finite(tensors[name]))}
    if not counts:
        return None
    shown = [f"{name} ({count:,} of {tensors[name].numel():,})" for name, count in list(counts.items())[:_SHOWN]]
    more = [f"{len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else []
    held = "1 tensor holds" if len(counts) == 1 else f"{len(counts)} tensors hold"
    return (
        f"{held} values that are NaN or infinite, in {', '.join((*shown, *more))}: the file is damaged, or its values "
        "are beyond the dtype that they were cast to, and so are the model's outputs"
    )


def _count_not_finite(tensor: torch.Tensor) -> int:
    """In pieces: masks of a whole tensor would take memory."""
    return sum(int((~piece.isfinite()).sum()) for piece in tensor.flatten().split(_PIECE))


_SHOWN = 6
_PIECE = 1 << 18
