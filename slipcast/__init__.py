"""Loads a diffusion checkpoint, whatever form it comes in, into a ready PyTorch model.

    import slipcast

    transformer = slipcast.load("model.safetensors", fp8="storage").model

``inspect`` says what a file is, ``plan`` what loading it would do, to the byte, and ``load`` does it. ``convert``
writes it in another naming or format, ``pipeline`` makes the whole diffusers pipeline around it, ``Session`` holds one
for an application, and ``check`` proves family files. Importing this package imports neither torch nor diffusers; all
but ``inspect`` do when they are used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("slipcast.registry") is None:
    # In a clone some packages lie beside this folder; only an installation puts them together.
    raise ImportError(
        f"slipcast is imported from its source folder, {__path__[0]}, which is not all of it and hides an installed "
        "one. Work in another folder, run python -P, or install the clone editable: pip install -e ."
    )

if TYPE_CHECKING:
    from slipcast.api import check, compute_dtype, convert, inspect, load, pipeline, plan, status
    from slipcast.engine.check.proof import CheckedFamily
    from slipcast.engine.convert import Converted
    from slipcast.engine.plan import Plan
    from slipcast.engine.report import Loaded, Report
    from slipcast.engine.session.session import Session
    from slipcast.registry.errors import SlipcastError
    from slipcast.registry.inspection import Inspection

__version__ = "0.1.0"
__all__ = [
    "CheckedFamily",
    "Converted",
    "Inspection",
    "Loaded",
    "Plan",
    "Report",
    "Session",
    "SlipcastError",
    "check",
    "compute_dtype",
    "convert",
    "inspect",
    "load",
    "pipeline",
    "plan",
    "status",
]

_HOMES = {
    "check": "slipcast.api",
    "compute_dtype": "slipcast.api",
    "convert": "slipcast.api",
    "inspect": "slipcast.api",
    "load": "slipcast.api",
    "pipeline": "slipcast.api",
    "plan": "slipcast.api",
    "status": "slipcast.api",
    "CheckedFamily": "slipcast.engine.check.proof",
    "Converted": "slipcast.engine.convert",
    "Plan": "slipcast.engine.plan",
    "Loaded": "slipcast.engine.report",
    "Report": "slipcast.engine.report",
    "Session": "slipcast.engine.session.session",
    "SlipcastError": "slipcast.registry.errors",
    "Inspection": "slipcast.registry.inspection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
