"""What to say of a checkpoint that no family claims, or that several do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slipcast.registry.claims import Answer
from slipcast.registry.errors import IdentificationError
from slipcast.registry.quantisation import Bundle, count_formats
from slipcast.registry.validation import counted

_ADAPTER_PARTS = frozenset({"lora", "lora_A", "lora_B", "lora_up", "lora_down", "dora_scale"})
_ADAPTER_BEGINNINGS = ("lora_", "lokr_", "hada_", "oft_", "ip_adapter_")
_FOR_MODELS = "'slipcast explain PATH' shows what each family looked for; 'slipcast new PATH --id ID' drafts a new one"
_FOR_ADAPTERS = (
    "load the base model, then add the adapter to it with load_lora_weights, add_adapter or whatever its kind is added "
    "with, as docs/precision.md shows"
)


def claimed_twice(path: Path, claims: Sequence[Answer]) -> IdentificationError:
    """The error for a checkpoint that several families claim."""
    return IdentificationError(
        "the families " + " and ".join(claim.family.id for claim in claims) + " both claim this checkpoint",
        expected="exactly one family whose evidence is complete",
        hint="force one with the setting family=ID, and sharpen identify: in the family files",
        path=path,
        items=[f"{claim.family.id}: " + ", ".join(claim.evidence.found) for claim in claims],
        candidates=tuple(claim.family.id for claim in claims),
    )


def unclaimed(path: Path, weights: Mapping[str, Bundle], answers: Sequence[Answer]) -> IdentificationError:
    """The error for a checkpoint that no family claims: what it is made of, and what the nearest family missed."""
    formats = ", ".join(f"{name} {count}" for name, count in count_formats(weights.values()).items())
    beginnings = Counter(name.partition(".")[0] + "." for name in weights)
    seen = [counted(len(weights), "weight"), f"formats {formats or 'none'}"]
    if beginnings:
        seen.append("names begin with " + ", ".join(name for name, _ in beginnings.most_common(4)))
    adapter = kind_of_stranger(weights)
    kind = adapter or relative_among(answers)
    expected = "a model" if adapter else "the evidence of one family"
    missing: tuple[str, ...] = ()
    if answers and (answers[0].evidence.share > 0 or len(answers) == 1) and not adapter:
        nearest = answers[0]
        missing = nearest.evidence.missing
        under = f", under the prefix {nearest.prefix!r}" if nearest.prefix else ""
        expected += f"; the nearest is {nearest.family.id}{under}, which misses:"
    return IdentificationError(
        f"no family claims this checkpoint{f' ({kind})' if kind else ''}: " + "; ".join(seen),
        expected=expected,
        hint=_FOR_ADAPTERS if adapter else _FOR_MODELS,
        path=path,
        items=missing,
    )


def relative_among(answers: Sequence[Answer]) -> str:
    """A clause for a model that is known, and known to be none that any family's class can hold; or ""."""
    for answer in answers:
        identify = answer.family.identify
        if len(answer.evidence.found) == len(identify.has):
            for name, title in identify.relatives.items():
                if answer.names.is_there(name):
                    return f"it looks like {title}, which the class of {answer.family.id} can't hold, for it has {name}"
    return ""


def kind_of_stranger(names: Iterable[str]) -> str:
    """A clause for what is often given in place of a model, or ""."""
    parts = {part for name in names for part in name.split(".")}
    if parts & _ADAPTER_PARTS or any(part.startswith(_ADAPTER_BEGINNINGS) for part in parts):
        return "it looks like an adapter, which is loaded onto a model and is none itself"
    return ""
