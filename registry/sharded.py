"""Reads a model that is split over several safetensors files, by its index."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from slipcast.registry.errors import HeaderError
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.safetensors_header import read_safetensors
from slipcast.registry.untrusted_files import list_folder, read_json_object

_INDEX = re.compile(r"(?P<stem>.+)\.safetensors(?:\.(?P<early>\w+))?\.index(?:\.(?P<late>\w+))?\.json")
_SHARD = re.compile(r".+-\d{5}-of-(?P<total>\d{5})(?:\.\w+)?\.safetensors")
_PLAIN_NAME = re.compile(r"[^/\\:\x00-\x1f\x7f]+")
_AGAIN = "Download the index and the shards again, all of them from one place."


def is_index_name(name: str) -> bool:
    """Whether a file of this name is an index of shards."""
    return _INDEX.fullmatch(name) is not None


def index_stem(name: str) -> str:
    """The name of the model that an index describes, with its variant.

    That of ``model.safetensors.index.fp16.json`` is ``model.fp16``.
    """
    match = _INDEX.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of an index")
    return ".".join(part for part in match.group("stem", "early", "late") if part)


def shard_total(name: str) -> int:
    """How many shards there are of the model that a file of this name is a shard of; 0 if it isn't one."""
    match = _SHARD.fullmatch(name)
    return int(match["total"]) if match else 0


def read_weight_map(path: Path, *, limit_mib: int) -> dict[str, str]:
    """Of an index, the tensors' names with the names of the shards that they are in; these are plain file names.

    Raises:
        HeaderError: the index is unreadable, no strict JSON, too large, or its ``weight_map`` is not of this form.
    """
    weight_map = read_json_object(path, limit_mib=limit_mib).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(
            "the index has no weight_map" if weight_map is None else "the index's weight_map is empty or no object",
            expected="a weight_map from each tensor's name to the name of its shard",
            hint=_AGAIN,
            path=path,
        )
    wrong = sorted({str(shard) for shard in weight_map.values() if not _is_plain_name(shard)})
    if wrong:
        raise HeaderError(
            f"the index names {len(wrong)} shards by something else than a file beside it",
            expected="plain names of .safetensors files, without a folder",
            hint="Don't trust this file; download the model from its publisher.",
            path=path,
            items=wrong,
        )
    return weight_map


def read_sharded(path: Path, *, limit_mib: int = 100) -> Header:
    """The headers of all shards of an index, as one.

    Tensors come shard after shard in the order of the shards' names. Metadata is merged; of keys that differ between
    shards the first value stays.

    Args:
        path: the index; the shards lie beside it.
        limit_mib: the longest index, and the longest header of a shard, that is read.

    Raises:
        HeaderError: a shard is missing, unreadable or damaged, or its tensors are not those of the index.
        UnsupportedFileError: a shard is a pickle, an archive, GGUF or no regular file.
    """
    weight_map = read_weight_map(path, limit_mib=limit_mib)
    expected = Counter(weight_map.values())
    folder = path.parent
    shards = [name for name in list_folder(folder) if name in expected]
    _check_present(path, expected, shards)

    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    extra: list[str] = []
    for number, shard in enumerate(shards):
        header = read_safetensors(folder / shard, limit_mib=limit_mib)
        metadata = {**header.metadata, **metadata}
        for name, tensor in header.tensors.items():
            if weight_map.get(name) == shard:
                tensors[name] = replace(tensor, file=number)
            else:
                extra.append(f"{name} ({shard})")
    _check_complete(path, weight_map, tensors, extra)
    files = tuple(folder / shard for shard in shards)
    return Header(path, "sharded safetensors", files, MappingProxyType(tensors), MappingProxyType(metadata))


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and _PLAIN_NAME.fullmatch(name) is not None


def _check_present(path: Path, expected: Mapping[str, int], present: Iterable[str]) -> None:
    missing = {shard: expected[shard] for shard in sorted(expected.keys() - set(present))}
    if not missing:
        return
    first = next(iter(missing))
    raise HeaderError(
        f"{len(missing)} of {len(expected)} shards are missing; {first!r} holds {missing[first]} of the model's "
        f"{sum(expected.values())} tensors",
        expected="every shard of the index in the index's folder",
        hint="Download the missing shards into that folder.",
        path=path,
        items=(f"{shard} ({count} tensors)" for shard, count in missing.items()),
    )


def _check_complete(
    path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo], extra: list[str]
) -> None:
    absent = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in tensors]
    if absent:
        raise HeaderError(
            f"{len(absent)} tensors of the index are not in the shard that it names for them",
            expected="an index and shards of the same model",
            hint=_AGAIN,
            path=path,
            items=absent,
        )
    if extra:
        raise HeaderError(
            f"the shards hold {len(extra)} tensors that the index doesn't place there",
            expected="an index and shards of the same model",
            hint=_AGAIN,
            path=path,
            items=extra,
        )
