"""What the configuration files of a tokenizer or processor may say before its library reads them: no file elsewhere.

The library gives their values to the class's constructor as they are, which opens those that name files, relative ones
from the working directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipcast.registry.errors import CompanionError
from slipcast.registry.untrusted_files import read_json_object, status_of

_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_VALUES = frozenset({"vocab", "merges"})
"""What holds a vocabulary itself; where there is a word instead, it is opened as a path."""
_POSITIONAL = "init_inputs"
_HARMLESS = frozenset({"name_or_path", "_name_or_path", "special_tokens_map_file"})
"""Where it was once saved; published files have these, and nothing opens them."""
_LIMIT_MIB = 16


def check_processor_files(folder: Path, role: str) -> None:
    """Refuse a tokenizer's or processor's folder whose configuration names files that lie elsewhere.

    Args:
        folder: with its files.
        role: the pipeline's own name of it.

    Raises:
        CompanionError: no folder is there, a tokenizer lacks its configuration, or values name files outside it; the
            values are listed.
        HeaderError: a configuration is no strict JSON.
    """
    if not stat.S_ISDIR(status_of(folder).st_mode):
        raise _refusal("no folder", folder, role)
    if "tokenizer" in role and not _is_file(folder / _CONFIGS[0]):
        raise _refusal(
            f"a folder without {_CONFIGS[0]}, which names its class, padding and special tokens", folder, role
        )
    outside = [
        f"{name}: {key} is {value[:200]!r}"
        for name in _CONFIGS
        if _is_file(folder / name)
        for key, value in _words(read_json_object(folder / name, limit_mib=_LIMIT_MIB))
        if _leads_out(key, value, folder)
    ]
    if outside:
        raise _refusal("a configuration that names files outside its folder", folder, role, outside)


def _words(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string with the key that it stands under, of lists that of the list, but for vocabularies."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from _words(value, name)
    elif isinstance(content, Sequence):
        for value in content:
            yield from _words(value, "" if key in _VALUES else key)


def _leads_out(key: str, value: str, folder: Path) -> bool:
    """Whether a value is a path that may lead out of the folder: of a key that names files any, of others to a file.

    A key that names files is read from the working directory where the folder has no file of that purpose.
    """
    if not value or key in _HARMLESS:
        return False
    if key in _VALUES:
        return True
    inside = Path(os.path.normpath(folder / value)).is_relative_to(os.path.normpath(folder))
    if key == _POSITIONAL or key.endswith(("_file", "_files", "_path")):
        return not inside or (_is_file(value) and not _is_file(folder / value))
    return not inside and (_is_file(value) or _is_file(folder / value))


def _is_file(path: str | Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - never raises, not of too long a text either


def _refusal(found: str, folder: Path, role: str, items: Sequence[str] = ()) -> CompanionError:
    return CompanionError(
        f"as the {role}: {found}",
        expected="a folder with all its files, as it was published",
        hint=f"download the folder again, or name another by the setting companions.{role}",
        path=folder,
        items=items,
        roles=(role,),
    )
