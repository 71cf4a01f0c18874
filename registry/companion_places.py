"""The folders in which a pipeline's parts usually lie beside a denoiser's file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slipcast.registry.errors import SlipcastError
from slipcast.registry.untrusted_files import list_folder
from slipcast.registry.weight_files import is_weights

_SHELVES = ("text_encoders", "clip", "vae")
"""Where ComfyUI keeps text encoders and VAEs, beside the folder of denoisers."""
_LEVELS = 3
"""How many folders above a file are looked at for these; files are often sorted into folders of their own."""
_MOST_FILES = 500


def beside(path: Path) -> Iterator[tuple[Path, ...]]:
    """The files of weights that lie near a denoiser, place by place: its folder, then the shelves around it."""
    folder = path.parent
    yield weights_in(folder)
    for _ in range(_LEVELS):
        shelves = [shelf for name in _SHELVES if (shelf := named_folder(folder, name)) is not None]
        if shelves:
            yield tuple(file for shelf in shelves for file in (*weights_in(shelf), *_below(shelf)))
            return
        folder = folder.parent


def weights_in(folder: Path) -> tuple[Path, ...]:
    """The files of weights in a folder, at most 500; none where it can't be listed."""
    try:
        names = list_folder(folder)
    except SlipcastError:
        return ()
    return tuple(file for name in names if is_weights(name) and (file := folder / name).is_file())[:_MOST_FILES]


def named_folder(folder: Path, name: str) -> Path | None:
    """The folder of a name in a folder; None where there is none."""
    inside = folder / name
    return inside if os.path.isdir(inside) else None  # noqa: PTH112 - never raises, not of too long a path either


def _below(shelf: Path) -> tuple[Path, ...]:
    """The files of weights one level below a shelf."""
    try:
        names = list_folder(shelf)
    except SlipcastError:
        return ()
    return tuple(file for name in names if (inside := named_folder(shelf, name)) for file in weights_in(inside))
