"""Tells apart the denoisers of a pipeline that has two of one class: no tensor does, the names of their files do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError
from slipcast.registry.runtime import Sampling


def expert_of(path: Path, sampling: Sampling) -> str | None:
    """The role that a file's or folder's name says; None where it says none, or more than one.

    Args:
        path: whose name is looked at. Case does not count, nor do dashes, points, blanks and underscores.
        sampling: whose ``experts`` has the words.
    """
    name = _plain(path.name)
    said = [role for role, words in sampling.experts.items() if any(_plain(word) in name for word in words)]
    return said[0] if len(said) == 1 else None


def is_twin(path: Path, other: Path, sampling: Sampling) -> bool:
    """Whether two names are one but for the words of their roles."""
    return _without_words(path, sampling) == _without_words(other, sampling)


def refuse_other_experts(parts: Iterable[Companion], sampling: Sampling) -> None:
    """Refuse a file in the place of another expert, as its name says, and one file in the place of two.

    Args:
        parts: of the pipeline.
        sampling: the pipeline's facts.

    Raises:
        CompanionError: it names the file and the place where it belongs.
    """
    experts = {part.role: part.path for part in parts if part.role in sampling.experts and part.path is not None}
    for role, path in experts.items():
        said = expert_of(path, sampling)
        if said not in (None, role):
            raise CompanionError(
                f"as the {role}: {path.name}, by its name the {said}",
                expected=f"a file for the {role}: {', '.join(sampling.experts[role])} stands in such names",
                hint=f"exchange the two: begin from the {sampling.denoiser}, and name the other by "
                f"companions.{next(other for other in sampling.experts if other != sampling.denoiser)}",
                path=path,
                roles=(role,),
            )
    for role, path in experts.items():
        if role != sampling.denoiser and path.samefile(experts[sampling.denoiser]):
            raise CompanionError(
                f"one file as the {sampling.denoiser} and as the {role}",
                expected="two, trained for other parts of the steps",
                hint=f"correct the setting companions.{role}",
                path=path,
                roles=(role,),
            )


def _without_words(path: Path, sampling: Sampling) -> str:
    name = _plain(path.name)
    for word in (word for words in sampling.experts.values() for word in words):
        name = name.replace(_plain(word), "*")
    return name


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter not in "-_. ")
