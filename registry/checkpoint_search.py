"""Finds the checkpoints below a folder that is not one itself."""

from __future__ import annotations

import os
from pathlib import Path

from slipcast.registry.errors import HeaderError, SlipcastError, UnsupportedFileError
from slipcast.registry.pipeline_index import index_name
from slipcast.registry.sharded import is_index_name, read_weight_map
from slipcast.registry.untrusted_files import list_folder
from slipcast.registry.weight_files import choose_weights, is_weights

_MOST_FOLDERS = 10_000
_MOST_CHECKPOINTS = 1_000


def find_checkpoints(folder: Path, *, limit_mib: int = 100) -> list[Path]:
    """The checkpoints in a folder and below it: what ``read_checkpoint`` could be asked to read, readable or not.

    A pipeline's folder, and a folder with a ``config.json`` and one model's weights, are one checkpoint each and not
    searched; so is a folder that can't be listed. Shards that an index lists belong to it. Hidden folders and links to
    folders are passed over.

    Args:
        folder: where to look; if it is a checkpoint itself, it is the only one found.
        limit_mib: the longest index that is read.

    Raises:
        UnsupportedFileError: there are more than 10,000 folders or 1,000 checkpoints.
    """
    found: list[Path] = []
    waiting = [folder]
    visited = 0
    while waiting:
        here = waiting.pop()
        visited += 1
        inside, below = _look_into(here, limit_mib)
        found += inside
        waiting += reversed(below)
        if visited > _MOST_FOLDERS or len(found) > _MOST_CHECKPOINTS:
            raise UnsupportedFileError(
                f"the folder holds more than {_MOST_FOLDERS:,} folders or {_MOST_CHECKPOINTS:,} checkpoints",
                expected="a folder of models",
                hint="Name one of the folders in it.",
                path=folder,
            )
    return found


def _look_into(folder: Path, limit_mib: int) -> tuple[list[Path], list[Path]]:
    """The checkpoints that lie in a folder, and the folders to look into next."""
    try:
        names = list_folder(folder)
    except HeaderError:
        return [folder], []
    if index_name(names) is not None or ("config.json" in names and _is_one_model(folder, names, limit_mib)):
        return [folder], []
    listed = {shard for name in names if is_index_name(name) for shard in _shards(folder / name, limit_mib)}
    files = [folder / name for name in names if is_weights(name) and name not in listed]
    folders = [folder / name for name in names if not name.startswith(".")]
    return (
        [path for path in files if not path.is_dir()],
        [path for path in folders if path.is_dir() and not os.path.islink(path)],  # noqa: PTH114 - never raises
    )


def _is_one_model(folder: Path, names: list[str], limit_mib: int) -> bool:
    try:
        choose_weights(folder, names, limit_mib)
    except SlipcastError:
        return False
    return True


def _shards(index: Path, limit_mib: int) -> list[str]:
    try:
        return list(read_weight_map(index, limit_mib=limit_mib).values())
    except SlipcastError:
        return []
