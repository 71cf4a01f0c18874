"""Which file of a folder is the model: one file or one index, and of several variants the plain one."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from slipcast.registry.errors import SlipcastError, UnsupportedFileError
from slipcast.registry.foreign_files import PICKLE_SUFFIXES, foreign_name
from slipcast.registry.pipeline_index import index_around
from slipcast.registry.sharded import index_stem, is_index_name, read_weight_map, shard_total
from slipcast.registry.untrusted_files import list_folder

CONFIG = "config.json"
"""What makes a folder a component's: the arguments of its class."""
_SUFFIX = ".safetensors"
_GGUF = ".gguf"


def holds_weights(folder: Path) -> bool:
    """Whether a folder holds weights of any kind, those that are refused included.

    Raises:
        HeaderError: the folder may not be read.
    """
    return any(is_weights(name) for name in list_folder(folder))


def choose_weights(folder: Path, names: list[str], limit_mib: int) -> str:
    """The name of the one file or index in ``folder`` that stands for its model.

    Files that an index lists belong to it. Where ``a`` and ``a.fp16`` are there, ``a.fp16`` is a variant of ``a``.
    Pickles beside a model are passed over.

    Args:
        folder: the folder.
        names: the names in it.
        limit_mib: the longest index that is read.

    Raises:
        UnsupportedFileError: there is no model, more than one, only pickles, or shards without an index.
        HeaderError: an index can't be read.
    """
    indexes = [name for name in names if is_index_name(name)]
    files = [name for name in names if _has(name, _SUFFIX)]
    listed = {shard for index in indexes for shard in read_weight_map(folder / index, limit_mib=limit_mib).values()}
    single = [name for name in files if shard_total(name) <= 1 and name not in listed]
    models = [(index_stem(name), name) for name in indexes]
    models += [(Path(name).stem, name) for name in [*single, *(name for name in names if _has(name, _GGUF))]]
    stems = {stem for stem, _ in models}
    plain = [name for stem, name in models if not _is_variant(stem, stems)]
    if len(plain) == 1:
        return plain[0]
    raise _no_choice(folder, names, files, plain)


def model_of_folder(folder: Path, *, limit_mib: int = 100) -> Path | None:
    """The file or index that stands for a folder's model, as ``choose_weights`` says; None where that is refused."""
    try:
        return folder / choose_weights(folder, list_folder(folder), limit_mib)
    except SlipcastError:
        return None


def named_model(path: Path, *, limit_mib: int = 100) -> Path:
    """The model that a path names: of a folder that is merely where one file or index lies, that file or index.

    It is then as if that file had been named: its name tells the variant, and parts lie beside it. A pipeline's folder,
    a component's, one with a ``config.json``, and one that can't be read or holds no one model stay what they are.

    Args:
        path: what the user named.
        limit_mib: the longest index that is read.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - never raises, not of too long a path either
        return path
    try:
        names = list_folder(path)
        if CONFIG in names or index_around(path) is not None:
            return path
        chosen = path / choose_weights(path, names, limit_mib)
    except SlipcastError:
        return path
    return path if os.path.isdir(chosen) else chosen  # noqa: PTH112


def _is_variant(stem: str, stems: set[str]) -> bool:
    base, dot, _ = stem.rpartition(".")
    return bool(dot) and base in stems


def is_weights(name: str) -> bool:
    """Whether a name is one of weights; of those that are refused, too."""
    return _has(name, _SUFFIX) or _has(name, _GGUF) or is_index_name(name) or _is_pickle(name)


def _has(name: str, suffix: str) -> bool:
    return name.lower().endswith(suffix)


def _is_pickle(name: str) -> bool:
    return Path(name).suffix.lower() in PICKLE_SUFFIXES


def _no_choice(folder: Path, names: list[str], files: list[str], plain: list[str]) -> SlipcastError:
    if plain:
        return UnsupportedFileError(
            f"the folder holds {len(plain)} models",
            expected="one safetensors or GGUF file, or one index with its shards",
            hint=f"Name the file that you mean; 'slipcast inspect {quote(str(folder))}' says what each is.",
            path=folder,
            items=plain,
        )
    if files:
        return UnsupportedFileError(
            f"the folder holds {len(files)} shards of a model without their index",
            expected="a file whose name ends in .safetensors.index.json beside the shards",
            hint="Download the index from where the shards come from.",
            path=folder,
            items=files,
        )
    pickles = [name for name in names if _is_pickle(name)]
    refused = foreign_name(folder / pickles[0]) if pickles else None
    return refused or UnsupportedFileError(
        "the folder holds no model",
        expected="a safetensors or GGUF file, an index with its shards, or a model_index.json with the components' "
        "folders",
        hint="Name the folder or the file with the weights.",
        path=folder,
    )
