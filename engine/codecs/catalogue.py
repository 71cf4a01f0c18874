"""The codecs by name: how a plan, a report or a saved model refers to one."""

from __future__ import annotations

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.registry.errors import UnsupportedFormatError

CODECS: tuple[type[Codec], ...] = (Float8, Int8, MXFP8, NVFP4, GGUF)


def codec_named(name: str) -> Codec:
    """The codec whose ``name`` this is.

    Raises:
        UnsupportedFormatError: no codec has the name.
    """
    for kind in CODECS:
        codec = kind.from_name(name)
        if codec is not None:
            return codec
    raise UnsupportedFormatError(
        f"the codec name {name!r}",
        expected="a name that a codec of this version has, for example 'float8_e4m3fn/row'",
        hint="if a newer version wrote it, upgrade slipcast; otherwise correct the name",
    )
