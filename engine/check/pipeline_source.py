"""What diffusers says of a pipeline: what it is made of, what calling it takes, and what its own example gives it."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from slipcast.engine.pipeline.classes import is_modular, own_arguments, pipeline_class
from slipcast.registry.errors import SlipcastError

_GIVEN = re.compile(r"\b(\w+)`{0,2}\s*=\s*`{0,2}(-?\d+(?:\.\d+)?|True|False)\b")
_HEADS = ("ForCausalLM", "ForConditionalGeneration")
_ANY = ("AutoTokenizer", "AutoProcessor", "AutoModel", "PreTrainedModel", "PreTrainedTokenizer")


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline of diffusers.

    Attributes:
        kind: its class.
        parts: its components, and of each the classes that it may be; none where nothing says so.
        call: the arguments of its call, and their defaults.
        example: what the example of its module gives arguments, of the call or of the scheduler.
        text: its module's source.
        examples: that example, and the class's description.
    """

    kind: Any
    parts: Mapping[str, tuple[Any, ...]]
    call: Mapping[str, Any]
    example: Mapping[str, frozenset[float | bool]]
    text: str
    examples: str

    def shows(self, argument: str, value: float) -> str:
        """What shows that an argument of the call is this number; empty where nothing does."""
        default = self.call.get(argument)
        if is_number(default) and default == value:
            return "the pipeline's own defaults"
        return "the pipeline's example" if value in self.example.get(argument, ()) else ""

    def admits(self, role: str, ours: Any) -> bool | None:
        """Whether a class may be this component; None where the pipeline does not say what it is."""
        kinds = self.parts.get(role)
        return None if not kinds else any(_admits(kind, ours) for kind in kinds)


@lru_cache(maxsize=256)
def pipeline_source(name: str | None) -> PipelineSource | None:
    """The pipeline of this name; None where diffusers has none."""
    try:
        kind = pipeline_class(name) if name is not None else None
    except SlipcastError:
        return None
    if kind is None:
        return None
    module = sys.modules[kind.__module__]
    text = inspect.getsource(module)
    examples = f"{getattr(module, 'EXAMPLE_DOC_STRING', '')}\n{kind.__doc__ or ''}"
    given: dict[str, set[float | bool]] = defaultdict(set)
    for argument, value in _GIVEN.findall(examples):
        given[argument].add(value == "True" if value in ("True", "False") else float(value))
    return PipelineSource(
        kind,
        dict(_modular_parts(kind) if is_modular(kind) else _parts(kind)),
        dict(_modular_call(kind) if is_modular(kind) else _call(kind)),
        {argument: frozenset(values) for argument, values in given.items()},
        text,
        examples,
    )


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parts(kind: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, parameter in own_arguments(kind).items():
        yield name, tuple(_classes(parameter.annotation))


def _classes(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if annotation not in (type(None), inspect.Parameter.empty):
            yield annotation
    else:
        for inner in typing.get_args(annotation):
            yield from _classes(inner)


def _modular_parts(kind: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, spec in kind()._component_specs.items():
        yield name, tuple(_classes(spec.type_hint))


def _call(kind: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(kind.__call__).parameters.items():
        yield name, parameter.default


def _modular_call(kind: Any) -> Iterator[tuple[str, Any]]:
    """What its blocks take, and what its guider is made of: the call has arguments of neither by name."""
    made = kind()
    for given in made.blocks.inputs:
        if given.name is not None:
            yield given.name, given.default
    guider = made._component_specs.get("guider")
    yield from (guider.config or {}).items() if guider is not None else ()


def _admits(kind: Any, ours: Any) -> bool:
    name, own = kind.__name__, ours.__name__
    if name in _ANY or own.removesuffix("Fast") == name.removesuffix("Fast"):
        return True
    if name == "KarrasDiffusionSchedulers":
        return own in kind.__members__
    if issubclass(ours, kind):
        return True
    config = getattr(kind, "config_class", None)
    return name.endswith(_HEADS) and config is not None and config is getattr(ours, "config_class", None)
