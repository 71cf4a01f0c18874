"""Executes a plan: reads in file order, casts in chunks, and puts the results into the model. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from slipcast.engine.build import build_with_buffers
from slipcast.engine.chunks import Chunk, chunks
from slipcast.engine.codecs.base import CODES, SCALE
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.scaled import ScaledCodec
from slipcast.engine.layers import quantise_module_
from slipcast.engine.materialise import refuse_meta_tensors
from slipcast.engine.plan import Piece, Plan, Target
from slipcast.engine.quantised_model import mark_quantised_
from slipcast.engine.reader import Reader, open_reader, torch_dtype
from slipcast.engine.weight_entries import WEIGHT
from slipcast.registry.errors import LoadCancelled, QuantisationError
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.quantisation import Bundle, assemble
from slipcast.registry.side_tensors import WEIGHT_SCALE

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


class _Work:
    """What a running load holds.

    Attributes:
        tensors: stored name -> tensor, as they fill.
    """

    def __init__(self, plan: Plan, bundles: Mapping[str, Bundle], reader: Reader, device: torch.device) -> None:
        self.plan, self.bundles, self.reader, self.device = plan, bundles, reader, device
        self.tensors: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)
        self._scale: tuple[str, torch.Tensor] | None = None
        self._read = 0

    def stored(self, target: Target, index: int) -> torch.Tensor:
        """A tensor of the result, allocated when its first values come."""
        stored = target.stored[index]
        if stored.name not in self.tensors:
            dtype = getattr(torch, stored.dtype)
            self.tensors[stored.name] = torch.empty(stored.shape, dtype=dtype, device=self.device)
        return self.tensors[stored.name]

    def scratch(self, elements: int) -> torch.Tensor:
        """A float32 buffer of at least so many elements, reused."""
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(elements, dtype=torch.float32, device=self.device)
        return self._scratch

    def scale(self, bundle: Bundle) -> torch.Tensor:
        """A weight's scale in float32, as it lies in the file. One is kept: pieces of a weight follow one another."""
        if self._scale is None or self._scale[0] != bundle.name:
            info = bundle.sides[WEIGHT_SCALE]
            values = self.reader.elements(info, 0, info.elements).view(info.shape)
            self._scale = bundle.name, values.to(self.device, torch.float32, copy=True)
            self._read += info.nbytes
        return self._scale[1]

    def report(self, read: int, progress: Progress | None, cancelled: Callable[[], bool] | None) -> None:
        """Count bytes that were read, and let the caller know and stop.

        Raises:
            LoadCancelled: ``cancelled`` said so.
        """
        self._read += read
        total = self.plan.bytes.read
        if progress is not None:
            progress(self._read, total)
        if cancelled is not None and cancelled():
            raise LoadCancelled(
                f"the load was cancelled after {self._read:,} of {total:,} bytes",
                expected="a load that runs to its end",
                hint="nothing of it is left; load again when wanted",
            )

    def close(self) -> None:
        """Let go of everything, also where an error's traceback still holds this object."""
        self.reader.close()
        self.tensors = {}
        self._scratch = torch.empty(0)
        self._scale = None


def execute(
    plan: Plan,
    header: Header,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> nn.Module:
    """Load what a plan describes.

    Args:
        plan: made for this header.
        header: the file's header.
        progress: called after each chunk.
        cancelled: asked after each chunk.

    Returns:
        The model in eval mode, on the plan's device, no tensor of it left on the meta device.

    Raises:
        LoadCancelled: ``cancelled`` said so.
        HeaderError: the file changed under the load.
        QuantisationError: values that can't be quantised.
    """
    device = torch.device(plan.device)
    mapped = device.type == "cpu" and plan.settings["mmap"].engaged == "true"
    reader = open_reader(header, mmap=mapped, pinned=device.type == "cuda")
    work = _Work(plan, assemble(header).weights, reader, device)
    try:
        with torch.no_grad():
            for target, piece in _in_file_order(work):
                for chunk in _chunks(work, target, piece):
                    _fill(work, target, piece, chunk)
                    item = torch_dtype(work.bundles[piece.source].weight).itemsize
                    work.report((chunk.stop - chunk.start) * item, progress, cancelled)
        return _assemble_model(plan, work.tensors, device)
    finally:
        work.close()


def _in_file_order(work: _Work) -> list[tuple[Target, Piece]]:
    def place(entry: tuple[Target, Piece]) -> tuple[int, int, int]:
        weight = work.bundles[entry[1].source].weight
        return weight.file, weight.start, (entry[1].source_rows or (0, 0))[0]

    return sorted(((target, piece) for target in work.plan.targets for piece in target.pieces), key=place)


def _chunks(work: _Work, target: Target, piece: Piece) -> Iterator[Chunk]:
    """The chunks of a piece; of one that stays in the mapped file the whole of it."""
    size = _UNCUT if target.mapped else work.plan.request.chunk_mib
    return chunks(target, piece, work.bundles[piece.source], size)


_UNCUT = 2**40
"""A size of chunks in MiB that no tensor reaches."""


def _fill(work: _Work, target: Target, piece: Piece, chunk: Chunk) -> None:
    """Bring one chunk of the file into the tensors that a target is stored in."""
    bundle = work.bundles[piece.source]
    values = work.reader.elements(bundle.weight, chunk.start, chunk.stop)
    rows = slice(*chunk.rows)
    if target.mapped:
        work.tensors[target.stored[0].name] = values.view(target.shape)
    else:
        values = values.to(work.device)
        if target.how == "decode":
            values = _decoded(work, target, piece, chunk, values)
        if piece.operation == "transpose":
            values = values.view(target.shape[::-1]).t()
        else:
            values = values.view((chunk.rows[1] - chunk.rows[0], *target.shape[1:]) if target.shape else ())
        if target.how == "encode":
            _encode(work, target, values, rows)
        else:
            _rows(work.stored(target, 0), rows).copy_(values)
    if target.how == "keep":
        _keep_scale(work, target, piece, chunk)


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _encode(work: _Work, target: Target, values: torch.Tensor, rows: slice) -> None:
    """Quantise rows into the parts of a weight, or a whole weight where its codec needs all rows at once."""
    codec = codec_named(target.codec or "")
    names = list(codec.parts(target.shape))
    try:
        if codec.streams:
            out = {name: work.stored(target, index)[rows] for index, name in enumerate(names)}
            codec.encode_rows_into(values, out, work.scratch(values.numel()))
        else:
            for index, part in enumerate(codec.encode(values.contiguous()).values()):
                work.stored(target, index).copy_(part)
    except QuantisationError as error:
        raise QuantisationError(f"{target.name}: {error.found}", expected=error.expected, hint=error.hint) from error


def _decoded(work: _Work, target: Target, piece: Piece, chunk: Chunk, codes: torch.Tensor) -> torch.Tensor:
    """Values in the target's dtype, in the file's order: codes times their scale in float32, cast once."""
    if piece.codec is None:
        return codes
    codec, weight = codec_named(piece.codec), work.bundles[piece.source].weight
    first, last = _file_rows(weight, chunk)
    shape = (last - first, *weight.shape[1:]) if weight.shape else ()
    parts = {CODES: codes.view(shape)}
    scale = _scale_of_rows(work, piece, first, last)
    if scale is not None:
        parts[SCALE] = scale
    return codec.decode(parts, shape, getattr(torch, target.stored[0].dtype)).view(-1)


def _keep_scale(work: _Work, target: Target, piece: Piece, chunk: Chunk) -> None:
    """Put the file's scale beside the codes that are kept; rows that need their own each get that of a whole tensor."""
    scale = _scale_of_rows(work, piece, *_file_rows(work.bundles[piece.source].weight, chunk))
    if scale is not None:
        names = list(codec_named(target.codec or "").parts(target.shape))
        out = work.stored(target, names.index(SCALE))
        (out if out.shape == scale.shape else out[slice(*chunk.rows)]).copy_(scale)


def _file_rows(weight: TensorInfo, chunk: Chunk) -> tuple[int, int]:
    """The rows of the file's tensor that a chunk holds."""
    width = max(prod(weight.shape[1:]), 1)
    return chunk.start // width, chunk.stop // width


def _scale_of_rows(work: _Work, piece: Piece, first: int, last: int) -> torch.Tensor | None:
    """The scale of some rows of the file's tensor as its codec takes it; None where the codes have none."""
    codec = codec_named(piece.codec or "")
    bundle = work.bundles[piece.source]
    if not isinstance(codec, ScaledCodec) or WEIGHT_SCALE not in bundle.sides:
        return None
    scale = work.scale(bundle)
    if codec.granularity == "tensor":
        return scale.view(())
    if codec.granularity == "block":
        return scale.view(bundle.weight.shape[0], -1, 1)[first:last]
    return scale.view(-1) if codec.axis else scale.view(-1)[first:last]


def _assemble_model(plan: Plan, tensors: dict[str, torch.Tensor], device: torch.device) -> nn.Module:
    """Build the class and put every tensor in its place."""
    model = build_with_buffers(plan.origin.model, plan.origin.config)
    compute_dtype = getattr(torch, plan.compute_dtype)
    for module in plan.modules:
        if module.codec is not None:
            quantise_module_(model.get_submodule(module.path), codec_named(module.codec), compute_dtype)
    for target in plan.targets:
        if target.codec is not None:
            quantised: Any = model.get_submodule(target.name.removesuffix(f".{WEIGHT}"))
            quantised.set_weight({_leaf(stored.name): tensors[stored.name] for stored in target.stored})
            continue
        for stored in target.stored:
            if target.how == "computed":
                _put_buffer(model, stored.name, model.get_buffer(stored.name).to(device))
            elif stored.kind == "buffer":
                _put_buffer(model, stored.name, tensors[stored.name])
            else:
                _put_parameter(model, stored.name, tensors[stored.name])
    for target in plan.targets:
        if target.how == "tie":
            _tie(model, target.name, target.tied_to or "")
    refuse_meta_tensors(model)
    return mark_quantised_(model) if any(module.codec is not None for module in plan.modules) else model


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _put_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, leaf = _owner(model, name)
    old = module._parameters[leaf]
    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)


def _put_buffer(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, leaf = _owner(model, name)
    module._buffers[leaf] = tensor


def _tie(model: nn.Module, name: str, first: str) -> None:
    owner, leaf = _owner(model, first)
    module, own_leaf = _owner(model, name)
    kind = "_parameters" if leaf in owner._parameters else "_buffers"
    getattr(module, kind)[own_leaf] = getattr(owner, kind)[leaf]
