"""Gathers what a user should know of the values that are read, also where a GPU has yet to look at them."""

from __future__ import annotations

import torch

_LARGEST_FINITE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
"""The byte of the largest positive number; those above mean NaN or infinity."""
_SIGN = 0x80


class SeenValues:
    """Sentences on values, each once."""

    def __init__(self) -> None:
        self._sentences: set[str] = set()
        self._open: dict[str, list[torch.Tensor]] = {}

    def add(self, sentence: str) -> None:
        """Take down a sentence."""
        self._sentences.add(sentence)

    def add_where(self, condition: torch.Tensor, sentence: str) -> None:
        """Take down a sentence if a condition (bool ``[]``) holds; a GPU's is looked at in the end, without waiting."""
        if condition.is_cuda:
            self._open.setdefault(sentence, []).append(condition)
        elif condition:
            self.add(sentence)

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
