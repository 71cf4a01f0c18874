"""How a model is best run, and how pictures are sampled with it: what an application need not know by heart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import (
    Field,
    JsonValue,
    model_validator,
)

from slipcast.registry.forms import of_form
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.keymap.place import Place, index_value, parse_place
from slipcast.registry.section import FROZEN, Section, Several, Text
from slipcast.registry.validation import mistake

_Argument = Annotated[str, *of_form(r"^[a-z][a-z0-9_]*$", "the name of an argument")]
_Arguments = Annotated[Mapping[_Argument, JsonValue], *FROZEN]
_Widths = Annotated[Mapping[_Argument, _Argument], *FROZEN]
_Words = Annotated[Mapping[_Argument, Several[Text]], *FROZEN]
_Pipeline = Annotated[str, *of_form(r"^[A-Z][A-Za-z0-9]*$", "the name of a pipeline's class, without its library")]


class Offload(Section):
    """The repeated blocks of a model, as lists."""

    blocks: Several[Text] = Field(min_length=1)
    """The module lists that hold the blocks, as places in the model's names: `layers`, `{s=a|b}.{i}.resnets`."""

    def block_of(self, name: str) -> str | None:
        """Path of the block that a tensor or module of the model lies in, the outermost one; None where in none."""
        segments = tuple(name.split("."))
        counts = [len(place.segments) + 1 for place in self._places if place.takes(segments)]
        count = min((count for count in counts if count <= len(segments)), default=None)
        if count is None or index_value(segments[count - 1]) is None:
            return None
        return ".".join(segments[:count])

    @cached_property
    def _places(self) -> tuple[Place, ...]:
        return tuple(parse_place(text) for text in self.blocks)


class Compile(Section):
    """The repeated blocks of a model, as classes: `{blocks: [...]}`, or `{unsupported: why}`."""

    blocks: Several[Text] = ()
    """The blocks' classes."""

    unsupported: str = ""
    """Why blocks can't be compiled; empty where they can."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Compile:
        if bool(self.blocks) == bool(self.unsupported):
            found = "blocks and a reason against compiling them" if self.blocks else "neither blocks nor a reason"
            raise mistake(
                found, "{blocks: [...]} or {unsupported: why}", "name the blocks' classes, or say why they can't be"
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        found = handler.resolve_ref_schema(handler(schema))
        found["oneOf"] = [{"required": ["blocks"]}, {"required": ["unsupported"]}]
        return found


class Runtime(Section):
    """How the model is best run."""

    compile: Compile | None = None
    """The classes of blocks that are compiled one by one, since they repeat; or why they can't be."""

    offload: Offload | None = None
    """The lists of blocks that are moved to the device one by one where memory is short."""

    activation_bytes_per_token: float | None = Field(default=None, ge=0)
    """Measured peak of activations in bytes for each token of the sequence; left out where nobody measured it."""

    decode_bytes_per_pixel: float | None = Field(default=None, ge=0)
    """Of a VAE: measured peak of activations in bytes for each pixel that it decodes at a time."""

    encode_bytes_per_pixel: float | None = Field(default=None, ge=0)
    """Of a VAE: measured peak of activations in bytes for each pixel that it encodes at a time."""

    frames_at_once: int | None = Field(default=None, ge=1)
    """Of a VAE: frames of a video that it works on at a time; left out of one that takes all of them."""


class Sampling(Section):
    """What pictures are sampled with; of a variant what differs from its family."""

    pipeline: _Pipeline | None = None
    """The diffusers pipeline."""

    image_to_image: _Pipeline | None = None
    """The diffusers pipeline that starts from a picture; made of the same components."""

    denoiser: _Argument = "transformer"
    """The pipeline's argument for the denoiser."""

    arguments: _Arguments = Field(default_factory=FrozenMapping)
    """The pipeline's arguments that are no components, such as `{is_distilled: true}`."""

    experts: _Words = Field(default_factory=FrozenMapping)
    """Of two denoisers of one class, by role: words in the names of their files, as no tensor tells them apart."""

    optional: Several[_Argument] = ()
    """Companions that the pipeline does without, by role."""

    scheduler: _Arguments | None = None
    """The scheduler's arguments, as published with the weights. Left out, or null in a variant, where no source states
    them: a scheduler is then made from a file alone."""

    negative_prompt: str | None = None
    """What pictures are guided away from where nobody says; left out where the pipeline has a value of its own."""

    steps: int | None = Field(default=None, ge=1)
    """Number of denoising steps."""

    guidance: float | None = Field(default=None, ge=0, strict=False)
    """Strength of guidance."""

    guidance_argument: _Argument | None = None
    """The argument of the pipeline that takes the strength."""

    latent_channels: int | None = Field(default=None, ge=1)
    """Channels of the latents that the VAE decodes, before any packing into patches."""

    takes: _Widths = Field(default_factory=FrozenMapping)
    """Arguments of the denoiser's class that say how wide a companion's output is, by role: the hidden states of a text
    encoder, the latents of a VAE before any packing: `{text_encoder: cap_feat_dim, vae: in_channels}`."""

    latent_scale: int | None = Field(default=None, ge=1)
    """Pixels for each latent, along width and height."""

    frame_rate: float | None = Field(default=None, gt=0, strict=False)
    """Frames for each second of a video."""

    size_multiple: int | None = Field(default=None, ge=1)
    """Pixels of which width and height are multiples."""

    latent_frames: int | None = Field(default=None, ge=1)
    """Frames of a video for each frame of its latents, after the first one; left out of families that draw pictures."""

    def joined(self, other: Sampling) -> Sampling:
        """These facts with those that another section, of a variant, says otherwise."""
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})
