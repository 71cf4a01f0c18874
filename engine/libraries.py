"""The libraries whose classes are made here: diffusers is always there, transformers comes with an extra."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

LIBRARIES = ("diffusers", "transformers")
_EXTRA = (
    "transformers is not installed, and pipelines and text encoders need it: pip install 'slipcast[pipelines]', or in "
    "a clone pip install '.[pipelines]'"
)


def import_library(name: str) -> ModuleType | None:
    """The module of one of ``LIBRARIES``; None of any other, and where it is not installed."""
    return importlib.import_module(name) if name in LIBRARIES and importlib.util.find_spec(name) is not None else None


def install_hint(otherwise: str) -> str:
    """What to do where a class is not there: install transformers if that is absent, else ``otherwise``."""
    return otherwise if importlib.util.find_spec("transformers") is not None else _EXTRA
