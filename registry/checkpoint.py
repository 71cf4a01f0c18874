"""Reads what a path holds, whatever its form: a file, an index of shards, a component's folder or a pipeline's folder.

Names that stand in a file are only compared with the names that a folder lists; none is ever made into a path.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from slipcast.registry.errors import HeaderError, UnsupportedFileError
from slipcast.registry.foreign_files import foreign_name
from slipcast.registry.gguf_header import is_gguf_name, read_gguf
from slipcast.registry.header import Checkpoint, Header, TensorInfo
from slipcast.registry.pipeline_index import component_classes, index_name
from slipcast.registry.safetensors_header import read_safetensors
from slipcast.registry.sharded import is_index_name, read_sharded, shard_total
from slipcast.registry.untrusted_files import list_folder, open_regular, read_json_object, status_of
from slipcast.registry.weight_files import CONFIG, choose_weights, holds_weights, named_model

_CONFIG_LIMIT_MIB = 4


def read_checkpoint(path: str | Path, *, limit_mib: int = 100) -> Checkpoint:
    """What ``path`` holds, without reading a weight.

    A folder with a ``model_index.json`` or ``modular_model_index.json`` is a pipeline: one header for each of its
    components that has weights. Of a component that lies there in several variants (``model.safetensors``,
    ``model.fp16.safetensors``) the plain one is taken; a file of another variant can be named itself. A folder
    with a ``config.json`` is a component; any other stands for the one file or index in it, as if that were named.

    Args:
        path: a .safetensors or .gguf file, a .safetensors.index.json, a component's folder or a pipeline's folder.
        limit_mib: the longest header or index that is read.

    Raises:
        HeaderError: a file is missing, unreadable, damaged, or contradicts the index.
        UnsupportedFileError: a pickle, a folder without a model, or one with several.
    """
    path = named_model(Path(path), limit_mib=limit_mib)
    status = status_of(path)
    if not stat.S_ISDIR(status.st_mode):
        return Checkpoint(path, MappingProxyType({"": _read_file(path, limit_mib)}))
    index = index_name(list_folder(path))
    if index is not None:
        return _read_pipeline(path, index, limit_mib)
    return Checkpoint(path, MappingProxyType({"": _read_folder(path, limit_mib)}))


def read_tensor_bytes(header: Header, tensor: TensorInfo, limit: int = 65536) -> bytes:
    """The bytes of one small tensor, such as a marker or a scale.

    Args:
        header: the header that ``tensor`` is from.
        tensor: the tensor.
        limit: the most bytes that it may have.

    Raises:
        HeaderError: the tensor is larger than ``limit``, or the file is gone, unreadable or shorter than it was.
    """
    path = header.files[tensor.file]
    if tensor.nbytes > limit:
        raise HeaderError(
            f"the tensor {tensor.name!r} takes {tensor.nbytes} bytes",
            expected=f"at most {limit} bytes in a tensor of its kind",
            hint="The program that wrote the file is faulty: convert it again.",
            path=path,
            items=(tensor.name,),
        )
    with open_regular(path) as (file, _):
        file.seek(tensor.start)
        content = file.read(tensor.nbytes)
    if len(content) < tensor.nbytes:
        raise HeaderError(
            f"the file ended inside the tensor {tensor.name!r}: {tensor.nbytes - len(content)} bytes are missing",
            expected="the file as it was when its header was read",
            hint="Another program changes the file; wait until it is done and begin again.",
            path=path,
            items=(tensor.name,),
        )
    return content


def _read_file(path: Path, limit_mib: int) -> Header:
    """The header of a file that the user named; the name decides how it is read, the content what is refused."""
    refused = foreign_name(path)
    if refused is not None:
        raise refused
    if shard_total(path.name) > 1:
        raise UnsupportedFileError(
            f"the file is one of the {shard_total(path.name)} shards of a model",
            expected="the whole model",
            hint="Name the index beside it, whose name ends in .safetensors.index.json, or the folder.",
            path=path,
        )
    read = next((reader for applies, reader in _READERS if applies(path.name)), read_safetensors)
    return read(path, limit_mib=limit_mib)


_READERS: tuple[tuple[Callable[[str], bool], Callable[..., Header]], ...] = (
    (is_index_name, read_sharded),
    (is_gguf_name, read_gguf),
)
"""Which names are read by something else than ``read_safetensors``; the first that applies."""


def _read_folder(folder: Path, limit_mib: int) -> Header:
    names = list_folder(folder)
    header = _read_file(folder / choose_weights(folder, names, limit_mib), limit_mib)
    if CONFIG not in names:
        return Header(folder, header.container, header.files, header.tensors, header.metadata)
    config = read_json_object(folder / CONFIG, limit_mib=_CONFIG_LIMIT_MIB)
    return Header(folder, "diffusers folder", header.files, header.tensors, header.metadata, MappingProxyType(config))


def _read_pipeline(folder: Path, index: str, limit_mib: int) -> Checkpoint:
    classes = component_classes(read_json_object(folder / index, limit_mib=_CONFIG_LIMIT_MIB))
    components = [name for name in list_folder(folder) if name in classes and _is_component(folder / name)]
    if not components:
        raise UnsupportedFileError(
            f"none of the components that {index} names has weights in this folder",
            expected="a folder for each component, with its weights",
            hint="Download the whole pipeline; the folders may be missing or hold pointers only.",
            path=folder,
            items=classes,
        )
    headers = {name: _read_folder(folder / name, limit_mib) for name in components}
    return Checkpoint(folder, MappingProxyType(headers), MappingProxyType(classes))


def _is_component(folder: Path) -> bool:
    return stat.S_ISDIR(status_of(folder).st_mode) and holds_weights(folder)
