"""What a saved model's config.json says of its quantised layers: slipcast's own is followed, others' refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.quantised_model import CONFIG_VERSION, QUANT_METHOD
from slipcast.registry.errors import ConfigError, UnsupportedFormatError
from slipcast.registry.header import Header

_COMPUTE_DTYPES = frozenset({"bfloat16", "float16", "float32"})


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
        ConfigError: the description can't be read.
    """
    described = (header.config or {}).get("quantization_config")
    if described is None:
        return SavedQuantisation()
    if not isinstance(described, Mapping):
        raise _unreadable(header, type(described).__name__)
    method = described.get("quant_method")
    if method != QUANT_METHOD:
        raise UnsupportedFormatError(
            f"a model that was quantised with the method {method!r}, as its config.json says",
            expected=f"a plain model, or one that slipcast saved ({QUANT_METHOD})",
            hint=f"load it with diffusers and the library behind {method}",
            path=header.path,
        )
    if described.get("version") != CONFIG_VERSION:
        raise UnsupportedFormatError(
            f"a model saved in version {described.get('version')!r} of the description of quantised layers",
            expected=f"version {CONFIG_VERSION}",
            hint="a newer slipcast wrote it: upgrade",
            path=header.path,
        )
    return _read(header, described)


def _read(header: Header, described: Mapping[str, Any]) -> SavedQuantisation:
    modules, dtype = described.get("modules"), described.get("compute_dtype")
    if not isinstance(modules, Mapping) or dtype not in _COMPUTE_DTYPES:
        raise _unreadable(header, f"modules {type(modules).__name__}, compute_dtype {dtype!r}")
    codecs = {str(path): codec_named(str(name)) for path, name in modules.items()}
    return SavedQuantisation(MappingProxyType(codecs), dtype)


def _unreadable(header: Header, what: str) -> ConfigError:
    return ConfigError(
        f"a quantization_config that can't be read: {what}",
        expected="modules (path: codec) and compute_dtype, as save_pretrained of a loaded model writes them",
        hint="save the model again",
        path=header.path,
    )
