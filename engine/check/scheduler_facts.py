"""The proof that a scheduler can be made of what a file states, and that its numbers are diffusers' own."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from slipcast.engine.check.fact import Drawing, Fact, drawings, judged
from slipcast.engine.check.pipeline_source import PipelineSource, is_number, pipeline_source
from slipcast.engine.check.proof import Outcome
from slipcast.engine.check.sampling_names import found
from slipcast.engine.check.subject import Subject
from slipcast.engine.pipeline.classes import scheduler_class
from slipcast.registry.strict_yaml import Where

_STEPS = 4
_SHIFTS = {
    "base_image_seq_len": "base_seq_len",
    "max_image_seq_len": "max_seq_len",
    "base_shift": "base_shift",
    "max_shift": "max_shift",
}
"""What the functions that compute a shift from a picture's size call these arguments of schedulers."""


def prove_scheduler(subject: Subject) -> Outcome:
    """The scheduler is made and steps, and each of its arguments is shown by diffusers or has a source."""
    return judged(subject, (fact for drawing in drawings(subject.family) for fact in _facts(drawing)))


def _facts(drawing: Drawing) -> Iterator[Fact]:
    kind = found(scheduler_class, drawing.companions.get("scheduler"))
    source = pipeline_source(drawing.sampling.pipeline)
    stated = drawing.said.scheduler
    if kind is None or source is None or stated is None:
        return
    at = (*drawing.where, "sampling", "scheduler")
    defaults = {name: value.default for name, value in inspect.signature(kind.__init__).parameters.items()}
    odd = [name for name, value in stated.items() if name not in defaults or not _alike(defaults[name], value)]
    for name in odd:
        known = f"it is {defaults[name]!r} by default" if name in defaults else f"{kind.__name__} has no such argument"
        yield Fact((*at, name), f"{name} {stated[name]}", against=known, final=True)
    text = inspect.getsource(sys.modules[kind.__module__])
    for name, value in stated.items():
        if name not in odd and isinstance(value, str) and f'"{value}"' not in text:
            odd.append(name)
            yield Fact((*at, name), f"{name} {value}", against=f"{kind.__name__} knows no such word", final=True)
    if not odd:
        yield _steps(kind, stated, at)
        for name, value in stated.items():
            by = _shown(source, kind, name, value)
            against, number = f"{kind.__name__} has {defaults[name]!r} by default", value if is_number(value) else None
            yield Fact((*at, name), f"{name} {value}", by, against, value=number)


def _alike(default: Any, value: Any) -> bool:
    """Whether a value is of the kind of an argument's default."""
    if default is None:
        return True
    return is_number(value) if is_number(default) else type(default) is type(value)


def _steps(kind: Any, stated: Mapping[str, Any], where: Where) -> Fact:
    """That the scheduler can be made, and comes down from noise step by step."""
    said = f"the scheduler of {', '.join(stated)}"
    try:
        made = kind(**stated)
        taken = inspect.signature(made.set_timesteps).parameters
        made.set_timesteps(_STEPS, **({"mu": 1.0} if "mu" in taken and stated.get("use_dynamic_shifting") else {}))
    except Exception as error:
        return Fact(where, said, against=f"{type(error).__name__}: {error}", final=True)
    times = made.timesteps.tolist()
    if not times or times != sorted(times, reverse=True) or times[0] == times[-1]:
        return Fact(where, said, against=f"its steps are {times}", final=True)
    return Fact(where, said, "the scheduler's class")


def _shown(source: PipelineSource, kind: Any, name: str, value: Any) -> str:
    """What shows an argument of the scheduler; empty where nothing does."""
    if value in source.example.get(name, ()):
        return "the pipeline's example"
    if _of_single_files(source, kind).get(name, ...) == value:
        return "diffusers' schedulers of single files"
    if name == "use_dynamic_shifting" and value is True and re.search(r"\bmu=mu\b", source.text):
        return "the pipeline's call"
    shift = _shift_defaults(source.text)
    if value == shift.get(_SHIFTS.get(name, ""), ...):
        return "the pipeline's call"
    default = inspect.signature(kind.__init__).parameters[name].default
    return "the scheduler's class" if value == default else ""


def _of_single_files(source: PipelineSource, kind: Any) -> Mapping[str, Any]:
    """What diffusers makes the scheduler of a single file of; of pipelines that take any scheduler."""
    from diffusers.loaders.single_file_utils import SCHEDULER_DEFAULT_CONFIG

    any_one = any(part.__name__ == "KarrasDiffusionSchedulers" for part in source.parts.get("scheduler", ()))
    known: dict[str, Any] = dict(SCHEDULER_DEFAULT_CONFIG) if any_one and hasattr(kind, "config_name") else {}
    return known


@lru_cache(maxsize=64)
def _shift_defaults(text: str) -> dict[str, float]:
    """The defaults of a module's function that computes a shift from a picture's size."""
    function = re.search(r"def calculate_shift\((.*?)\):", text, re.DOTALL)
    arguments = re.findall(r"(\w+): \w+ = ([\d.]+)", function[1]) if function is not None else ()
    return {name: float(value) for name, value in arguments}
