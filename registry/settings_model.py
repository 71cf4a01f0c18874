"""All settings and their types. The defaults stand in configs/defaults.yaml and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from slipcast.registry.forms import of_form
from slipcast.registry.section import Named, Section, Several, Text

SCHEMA_VERSION = 1
PROJECT_FILE = "slipcast.yaml"
"""Name of a project's settings file."""

_CARD = r"cuda:\d{1,2}\.\d, *\d+(\.\d+)? *(GiB|GB|MiB)"
Device = Annotated[
    str,
    *of_form(
        rf"^(auto|cpu|cuda|cuda:\d+|xpu|mps|{_CARD})$",
        "auto, cpu, cuda, cuda:N, xpu, mps, or for plans a card that is not there by its compute capability and "
        "memory in GiB, GB or MiB: cuda:8.6,12GiB",
    ),
]


class Fp8Settings(Section):
    """Weights in 8 bits. A bare word stands for the mode: `fp8: storage`."""

    BARE_WORD: ClassVar[str] = "mode"

    mode: Literal["auto", "off", "storage", "compute"]
    """auto: a checkpoint in fp8 stays as it is. off: weights in the compute dtype. storage: weights in float8_e4m3fn
    with a scale for each output row. compute: as storage, and products on the GPU's fp8 cores where it has them."""

    weights: Literal["float8", "nvfp4"]
    """What a weight is quantised to: float8_e4m3fn with a scale for each row, or nvfp4, which takes half the bytes."""

    remainder: Literal["keep", "quantise"]
    """Whether layers that a partly quantised checkpoint left alone are stored in fp8 as well."""

    hints: Literal["follow", "ignore"]
    """Whether layers that a checkpoint's producer marks for full precision multiply in the compute dtype."""

    least_features: int = Field(ge=0)
    """Fewest inputs, and fewest outputs, of a layer that multiplies in float8. Narrower ones are faster in storage."""


class CompanionSettings(Section):
    """Where a pipeline's parts lie, by its own names. A bare word stands for the folder: `companions: FOLDER`."""

    BARE_WORD: ClassVar[str] = "folder"

    folder: Text | None
    """A diffusers folder for whatever else does not give."""

    transformer_2: Text | None
    """The second denoiser of pipelines that have two."""

    text_conditioner: Text | None
    """What stands between text encoder and denoiser."""

    text_encoder: Text | None
    """The text encoder, or the first of several."""

    text_encoder_2: Text | None
    """The second text encoder."""

    text_encoder_3: Text | None
    """The third text encoder."""

    text_encoder_4: Text | None
    """The fourth text encoder."""

    vae: Text | None
    """The VAE."""

    tokenizer: Text | None
    """The tokenizer of the first text encoder."""

    tokenizer_2: Text | None
    """The tokenizer of the second text encoder."""

    tokenizer_3: Text | None
    """The tokenizer of the third text encoder."""

    tokenizer_4: Text | None
    """The tokenizer of the fourth text encoder."""

    t5_tokenizer: Text | None
    """A second tokenizer for the same prompt."""

    processor: Text | None
    """The processor of a text encoder that takes pictures too."""

    scheduler: Text | None
    """The scheduler."""


class VaeSettings(Section):
    """How the VAE of a pipeline encodes and decodes."""

    tiling: Literal["auto", "on", "off"]
    """Overlapping tiles, which differ near their seams. auto: where the whole picture does not fit."""

    slicing: Literal["auto", "on", "off"]
    """One picture of a batch after another. auto: where the batch does not fit."""

    tile_size: int = Field(ge=0)
    """Pixels of a tile along each side; 0 is what the VAE has by itself."""


class Settings(Section):
    """The settings of one load, complete: every layer has been laid over the defaults."""

    schema_version: Literal[1]
    """Version of the settings; leave it out to mean the newest."""

    preset: Text | None
    """A named choice of settings: low-memory, exact, the path of a YAML file, or null."""

    device: Device
    """auto, cpu, cuda, cuda:N, xpu, mps, or for plans a card that is not there: cuda:8.6,12GiB."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    """The dtype that the model computes in; auto follows the checkpoint and the family."""

    fp8: Fp8Settings
    """Weights in 8 bits."""

    compile: Literal["auto", "off", "blocks", "max"]
    """Whether torch compiles the blocks that repeat in a model when they are first called. auto: as a pipeline's speed
    says, else not. off: nothing is compiled. blocks: each kind once, for all widths and heights. max: kernels are also
    chosen by measurement, for each size anew."""

    mmap: bool
    """Whether weights that need no cast stay in the memory-mapped file when the model is on the CPU."""

    reader: Literal["auto", "prefetch", "slabs"]
    """How a checkpoint comes to a GPU. prefetch: by safetensors' own reading ahead, where the installed version has it.
    slabs: through page-locked buffers. auto: prefetch where it can be, else slabs."""

    unexpected: Several[Text]
    """Globs on the names of tensors that may be left over."""

    family: Text | None
    """Id of the family to read the checkpoint as, or null to recognise it."""

    component: Text | None
    """Which model to take where a file or a folder holds several, or null for the denoiser."""

    families: Several[Text]
    """Folders of more family files, read beside the built-in ones."""

    companions: CompanionSettings
    """Where a pipeline's parts lie that are not found by themselves."""

    device_reserve_mib: int = Field(ge=0)
    """Memory in MiB of a device that is left alone, for the runtime and for what fragments; a twentieth of the device's
    memory is left in any case. Plans of single models and of pipelines both count so."""

    chunk_mib: int | None = Field(ge=1)
    """Size in MiB of the pieces in which rows are cast, counted in float32; null: 6 on the CPU, on other devices 32 to
    160, by how the file is read and by its dtypes."""

    threads: int | None = Field(ge=1)
    """How many threads read, and on the CPU also cast, a piece each; null: as many as torch uses, 8 at most."""

    ahead_mib: int | None = Field(ge=1)
    """Most MiB of the file that lie on a GPU beside the result while they are read ahead and cast; null: 720 with
    prefetch, 32 for each slab."""

    header_limit_mib: int = Field(ge=1)
    """Largest header in MiB that is read from a file."""

    memory: Literal["auto", "fast", "balanced", "low"]
    """Where the models of a pipeline lie while it runs. auto, fast: all on the device if they fit. balanced: the
    denoiser's blocks come one by one. low: everything comes to the device only while it is used."""

    vae: VaeSettings
    """How a pipeline's VAE runs: in tiles, in slices."""

    text_encoder: Literal["auto", "bf16", "fp8", "nvfp4"]
    """What the weights of a pipeline's text encoders are kept in; auto leaves them as their files have them."""

    speed: Literal["off", "default", "max"]
    """How far a pipeline is sped up. off: the same bits as diffusers. default: compiled blocks, VAE in channels-last.
    max: TF32 and fused projections as well."""

    models: Named[Mapping[str, Any]]
    """Settings for single checkpoints, by file name, or by a glob on the file's name or full path."""


NOT_PER_MODEL = frozenset({"schema_version", "preset", "models"})
"""Settings that an entry of ``models`` can't have: they decide which entries there are."""

PATHS = frozenset({"families", *(f"companions.{role}" for role in CompanionSettings.model_fields)})
"""Settings that hold files or folders, relative to the file that names them."""


def sections() -> dict[str, type[BaseModel]]:
    """The settings that are groups of settings."""
    fields = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def setting_names() -> tuple[str, ...]:
    """Every setting by its dotted name, in the order of the model."""
    groups = sections()
    return tuple(
        dotted
        for name in Settings.model_fields
        for dotted in ([f"{name}.{inner}" for inner in groups[name].model_fields] if name in groups else [name])
    )
