"""Converts small checkpoints and looks at what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

import slipcast
from slipcast.engine.convert import Converted, convert
from slipcast.engine.wanted import Wanted
from slipcast.registry.catalogue import Catalogue, load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.family import Family
from slipcast.registry.identify import Match, identify
from support.quantised_cases import is_close
from support.quantised_checkpoints import QuantisedFile

_WANTED = ("format", "spelling", "scale", "remainder")


def match_of(path: Path, catalogue: Mapping[str, Family] | None = None) -> Match:
    """The model that a path holds."""
    return identify(read_checkpoint(path), Catalogue(catalogue) if catalogue else load_catalogue())[0]


def converted(
    path: Path, out: Path, layout: str | None = None, catalogue: Mapping[str, Family] | None = None, **options: Any
) -> Converted:
    """Convert a checkpoint; what is wanted of its weights is given by name, as the rest is."""
    wanted = Wanted(**{key: options.pop(key) for key in _WANTED if key in options})
    return convert(match_of(path, catalogue), out, layout, wanted=wanted, **options)  # type: ignore[arg-type]


def metadata_of(path: Path) -> dict[str, Any]:
    """A file's metadata."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def described_layers(path: Path) -> dict[str, Any]:
    """What a file's metadata says of its layers."""
    return json.loads(metadata_of(path)["_quantization_metadata"])["layers"]  # type: ignore[no-any-return]


def check_values(path: Path, file: QuantisedFile) -> None:
    """Hold every weight of a written file against what an independent decoder makes of the first one."""
    loaded = slipcast.load(path, device="cpu", dtype="float32", fp8="off")
    assert loaded.report.differences == ()
    held = loaded.model.state_dict()
    assert [key for key, tensor in file.expected().items() if not is_close(held[key], tensor)] == []
