"""The proof of what a file says of dtypes: float16, float32, and where float8 is refused."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod

from torch import nn

from slipcast.engine.build import model_class
from slipcast.engine.check.fact import Fact, drawings, judged
from slipcast.engine.check.forward_proofs import float8_error
from slipcast.engine.check.header_proofs import why_nothing_built
from slipcast.engine.check.pipeline_source import pipeline_source
from slipcast.engine.check.proof import Outcome, skipped
from slipcast.engine.check.subject import Built, Subject
from slipcast.registry.keymap.place import parse_place

_WHERE = ("precision",)
_FEW = 0.25
"""What part of its weights linear layers hold at most in a model of convolutions."""
_HEADER = "recorded headers"
_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_CLAMPS = re.compile(r"65504|torch\.finfo\(torch\.float16\)|dtype == torch\.float16")


def prove_dtypes(subject: Subject) -> Outcome:
    """Float16 is safe where something shows it; float32 is kept where the class keeps it; refusals of float8 hold."""
    if not subject.built:
        return skipped(why_nothing_built(subject))
    return judged(subject, (*_float16(subject), *_default(subject), *_float32(subject), *_float8(subject)))


def _float16(subject: Subject) -> Iterator[Fact]:
    """That float16 is called safe where the class, a published file or diffusers' example bears it, and only there."""
    safe = subject.family.precision.fp16 == "safe"
    where, said = (*_WHERE, "fp16"), f"fp16 {subject.family.precision.fp16}"
    shown = [what for what, bears in _bearing_float16(subject) if bears]
    if bool(shown) is safe:
        yield Fact(where, said, shown[0] if safe else "nothing that computes it in float16")
    else:
        yield Fact(where, said, against="" if safe else f"{', '.join(shown)} bear it in float16")


def _bearing_float16(subject: Subject) -> Iterator[tuple[str, bool]]:
    kind = model_class(subject.family.model)
    yield "the class's source", bool(_CLAMPS.search(inspect.getsource(sys.modules[kind.__module__])))
    yield _HEADER, "float16" in _published(subject)
    sources = [pipeline_source(drawing.sampling.pipeline) for drawing in drawings(subject.family)]
    dtypes = {name for source in sources if source for name in re.findall(r"torch\.\w*float\d+", source.examples)}
    yield "the pipeline's example", "torch.float16" in dtypes and "torch.bfloat16" not in dtypes


def _published(subject: Subject) -> Counter[str]:
    """In which dtypes of 16 or 32 bits examples are published, by how many; of each what most of it is in."""
    found: Counter[str] = Counter()
    for case in subject.cases:
        elements: Counter[str] = Counter()
        for bundle in case.match.bundles.values() if case.match is not None else ():
            if bundle.is_plain and bundle.weight.dtype in _NAMES:
                elements[_NAMES[bundle.weight.dtype]] += prod(bundle.shape)
        if elements:
            found[elements.most_common(1)[0][0]] += 1
    return found


def _default(subject: Subject) -> Iterator[Fact]:
    """That the dtype for files that show none is one in which examples are published, else the usual bfloat16."""
    precision = subject.family.precision
    for field in ("compute", "compute_default"):
        value = getattr(precision, field)
        where, said = (*_WHERE, field), f"{field} {value}"
        if value == "checkpoint" or (field == "compute_default" and value == "bfloat16"):
            continue
        published = value in _published(subject) and value == "float16"
        known = ", ".join(_published(subject)) or "no header"
        yield Fact(where, said, _HEADER if published else "", f"examples are in {known}")


def _float32(subject: Subject) -> Iterator[Fact]:
    """That what stays in float32 is what the class of diffusers keeps there, and all of it."""
    kind = model_class(subject.family.model)
    parts = getattr(kind, "_keep_in_fp32_modules", None) if kind.__module__.startswith("diffusers.") else None
    parts = [*(parts or ()), *(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())]
    names = {name for built in subject.built for name, _ in built.model.named_parameters()}
    theirs = {name for name in names if set(parts) & set(name.split("."))}
    ours: set[str] = set()
    where = (*_WHERE, "keep_fp32")
    for number, text in enumerate(subject.family.precision.keep_fp32):
        place = parse_place(text)
        hit = {name for name in names if place.takes(tuple(name.split(".")))}
        ours |= hit
        inside = bool(hit) and hit <= theirs
        yield Fact((*where, number), f"float32 {text}", "the class's modules in float32" if inside else "")
    missing = sorted(theirs - ours)
    if missing:
        yield Fact(where, f"nothing of {missing[0]} in float32", against=f"the class keeps {len(missing)} of these")


def _float8(subject: Subject) -> Iterator[Fact]:
    """That float8 is called not applicable of models that are mostly convolutions, and of no others."""
    precision = subject.family.precision
    share = _linear_share(subject.built[0])
    for field in ("storage", "compute"):
        said = getattr(precision.fp8, field)
        where, text = (*_WHERE, "fp8", field), f"fp8 {field} {said.status.replace('_', ' ')}"
        if said.supported and share:
            yield Fact(where, text, "the class's linear layers")
        elif said.supported or said.status == "not_applicable":
            few = share < _FEW
            against = f"linear layers hold {share:.0%} of its weights"
            fits = few and not said.supported
            yield Fact(where, text, "the class's linear layers" if fits else "", against, final=True)
        else:
            yield Fact(where, text, against="the small model runs in float8", final=_runs_in_float8(subject, field))
    if precision.fp8.activation_scale == "tensor":
        yield Fact((*_WHERE, "fp8", "activation_scale"), "activation_scale tensor")
    if precision.nvfp4_layout is not None:
        yield Fact((*_WHERE, "nvfp4_layout"), f"nvfp4_layout {precision.nvfp4_layout}")


def _linear_share(built: Built) -> float:
    """What part of a model's weights is in linear layers."""
    linear = sum(module.weight.numel() for module in built.model.modules() if isinstance(module, nn.Linear))
    whole = sum(parameter.numel() for parameter in built.model.parameters())
    return linear / whole if whole else 0.0


def _runs_in_float8(subject: Subject, field: str) -> bool:
    """Whether the small model runs in a mode that the file refuses, within the bound that it states."""
    tiny = subject.family.tiny
    if tiny is None or tiny.not_alone or subject.tiny is None:
        return False
    error = float8_error(subject, "storage" if field == "storage" else "compute")
    return error is not None and error <= tiny.fp8_error
