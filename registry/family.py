"""What a family file says, as frozen models; the descriptions are what editors show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    JsonValue,
    PrivateAttr,
    StringConstraints,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType

from slipcast.registry.forms import of_form
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.precision import Precision
from slipcast.registry.runtime import Runtime, Sampling
from slipcast.registry.section import FROZEN, Named, Section, Several, Text, Word
from slipcast.registry.tiny import Tiny
from slipcast.registry.validation import did_you_mean, mistake

if TYPE_CHECKING:
    from slipcast.registry.keymap.key_map import KeyMap

SCHEMA = 1

_ID = r"[a-z0-9]+([.-][a-z0-9]+)*"
_CLASS = r"(diffusers|transformers)\.[A-Z][A-Za-z0-9_]*"
_ID_FORM = "an id: small letters and digits, parted by dots or hyphens"
_CLASS_FORM = "a class: diffusers.Name or transformers.Name"
Id = Annotated[str, *of_form(f"^{_ID}$", _ID_FORM)]
ClassName = Annotated[str, *of_form(f"^{_CLASS}$", _CLASS_FORM)]
Companion = Annotated[str, *of_form(f"^({_ID}(/{_ID})?|{_CLASS})$", f"{_ID_FORM}, or ID/VARIANT; or {_CLASS_FORM}")]
FileStem = Annotated[
    str,
    *of_form(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "a record's name without .json: letters, digits, dots, hyphens and underscores",
    ),
]
NATIVE_NAMES, MODEL_NAMES = "native", "diffusers"
NamingName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
KeyEntry = TypeAliasType("KeyEntry", Text | int | Mapping[str, "KeyEntry"])  # type: ignore[misc]


class Evidence(Section):
    """What speaks for a family or a variant, in the file's native names and logical shapes."""

    has: Several[Text] = ()
    """Tensors, or beginnings of names up to a dot, that must be there."""

    hasnt: Several[Text] = ()
    """Tensors, or beginnings of names up to a dot, that must not be there."""

    where: Several[Text] = ()
    """Conditions on shapes that must hold, for example `size(x_embedder.weight, 0) == 3840`."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """All names that must not be there."""
        return self.hasnt


class Identify(Evidence):
    """By what the family is recognised. No other family may claim a file that this one claims."""

    has: Several[Text] = Field(min_length=1)
    """Tensors, or beginnings of names up to a dot, that must be there; at least one a name that `keys` changes."""

    relatives: Annotated[Mapping[str, Text], *FROZEN] = Field(default_factory=FrozenMapping)
    """Names that must not be there, as they are those of a model that the class can't hold: its title."""

    @property
    def excluded(self) -> tuple[str, ...]:
        """All names that must not be there."""
        return (*self.hasnt, *self.relatives)


class Variant(Evidence):
    """One variant of the family. What tensors show goes before a word in the file's name, that before the default."""

    guess_from_filename: Several[Text] = ()
    """Words whose occurrence in the file's name, in any case, suggests this variant. Reported as a guess. Beside
    `has`, `hasnt` or `where` one of them must occur as well; such a variant goes before what tensors alone show."""

    default: bool = False
    """Whether this variant is assumed where nothing shows or suggests one. Reported as a guess."""

    sampling: Sampling = Field(default_factory=Sampling)
    """What it samples with, where it differs from the family."""

    config: Named[JsonValue] = Field(default_factory=FrozenMapping)
    """Constructor arguments that this variant has otherwise; they join the family's or replace them."""

    model: ClassName | None = None
    """The class that is built, where it is another than the family's; its names and shapes must be the same."""

    companions: Named[Companion] = Field(default_factory=FrozenMapping)
    """What a pipeline needs otherwise for this variant; entries join the family's or replace them."""

    @model_validator(mode="after")
    def _can_be_chosen(self) -> Variant:
        if not (self.has or self.hasnt or self.where or self.guess_from_filename or self.default):
            raise mistake(
                "a variant that nothing chooses",
                "has, hasnt, where, guess_from_filename or default",
                "say by what it is recognised, or remove it",
            )
        return self


class Serves(Section):
    """How a model takes the place of one of another family that has it inside, and more that its files lack."""

    inside: Text
    """The module of the other class that this model becomes."""

    identity: Several[Text] = ()
    """Linear layers of the other class whose weight is then the identity."""


class Naming(Section):
    """Other names that files of the family bear; each name for a name of the model's."""

    architectures: Several[Text] = ()
    """What `general.architecture` of a GGUF file must be, one of these; left out where any file may bear the names."""

    keys: Named[KeyEntry]
    """Name in the file, and what it is in the model's names: as in `keys`, but without sums, arithmetic and views."""

    drop: Named[Text] = Field(default_factory=FrozenMapping)
    """Tensors of such a file that no model needs, each with the reason."""


class Expect(Section):
    """What a recorded header must be recognised as."""

    layout: NamingName | None = None
    """Whose names it bears: `native`, `diffusers` (the model's), or one of `namings`; left out where the family's names
    and the model's are the same."""

    format: Word
    """The format of its quantised weights (`fp8_scaled`, `nvfp4`, ...), or `plain` where it has none."""

    variant: str | None = None
    """The variant that must be chosen; left out where it doesn't matter."""


class Example(Section):
    """A recorded header; this family must claim it, and no other may."""

    header: FileStem
    """Name of a file in tests/data/headers, without `.json`."""

    expect: Expect
    """What the header must be recognised as."""

    config: FileStem | None = None
    """Name of a file in tests/data/model_configs, without `.json`: the configuration that was published with the
    weights, which what is inferred from the header must equal."""


class Family(Section):
    """One model class, and everything that is particular to the checkpoints that hold it."""

    schema_version: Literal[1] = Field(alias="schema")
    """Version of the language of family files: 1."""

    id: Id
    """Short name for commands and settings; the file must be called `id.yaml`."""

    title: Text
    """The family's name as people write it."""

    kind: Literal["denoiser", "text_encoder", "vae", "controlnet"]
    """What part of a pipeline it is. A denoiser lies at the top, others in `text_encoders`, `vaes` or `controlnets`."""

    model: ClassName
    """The class that is built, `diffusers.Name` or `transformers.Name`."""

    extends: Id | None = None
    """A family to start from, which must not extend another. Entries of `let`, `config`, `keys` and `drop` join its
    entries or replace them; any other field that is given replaces its field whole."""

    prefixes: Several[str] = Field(default=("",), min_length=1)
    """What may stand before every name in a file, for example `model.diffusion_model.`; tried from long to short."""

    identify: Identify
    """By what the family is recognised."""

    variants: Named[Variant] = Field(default_factory=FrozenMapping)
    """Variants of the family that share this file."""

    let: Named[JsonValue] = Field(default_factory=FrozenMapping)
    """Helper values for `config`, in the same language; later ones may use earlier ones."""

    config: Named[JsonValue] = Field(default_factory=FrozenMapping)
    """Constructor arguments of the model class: constants, or expressions over the header's native names and shapes."""

    keys: Named[KeyEntry] = Field(default_factory=FrozenMapping)
    """The key map: name in the file, and what it is in the model's names. What has no entry keeps its name."""

    sources: Named[Text] = Field(default_factory=FrozenMapping)
    """Where names come from that no recorded header and no converter of diffusers shows, of `keys` and of
    `identify.hasnt`: a place in the file, spelt to its end, and its source. Of a name whose parts lie in an order that
    nothing shows, or that needs its operation for files of another shape, a beginning will do."""

    drop: Named[Text] = Field(default_factory=FrozenMapping)
    """Tensors of the file that no model needs, each with the reason. They need not occur."""

    contains: Named[Id] = Field(default_factory=FrozenMapping)
    """Parts of the file that another family describes: beginning of their names, and that family's id."""

    namings: Annotated[Mapping[NamingName, Naming], *FROZEN] = Field(default_factory=FrozenMapping)
    """Names that files bear beside the family's and the model's, such as those of llama.cpp."""

    precision: Precision
    """In which dtypes the family is stored and computed."""

    runtime: Runtime = Field(default_factory=Runtime)
    """How the model is best run."""

    sampling: Sampling | None = None
    """What pictures are sampled with; of a denoiser."""

    companions: Named[Companion] = Field(default_factory=FrozenMapping)
    """What a pipeline needs beside this model, by role: a family's id, after a slash the variant where only one will do
    (`ID/VARIANT`), or a class."""

    serves: Annotated[Mapping[Id, Serves], *FROZEN] = Field(default_factory=FrozenMapping)
    """Families whose place this one takes in a pipeline where no file of theirs is there, by id."""

    examples: Several[Example] = ()
    """Recorded headers that this family must claim, and no other."""

    tiny: Tiny | None = None
    """A small model of the class, for what a header can't prove: values, and precision."""

    _key_map: KeyMap = PrivateAttr()
    _naming_maps: Mapping[str, KeyMap] = PrivateAttr()
    _source: str = PrivateAttr(default="")
    _digest: str = PrivateAttr(default="")

    def config_of(self, variant: str | None) -> Mapping[str, JsonValue]:
        """The constructor arguments of a variant, or of the family where there is none."""
        return {**self.config, **self.variants[variant].config} if variant is not None else self.config

    def model_of(self, variant: str | None) -> str:
        """The class that is built for a variant, or for the family where there is none."""
        return self.model if variant is None else self.variants[variant].model or self.model

    @property
    def key_map(self) -> KeyMap:
        """The parsed key map."""
        return self._key_map

    @property
    def source(self) -> str:
        """The file that the family was read from; of a built-in family its name inside the package."""
        return self._source

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of what the file says, comments and spelling aside."""
        return self._digest

    @property
    def naming_maps(self) -> Mapping[str, KeyMap]:
        """The parsed key maps of ``namings``."""
        return self._naming_maps

    def key_map_of(self, layout: str | None) -> KeyMap:
        """What the names of a file in a layout are in the model's; None is ``native``."""
        if layout == MODEL_NAMES:
            return type(self._key_map)(contents=self._key_map.contents)
        return self._key_map if layout in (None, NATIVE_NAMES) else self._naming_maps[layout]

    def read_from(self, source: str, digest: str, key_map: KeyMap, naming_maps: Mapping[str, KeyMap]) -> Family:
        """This family with what reading its file adds to what the file says."""
        family = self.model_copy()
        family._source, family._digest, family._key_map = source, digest, key_map
        family._naming_maps = FrozenMapping(naming_maps)
        return family

    @field_validator("namings")
    @classmethod
    def _names_are_free(cls, namings: Mapping[str, Naming]) -> Mapping[str, Naming]:
        for name in (NATIVE_NAMES, MODEL_NAMES):
            if name in namings:
                raise mistake(f"a naming called {name!r}", "a name of its own", "name it after whose names they are")
        return namings

    @field_validator("variants")
    @classmethod
    def _one_default(cls, variants: Mapping[str, Variant]) -> Mapping[str, Variant]:
        defaults = [name for name, variant in variants.items() if variant.default]
        if len(defaults) > 1:
            raise mistake(f"{len(defaults)} default variants: {', '.join(defaults)}", "at most one", "choose one")
        return variants

    @model_validator(mode="after")
    def _examples_name_variants(self) -> Family:
        for example in self.examples:
            variant = example.expect.variant
            if variant is not None and variant not in self.variants:
                raise mistake(
                    f"the example {example.header} expects a variant {variant!r}",
                    f"one of {', '.join(self.variants) or 'no variants'}",
                    did_you_mean(variant, self.variants, "correct the example, or add the variant"),
                )
        return self

    @model_validator(mode="after")
    def _examples_name_layouts(self) -> Family:
        layouts = (NATIVE_NAMES, MODEL_NAMES, *self.namings)
        for example in self.examples:
            layout = example.expect.layout
            if layout is not None and layout not in layouts:
                raise mistake(
                    f"the example {example.header} expects the layout {layout!r}",
                    f"one of {', '.join(layouts)}",
                    did_you_mean(layout, layouts, "correct the example, or add the naming"),
                )
        return self
