"""In which dtypes a family is stored and computed, and what must stay out of float8, as its file says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.section import FROZEN, Named, Section, Several, Text, Word
from slipcast.registry.validation import did_you_mean, mistake, nearest, shown

ROLES = (
    "time_embedding",
    "text_embedding",
    "modulation",
    "input_projection",
    "output_projection",
    "norm",
    "positional_embedding",
    "head",
    "other",
)


class Support(Section):
    """Whether a family can do something: `supported`, `{not_applicable: why}` or `{unsupported: why}`."""

    status: Literal["supported", "not_applicable", "unsupported"]
    """Not applicable: it would make no sense for these models. Unsupported: it might, but does not work."""

    reason: str = ""
    """Why not; empty where it is supported."""

    @property
    def supported(self) -> bool:
        """Whether it can be done."""
        return self.status == "supported"

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        if value == "supported":
            return {"status": value}
        if isinstance(value, Mapping) and len(value) == 1:
            status, reason = next(iter(value.items()))
            if status in ("not_applicable", "unsupported") and isinstance(reason, str) and reason:
                return {"status": status, "reason": reason}
        raise mistake(
            f"{shown(value)} in place of a statement about fp8",
            "supported, {not_applicable: why} or {unsupported: why}",
            "write one of these; a reason must be given",
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        excuses = [
            {
                "type": "object",
                "properties": {status: {"type": "string", "minLength": 1, "description": "Why not."}},
                "required": [status],
                "additionalProperties": False,
            }
            for status in ("not_applicable", "unsupported")
        ]
        return {"description": cls.__doc__, "oneOf": [{"const": "supported"}, *excuses]}


class Fp8(Section):
    """What float8_e4m3fn does to the family."""

    storage: Support
    """Whether weights may be kept in float8 with a float32 scale per output row, and used in the compute dtype."""

    compute: Support
    """Whether products may be made on float8 tensor cores."""

    activation_scale: Literal["row", "tensor"] = "row"
    """What one scale of the activations spans in float8 products: a row (one token) or the whole tensor."""


class Precision(Section):
    """In which dtypes the family is stored and computed."""

    compute: Literal["checkpoint", "bfloat16", "float16", "float32"] = "checkpoint"
    """Where the compute dtype comes from: the file's own unquantised weights, or one dtype for all files."""

    compute_default: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The compute dtype where the file shows none, as one whose weights are all in float8."""

    fp16: Literal["safe", "unsafe"]
    """`unsafe` where activations overflow in float16; it is then promoted to float32."""

    keep: Annotated[Mapping[Word, Several[Text] | Named[Text]], *FROZEN] = Field(default_factory=FrozenMapping)
    """Modules that are never stored in float8, by role, in the model's names: `{time_embedding: [t_embedder]}`, or each
    with the reason where the role does not say it: `{other: {router: its rows are compared with each other}}`."""

    forward_needs: Several[Text] = ()
    """Of these the modules without which the forward fails in float8, as it looks at their weight's dtype."""

    keep_fp32: Several[Text] = ()
    """Modules that stay in float32, in the model's names."""

    nvfp4_layout: Literal["comfy", "linear"] | None = None
    """How to read nvfp4 files in which nothing tells the byte layout: `comfy` has the high nibble first and swizzled
    scales, `linear` the low nibble first. Left out where no such file is known."""

    fp8: Fp8
    """What float8 does to the family. Never left out: where it does not work, say why."""

    @field_validator("keep")
    @classmethod
    def _roles_are_spelt_right(cls, keep: Mapping[str, Any]) -> Mapping[str, Any]:
        for role in keep:
            near = nearest(role, ROLES, likeness=0.8)
            if near not in (role, None):
                raise mistake(
                    f"the role {role!r}", f"one of {', '.join(ROLES)}, or another word", f"did you mean {near!r}?"
                )
        return keep

    @model_validator(mode="after")
    def _needed_is_kept(self) -> Precision:
        kept = {place for places in self.keep.values() for place in places}
        for place in self.forward_needs:
            if place not in kept:
                raise mistake(
                    f"forward_needs names {place!r}, which keep does not",
                    "entries of keep",
                    did_you_mean(place, kept, "add it to keep"),
                )
        return self
