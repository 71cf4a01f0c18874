"""What a diffusers folder says of its pipeline: the index beside the components' folders, modular ones included.

The names of classes in it are words of an untrusted file: they are compared, and resolved among known classes alone.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipcast.registry.errors import HeaderError
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.untrusted_files import list_folder, read_json_object, status_of

INDEX_NAMES = ("model_index.json", "modular_model_index.json")
_LIMIT_MIB = 4


@dataclass(frozen=True, slots=True)
class PipelineIndex:
    """The index of a pipeline's folder.

    Attributes:
        folder: where it lies.
        pipeline: the name of the pipeline's class, or "" where it says none.
        classes: role -> (library, class) of each component.
        absent: roles that are listed as not there.
        arguments: what else the index says, by name.
    """

    folder: Path
    pipeline: str
    classes: Mapping[str, tuple[str, str]]
    absent: frozenset[str]
    arguments: Mapping[str, Any]


def index_name(names: list[str]) -> str | None:
    """Which of the names in a folder is a pipeline's index; None where none is."""
    return next((name for name in INDEX_NAMES if name in names), None)


def read_index(folder: Path) -> PipelineIndex | None:
    """The index of a folder; None where ``folder`` is none, or has no index.

    Raises:
        HeaderError: nothing is there, or the index is no strict JSON.
    """
    if not stat.S_ISDIR(status_of(folder).st_mode):
        return None
    name = index_name(list_folder(folder))
    if name is None:
        return None
    content = read_json_object(folder / name, limit_mib=_LIMIT_MIB)
    pipeline = content.get("_class_name")
    entries = {key: value for key, value in content.items() if not key.startswith("_")}
    listed = {key: value for key, value in entries.items() if _is_entry(value)}
    return PipelineIndex(
        folder,
        pipeline if isinstance(pipeline, str) else "",
        FrozenMapping(component_classes(content)),
        frozenset(key for key, value in listed.items() if value[1] is None),
        FrozenMapping({key: value for key, value in entries.items() if key not in listed}),
    )


def index_around(path: Path) -> PipelineIndex | None:
    """The index of a pipeline's folder, or of the one that a component's folder lies in; None of any other path.

    Raises:
        HeaderError: nothing is there, or the folder's own index is no strict JSON.
    """
    index = read_index(path)
    if index is not None or not path.is_dir():
        return index
    try:
        around = read_index(path.resolve().parent)
    except HeaderError:
        return None
    return around if around is not None and path.name in around.classes else None


def component_classes(content: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The entries of an index of the form ``name: [library, class]``, in modular ones with a third that is passed over.

    Components that are not there hold nulls, and are left out.
    """
    return {
        name: (value[0], value[1])
        for name, value in content.items()
        if _is_entry(value) and isinstance(value[0], str) and isinstance(value[1], str)
    }


def _is_entry(value: Any) -> bool:
    """Whether a value is what a component has: two words or nulls, and in modular indexes a mapping."""
    return (
        isinstance(value, list)
        and (len(value) == 2 or (len(value) == 3 and isinstance(value[2], Mapping)))
        and all(part is None or isinstance(part, str) for part in value[:2])
        and (value[0] is None) == (value[1] is None)
    )
