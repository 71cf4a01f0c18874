"""Writes safetensors files from another file's values: the header first, then tensor after tensor in small pieces."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import torch

from slipcast.engine.conversion import ConvertedTensor, Extract
from slipcast.engine.reader import BufferedReader, torch_dtype
from slipcast.registry.errors import LoadCancelled
from slipcast.registry.header import Header

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""

_PIECE = 8 * 2**20
"""Bytes that are read and written at a time; only a matrix whose axes are exchanged is held whole."""
_ALIGNMENT = 8


def header_bytes(tensors: Sequence[ConvertedTensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file: the header's length in 8 bytes, and the header, padded to whole 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    stop = 0
    for tensor in tensors:
        start, stop = stop, stop + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    file: BinaryIO,
    source: Header,
    tensors: Sequence[ConvertedTensor],
    metadata: Mapping[str, str],
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Write a safetensors file.

    Args:
        file: where to, at its beginning.
        source: whose values the tensors hold.
        tensors: what to write, in this order.
        metadata: strings to put beside them.
        progress: called after each piece.
        cancelled: asked after each piece.

    Raises:
        HeaderError: the source changed while it was read.
        UnsupportedFormatError: a dtype that torch does not have.
        LoadCancelled: ``cancelled`` said so.
    """
    file.write(header_bytes(tensors, metadata))
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    reader = BufferedReader(source)
    try:
        for tensor in tensors:
            for extract in tensor.extracts:
                for values in _pieces(reader, extract):
                    done += file.write(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
                    _report(progress, cancelled, done, total)
    finally:
        reader.close()


def _pieces(reader: BufferedReader, extract: Extract) -> Iterator[torch.Tensor]:
    """An extract's values, row-major and one-dimensional, piece by piece. Each is valid until the next."""
    start, stop = extract.elements
    if start == stop:
        return
    step = max(1, _PIECE // torch_dtype(extract.tensor).itemsize)
    if not extract.transposed:
        for first in range(start, stop, step):
            yield reader.elements(extract.tensor, first, min(first + step, stop))
        return
    turned = reader.elements(extract.tensor, start, stop).view(extract.tensor.shape).t()
    rows = max(1, step // turned.shape[1])
    for first in range(0, turned.shape[0], rows):
        yield turned[first : first + rows].contiguous().view(-1)


def _report(progress: Progress | None, cancelled: Callable[[], bool] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
    if cancelled is not None and cancelled():
        raise LoadCancelled(
            f"cancelled after {done:,} of {total:,} bytes",
            expected="a conversion that runs to its end",
            hint="nothing of it is left; convert again when wanted",
        )
