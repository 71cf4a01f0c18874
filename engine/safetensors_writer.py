"""Writes safetensors files from another file's values: the header first, then tensor after tensor in small pieces."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import BinaryIO

import torch

from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.converted import ConvertedTensor, Extract
from slipcast.engine.file_weight import FileWeight
from slipcast.engine.plan import Piece, Target
from slipcast.engine.reader import TORCH_DTYPES, BufferedReader, torch_dtype
from slipcast.engine.weight_values import weight_parts
from slipcast.registry.errors import Cancelled
from slipcast.registry.header import Header
from slipcast.registry.quantisation import Bundle

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in all."""

_PIECE = 8 * 2**20
"""Bytes that are read and written at a time. Held whole are only a matrix whose axes are exchanged, and one whose codes
are made or put together anew."""
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
    weights: Mapping[str, Bundle],
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Write a safetensors file.

    Args:
        file: where to, at its beginning.
        source: whose values the tensors hold.
        tensors: what to write, in this order.
        metadata: strings to put beside them.
        weights: the source's weights by name.
        progress: called after each piece.
        cancelled: asked after each piece.

    Raises:
        HeaderError: the source changed while it was read.
        UnsupportedFormatError: a dtype that torch does not have.
        QuantisationError: values that can't be quantised or cast.
        Cancelled: ``cancelled`` said so.
    """
    head = header_bytes(tensors, metadata)
    file.write(head)
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    reader = BufferedReader(source)
    try:
        for start, values in _placed(reader, tensors, weights):
            file.seek(len(head) + start)
            done += file.write(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            _report(progress, cancelled, done, total)
    finally:
        reader.close()


def _placed(
    reader: BufferedReader, tensors: Sequence[ConvertedTensor], weights: Mapping[str, Bundle]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Values and their first byte, each valid until the next. All parts of a weight come when its first is due."""
    starts = dict(
        zip((tensor.name for tensor in tensors), accumulate((t.nbytes for t in tensors), initial=0), strict=False)
    )
    parts: dict[Target, dict[str, ConvertedTensor]] = {}
    for tensor in tensors:
        if tensor.made is not None:
            parts.setdefault(tensor.made, {})[tensor.part] = tensor
    for tensor in tensors:
        start = starts[tensor.name]
        if tensor.made is not None:
            for part, first, values in _made(reader, tensor.made, parts.pop(tensor.made, {}), weights):
                yield starts[part.name] + first * values.itemsize, values
        elif tensor.data:
            yield start, torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8)
        for extract in tensor.extracts:
            for values in _pieces(reader, extract):
                yield start, values
                start += values.nbytes


def _made(
    reader: BufferedReader, target: Target, parts: Mapping[str, ConvertedTensor], weights: Mapping[str, Bundle]
) -> Iterator[tuple[ConvertedTensor, int, torch.Tensor]]:
    """The parts of a weight that is computed, as they are to be stored."""
    if not parts:
        return

    def weight_of(piece: Piece) -> FileWeight:
        codec = None if piece.codec is None else codec_named(piece.codec)
        return FileWeight(weights[piece.source], codec, piece.shape, reader, torch.device("cpu"))

    dtype = TORCH_DTYPES[parts[""].dtype] if "" in parts else torch.float32
    for name, first, values in weight_parts(target, dtype, weight_of):
        stored = TORCH_DTYPES[parts[name].dtype]
        same_bits = values.dtype.itemsize == stored.itemsize
        yield parts[name], first, (values.contiguous().view(stored) if same_bits else values.to(stored))


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
        raise Cancelled(
            f"cancelled after {done:,} of {total:,} bytes",
            expected="a conversion that runs to its end",
            hint="nothing of it is left; convert again when wanted",
        )
