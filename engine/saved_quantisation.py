"""What a saved model's config.json says of its quantised layers: slipcast's own is followed, others' refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.quantised_model import CONFIG_VERSION, QUANT_METHOD
from slipcast.registry.errors import ConfigError, SlipcastError, UnsupportedFormatError
from slipcast.registry.header import Header
from slipcast.registry.saved_layers import FULL_PRECISION

_FIELD = "quantization_config"


def _known_codec(name: str) -> str:
    try:
        codec_named(name)
    except SlipcastError:
        raise ValueError(f"the codec name {name[:40]!r} is unknown") from None
    return name


class _Description(BaseModel):
    """What ``description`` of the engine writes, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    quant_method: Literal["slipcast"]
    version: int
    compute_dtype: Literal["bfloat16", "float16", "float32"]
    modules: dict[str, Annotated[str, AfterValidator(_known_codec)]]
    full_precision_matrix_mult: list[str] = []


@dataclass(frozen=True, slots=True)
class SavedQuantisation:
    """How ``save_pretrained`` of a loaded model left its layers.

    Attributes:
        codecs: dotted path of a layer -> its codec.
        compute_dtype: torch's name of the dtype that the model computed in.
    """

    codecs: Mapping[str, Codec] = field(default_factory=lambda: MappingProxyType({}))
    compute_dtype: str | None = None

    @property
    def nvfp4_layout(self) -> str | None:
        """The byte layout of its nvfp4 layers, if it has some: they were read from one file."""
        return next((codec.layout for codec in self.codecs.values() if isinstance(codec, NVFP4)), None)


def saved_quantisation(header: Header) -> SavedQuantisation:
    """Read the description in a folder's config.json; empty where it has none.

    Raises:
        UnsupportedFormatError: the model was quantised by another library, or by a newer version.
        ConfigError: the description is not one that slipcast writes, or names layers that are not there.
    """
    described = (header.config or {}).get(_FIELD)
    if described is None:
        return SavedQuantisation()
    if not isinstance(described, Mapping):
        raise _unreadable(header, [f"{_FIELD}: it is a {type(described).__name__}, not an object"])
    method = described.get("quant_method")
    if method != QUANT_METHOD:
        raise UnsupportedFormatError(
            f"a model that was quantised with the method {str(method)[:80]!r}, as its config.json says",
            expected=f"a plain model, or one that slipcast saved ({QUANT_METHOD})",
            hint=f"load it with diffusers and the library behind {str(method)[:80]}",
            path=header.path,
        )
    version = described.get("version")
    if type(version) is int and version > CONFIG_VERSION:
        raise UnsupportedFormatError(
            f"a model saved in version {version} of the description of quantised layers",
            expected=f"version {CONFIG_VERSION}",
            hint="a newer slipcast wrote it: upgrade",
            path=header.path,
        )
    return _read(header, described)


def _read(header: Header, described: Mapping[str, Any]) -> SavedQuantisation:
    try:
        description = _Description.model_validate(dict(described))
    except ValidationError as error:
        raise _unreadable(header, [_problem(each) for each in error.errors()]) from error
    codecs = {path: codec_named(name) for path, name in description.modules.items()}
    problems = [f"{_FIELD}.version: {description.version}, which never was"] * (description.version != CONFIG_VERSION)
    problems += [
        f"{_FIELD}.modules.{path}: the files have no {path}.weight"
        for path in description.modules
        if f"{path}.weight" not in header.tensors
    ]
    problems += [
        f"{_FIELD}.{FULL_PRECISION}: {path} is none of the modules"
        for path in description.full_precision_matrix_mult
        if path not in description.modules
    ]
    problems += [
        f"{_FIELD}.modules: {tensor.name} is in int8, may be rotated, and is not among them"
        for tensor in header.tensors.values()
        if tensor.dtype == "I8" and len(tensor.shape) > 1 and tensor.name.removesuffix(".weight") not in codecs
    ]
    if problems:
        raise _unreadable(header, problems)
    return SavedQuantisation(MappingProxyType(codecs), description.compute_dtype)


def _problem(error: Any) -> str:
    """One of pydantic's errors as a line that begins with the field."""
    where = ".".join((_FIELD, *map(str, error["loc"])))
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


def _unreadable(header: Header, problems: list[str]) -> ConfigError:
    return ConfigError(
        f"a {_FIELD} that can't be read: {problems[0]}",
        expected="what save_pretrained of a loaded model writes: quant_method, version, compute_dtype, modules (path: "
        f"codec) and {FULL_PRECISION} (paths)",
        hint="save the model again, or put the config.json that was saved with these weights beside them; if a newer "
        "slipcast wrote it, upgrade",
        path=header.path,
        items=problems,
    )
