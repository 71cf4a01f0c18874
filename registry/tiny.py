"""A small model of a family, and what to feed it: with it ``slipcast check`` proves what a header can't show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    model_validator,
)
from typing_extensions import TypeAliasType

from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.header import Shape
from slipcast.registry.section import Named, Section, Several, Text
from slipcast.registry.validation import mistake, shown

Kind = Literal["normal", "uniform", "ones", "true", "integers"]

MAX_ELEMENTS = 1 << 20
_RECIPE = r"(normal|uniform|ones|true|integers)(?: (\d{1,7}(?:x\d{1,7}){0,7}))?(?: < (\d{1,9}))?"
_FORM = re.compile(_RECIPE)
_BOUNDED = ("uniform", "integers")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor that an input is made of.

    Attributes:
        kind: floats: ``normal`` of mean 0 and deviation 1, ``uniform`` from 0 to the bound, ``ones``; ``integers`` of
            64 bits, from 0 to below the bound; ``true``, which are booleans.
        shape: its shape.
        bound: the end of the range; 1 where none is given.
    """

    kind: Kind
    shape: Shape
    bound: int = 1


def parse_recipe(text: str) -> Recipe:
    """Read a recipe such as ``normal 1x4x8x8``, ``uniform 2 < 1000`` or ``integers 1x7 < 99``.

    Raises:
        PydanticCustomError: it is none, or too large.
    """
    form = _FORM.fullmatch(text)
    if form is None or (form[3] and form[1] not in _BOUNDED) or (form[1] == "integers" and not form[3]):
        raise mistake(
            f"the input {shown(text)}",
            "a tensor and its shape: normal 1x4x8x8, uniform 2 < 1000, ones 2, true 1x7 or integers 1x7 < 99",
            "write it as one of these",
        )
    shape = tuple(int(size) for size in (form[2] or "").split("x") if size)
    if prod(shape) > MAX_ELEMENTS:
        raise mistake(f"an input of {prod(shape)} elements", f"at most {MAX_ELEMENTS}", "make the tensor smaller")
    kind: Any = form[1]
    return Recipe(kind, shape, int(form[3] or 1))


def _checked(text: str) -> str:
    parse_recipe(text)
    return text


_Text = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": f"^{_RECIPE}$"})]
_Number = bool | int | float
Input = TypeAliasType("Input", _Text | _Number | list["Input"] | Mapping[str, "Input"] | None)  # type: ignore[misc]


class Also(Section):
    """Another small model of the class. It is built, never run."""

    config: Named[JsonValue] = Field(default_factory=FrozenMapping)
    """Its arguments, where they differ from the first small model's; nested ones are joined."""

    beside: Named[Several[int]] = Field(default_factory=FrozenMapping)
    """Tensors that its file holds and nobody loads, native names and shapes."""


class Tiny(Section):
    """A small model of the family's class, which must run on a CPU in a moment."""

    config: Named[JsonValue]
    """Constructor arguments of the small model; what a header shows of them must be inferred as it stands here."""

    also: Several[Also] = ()
    """Other small models, for what the first can't show as well, such as the other branch of an expression."""

    inputs: Named[Input] = Field(default_factory=FrozenMapping)
    """Arguments of its forward: numbers, lists, mappings, and tensors by recipe: `normal 1x4x8x8`."""

    not_alone: str = ""
    """Why the class does not run by itself, in place of `inputs`; its forward is then not proven."""

    converter_differs: Named[Text] = Field(default_factory=FrozenMapping)
    """Tensors or modules, in the model's names, that diffusers' converter puts elsewhere or makes otherwise, each with
    the reason why the key map is right."""

    fp8_error: float = Field(gt=0, lt=1)
    """Largest relative L2 distance between its outputs in fp8, stored or multiplied in it, and in float32."""

    @property
    def configs(self) -> tuple[Mapping[str, JsonValue], ...]:
        """The arguments of every small model, those of the first first."""
        return (self.config, *(_joined(self.config, other.config) for other in self.also))

    @model_validator(mode="after")
    def _runs_or_says_why_not(self) -> Tiny:
        if bool(self.inputs) == bool(self.not_alone):
            raise mistake(
                "inputs and a reason against running" if self.inputs else "neither inputs nor a reason against running",
                "inputs: {...}, or not_alone: why",
                "write the arguments of the forward, or say why the class does not run by itself",
            )
        return self


def _joined(config: Mapping[str, JsonValue], other: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Arguments with others laid over them."""
    joined = {**config, **other}
    for key, value in other.items():
        under = config.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            joined[key] = _joined(under, value)
    return joined
