"""Executes a plan: reads in file order, casts in chunks, and puts the results into the model. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from slipcast.engine.build import build_with_buffers
from slipcast.engine.chunks import Chunk, chunks, is_whole
from slipcast.engine.codecs.base import SCALE
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.layers import quantise_module_
from slipcast.engine.materialise import refuse_meta_tensors
from slipcast.engine.plan import Piece, Plan, Target
from slipcast.engine.quantised_model import mark_quantised_
from slipcast.engine.reader import Reader, open_reader
from slipcast.registry.errors import LoadCancelled, QuantisationError
from slipcast.registry.header import Header
from slipcast.registry.quantisation import Bundle, assemble
from torch import nn

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


@dataclass
class _Work:
    """What a running load holds.

    Attributes:
        tensors: stored name -> tensor, as they fill.
        scratch: float32 scratch of the last size, reused.
    """

    plan: Plan
    bundles: Mapping[str, Bundle]
    reader: Reader
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scratch: torch.Tensor | None = None


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
            _fill(work, progress, cancelled)
        return _assemble_model(plan, work.tensors, device)
    finally:
        reader.close()


def _fill(work: _Work, progress: Progress | None, cancelled: Callable[[], bool] | None) -> None:
    done, total = 0, work.plan.bytes.read
    for target, piece in _in_file_order(work):
        bundle = work.bundles[piece.source]
        item = bundle.weight.nbytes // max(bundle.weight.elements, 1)
        if target.how == "keep":
            done += _keep_scale(work, target, piece, bundle)
        if target.how == "adopt":
            _adopt(work, target, piece, bundle)
            done += bundle.weight.nbytes if piece.source_rows is None else item * _elements(target)
            _report(progress, cancelled, done, total)
            continue
        for chunk in chunks(target, piece, bundle, work.plan.request.chunk_mib):
            _fill_chunk(work, target, piece, bundle, chunk)
            done += (chunk.stop - chunk.start) * item
            _report(progress, cancelled, done, total)


def _report(progress: Progress | None, cancelled: Callable[[], bool] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(min(done, total), total)
    if cancelled is not None and cancelled():
        raise LoadCancelled(
            f"the load was cancelled after {done:,} of {total:,} bytes",
            expected="a load that runs to its end",
            hint="nothing of it is left; load again when wanted",
        )


def _in_file_order(work: _Work) -> Iterator[tuple[Target, Piece]]:
    def place(entry: tuple[Target, Piece]) -> tuple[int, int, int]:
        weight = work.bundles[entry[1].source].weight
        return weight.file, weight.start, (entry[1].source_rows or (0, 0))[0]

    yield from sorted(((target, piece) for target in work.plan.targets for piece in target.pieces), key=place)


def _elements(target: Target) -> int:
    count = 1
    for size in target.shape:
        count *= size
    return count


def _adopt(work: _Work, target: Target, piece: Piece, bundle: Bundle) -> None:
    """Take the file's own bytes, mapped, as the tensor."""
    (chunk,) = chunks(target, piece, bundle, _UNCUT)
    work.tensors[target.stored[0].name] = work.reader.elements(bundle.weight, chunk.start, chunk.stop).view(
        target.shape
    )


_UNCUT = 2**40
"""A chunk size that no tensor reaches."""


def _fill_chunk(work: _Work, target: Target, piece: Piece, bundle: Bundle, chunk: Chunk) -> None:
    values = work.reader.elements(bundle.weight, chunk.start, chunk.stop)
    if work.device.type != "cpu":
        values = values.to(work.device)
    rows = slice(*chunk.rows)
    if piece.operation == "transpose":
        values = values.view(target.shape[::-1]).t()
    else:
        values = values.view((chunk.rows[1] - chunk.rows[0], *target.shape[1:]) if target.shape else ())
    if target.how == "encode":
        _encode(work, target, values, rows)
    elif target.how == "decode":
        values = _decoded(work, target, piece, bundle, values, chunk)
        _rows(_stored(work, target, 0), rows).copy_(values)
    else:
        _rows(_stored(work, target, 0), rows).copy_(values)


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _stored(work: _Work, target: Target, index: int) -> torch.Tensor:
    """A tensor of the result, allocated when its first values come."""
    stored = target.stored[index]
    if stored.name not in work.tensors:
        work.tensors[stored.name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device=work.device)
    return work.tensors[stored.name]


def _encode(work: _Work, target: Target, values: torch.Tensor, rows: slice) -> None:
    assert target.codec is not None
    codec = codec_named(target.codec)
    names = list(codec.parts(target.shape))
    try:
        if codec.streams:
            out = {name: _stored(work, target, index)[rows] for index, name in enumerate(names)}
            codec.encode_rows_into(values, out, _scratch(work, values.numel()))
        else:
            for index, (_, part) in enumerate(codec.encode(values.contiguous()).items()):
                _stored(work, target, index).copy_(part)
    except QuantisationError as error:
        raise QuantisationError(f"{target.name}: {error.found}", expected=error.expected, hint=error.hint) from error


def _scratch(work: _Work, elements: int) -> torch.Tensor:
    if work.scratch is None or work.scratch.numel() < elements:
        work.scratch = torch.empty(elements, dtype=torch.float32, device=work.device)
    return work.scratch


def _scale(work: _Work, bundle: Bundle) -> torch.Tensor:
    """A weight's scale in float32, as one value or one for each row of the file's tensor."""
    info = bundle.sides["weight_scale"]
    return work.reader.elements(info, 0, info.elements).to(torch.float32).clone().to(work.device)


def _keep_scale(work: _Work, target: Target, piece: Piece, bundle: Bundle) -> int:
    """Put the file's scale beside the codes that are kept. Returns the bytes read."""
    names = list(codec_named(target.codec or "").parts(target.shape))
    if SCALE not in names:
        return 0
    out = _stored(work, target, names.index(SCALE))
    scale = _scale(work, bundle)
    if scale.numel() > 1 and piece.source_rows is not None:
        scale = scale[slice(*piece.source_rows)]
    where = out if piece.target_rows is None or out.ndim == 0 else out[slice(*piece.target_rows)]
    where.copy_(scale.view(-1).expand(where.numel()).view(where.shape))
    return bundle.sides["weight_scale"].nbytes


def _decoded(
    work: _Work, target: Target, piece: Piece, bundle: Bundle, codes: torch.Tensor, chunk: Chunk
) -> torch.Tensor:
    """Codes times their scale, in float32."""
    if bundle.is_plain:
        return codes
    values = codes.to(torch.float32)
    if "weight_scale" not in bundle.sides:
        return values
    scale = _scale(work, bundle)
    if scale.numel() == 1:
        return values.mul_(scale.view(()))
    source_row = 0 if piece.source_rows is None else piece.source_rows[0]
    first = chunk.rows[0] - (piece.target_rows or (0, 0))[0] + source_row
    if bundle.granularity == "block":
        blocks = scale.view(bundle.shape[0], -1, 1)[first : first + values.shape[0]]
        return values.view(values.shape[0], blocks.shape[1], -1).mul_(blocks).view(values.shape)
    if is_whole(target, piece):
        return values.mul_(scale.view(1, -1))
    return values.mul_(scale[first : first + values.shape[0]].view(-1, *[1] * (values.ndim - 1)))


def _assemble_model(plan: Plan, tensors: dict[str, torch.Tensor], device: torch.device) -> nn.Module:
    """Build the class and put every tensor in its place."""
    model = build_with_buffers(plan.origin.model, plan.origin.config)
    compute_dtype = getattr(torch, plan.compute_dtype)
    for module in plan.modules:
        if module.codec is not None:
            quantise_module_(model.get_submodule(module.path), codec_named(module.codec), compute_dtype)
    for target in plan.targets:
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
    quantised = any(module.codec is not None for module in plan.modules)
    return mark_quantised_(model) if quantised else model


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _put_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, leaf = _owner(model, name)
    old = module._parameters[leaf]
    trainable = old is not None and old.requires_grad and tensor.dtype.itemsize > 1 and tensor.is_floating_point()
    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=trainable)


def _put_buffer(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, leaf = _owner(model, name)
    module._buffers[leaf] = tensor


def _tie(model: nn.Module, name: str, first: str) -> None:
    owner, leaf = _owner(model, first)
    module, own_leaf = _owner(model, name)
    kind = "_parameters" if leaf in owner._parameters else "_buffers"
    getattr(module, kind)[own_leaf] = getattr(owner, kind)[leaf]
