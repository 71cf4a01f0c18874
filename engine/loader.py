"""Executes a plan: reads in file order, casts in chunks, and puts the results into the model. Decides nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import nn

from slipcast.engine.chunks import piece_rows, rows_of, share
from slipcast.engine.codecs import native
from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.computed_rows import undone
from slipcast.engine.fetching import Fetcher, WindowReader
from slipcast.engine.file_codec import part_tensors
from slipcast.engine.file_weight import FileWeight
from slipcast.engine.kernels.operators import without_kernels
from slipcast.engine.placing import build_model, finished, place
from slipcast.engine.plan import Piece, Plan, Target
from slipcast.engine.prefetch import PrefetchFetcher
from slipcast.engine.reader import Reader, open_reader, torch_dtype, with_own_storage
from slipcast.engine.reading import Reading
from slipcast.engine.seen_values import SeenValues, not_finite
from slipcast.engine.slabs import SlabFetcher
from slipcast.engine.steps import Step, steps
from slipcast.engine.windows import Window, windows
from slipcast.engine.workers import workers
from slipcast.registry.errors import Cancelled, QuantisationError
from slipcast.registry.header import Header
from slipcast.registry.quantisation import Bundle, assemble
from slipcast.registry.side_tensors import INPUT_SCALE

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


class _Work:
    """What a running load holds.

    Attributes:
        tensors: stored name -> tensor, as they fill.
        notes: what a user should know of the values that were read.
    """

    def __init__(
        self,
        plan: Plan,
        bundles: Mapping[str, Bundle],
        reader: Reader,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self.plan, self.bundles, self.reader = plan, bundles, reader
        self.device = torch.device(plan.device)
        self.model: nn.Module | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._progress, self._cancelled = progress, cancelled
        self.notes = SeenValues()
        self._local = threading.local()
        self._scaled: set[str] = set()
        self._read = 0

    def weight(self, target: Target, piece: Piece) -> FileWeight:
        """The weight of the file that a target's piece is cut from. Codes that stay in the mapped file are not read."""
        codec = None if piece.codec is None else codec_named(piece.codec)
        bundle = self.bundles[piece.source]
        return FileWeight(bundle, codec, piece.shape, self.reader, self.device, self.notes, codes_stay=target.mapped)

    def allocate(self) -> None:
        """Allocate the tensors of the result, in the caller's thread."""
        _warm_up(self.device, self.plan.bytes.resident)
        for target in self.plan.targets:
            for stored in target.stored[int(target.mapped) :] if target.pieces else ():
                dtype = getattr(torch, stored.dtype)
                self.tensors[stored.name] = torch.empty(stored.shape, dtype=dtype, device=self.device)

    def stored(self, target: Target, index: int) -> torch.Tensor:
        """A tensor of the result."""
        return self.tensors[target.stored[index].name]

    def scratch(self, elements: int) -> torch.Tensor:
        """A float32 buffer of at least so many elements, reused; each thread has its own."""
        found: torch.Tensor | None = getattr(self._local, "scratch", None)
        if found is None or found.numel() < elements:
            found = self._local.scratch = None  # the old one goes before the new one comes
            found = self._local.scratch = torch.empty(elements, dtype=torch.float32, device=self.device)
        return found

    def report(self, step: Step) -> None:
        """Count rows that were read, and once the scales of their weight; let the caller know, and stop.

        Raises:
            Cancelled: the caller said so.
        """
        if not step.rows:
            return
        for piece, rows in step.rows:
            bundle = self.bundles[piece.source]
            self._read += share(bundle, piece, rows)
            if piece.codec is not None and piece.source not in self._scaled:
                self._scaled.add(piece.source)
                tensors = part_tensors(bundle, codec_named(piece.codec))
                self._read += sum(tensor.nbytes for name, tensor in tensors.items() if name != CODES)
        total = self.plan.bytes.read
        if self._progress is not None:
            self._progress(self._read, total)
        if self._cancelled is not None and self._cancelled():
            raise Cancelled(
                f"the load was cancelled after {self._read:,} of {total:,} bytes",
                expected="a load that runs to its end",
                hint="nothing of it is left; load again when wanted",
            )

    def seen(self) -> tuple[str, ...]:
        """What a user should know of the values that were read, as sentences."""
        damage = not_finite(self.notes.suspects(), self.tensors)
        if damage is not None:
            self.notes.add(damage)
        return self.notes.sentences()

    def close(self) -> None:
        """Let go of everything, also where an error's traceback still holds this object."""
        self.reader.close()
        self.model = None
        self.tensors = {}
        self._local = threading.local()


def _warm_up(device: torch.device, nbytes: int) -> None:
    """Let torch ask the driver once for what the result takes beyond what torch has at hand; each request is slow."""
    if device.type == "cuda":
        at_hand = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        torch.empty(max(nbytes - at_hand, 0), dtype=torch.uint8, device=device)


def execute(
    plan: Plan,
    header: Header,
    *,
    take_model: Callable[[], nn.Module | None] = lambda: None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Load what a plan describes.

    Args:
        plan: made for this header.
        header: the file's header.
        take_model: gives the model that the plan was made on, which nobody else may hold; None has it built.
        progress: called after each chunk.
        cancelled: asked after each chunk.

    Returns:
        The model in eval mode, on the plan's device, no tensor of it left on the meta device; and what a user should
        know of the values that were read, as sentences.

    Raises:
        Cancelled: ``cancelled`` said so.
        HeaderError: the file changed under the load.
        QuantisationError: values that can't be quantised, scales that can't be.
    """
    reading = Reading.of(plan.settings)
    bundles = assemble(header).weights
    _prepare_encoding(plan, bundles, reading.threads)  # it takes a while, with no file held open
    work = _Work(plan, bundles, _open(plan, header, bundles, reading), progress, cancelled)
    try:
        if isinstance(work.reader, WindowReader):
            work.reader.start()
        work.model = build_model(plan, take_model())  # this and what follows while the first windows are being read
        work.allocate()
        place(plan, work.model, work.tensors, mapped=False)
        with without_kernels():
            for step in _read(work, reading):
                work.report(step)
        _refuse_not_finite(work)
        place(plan, work.model, work.tensors, mapped=True)
        return finished(plan, work.model, work.tensors), work.seen()
    finally:
        work.close()


def _prepare_encoding(plan: Plan, bundles: Mapping[str, Bundle], threads: int) -> None:
    """Have rows encoded by a compiled loop where so many of them are, by each thread, that this saves time."""
    if torch.device(plan.device).type != "cpu":
        return
    elements: Counter[torch.dtype] = Counter()
    for target in plan.targets:
        if target.how == "encode" and isinstance(_codec(target), Float8):
            for piece in target.pieces:
                dtype = torch.float32 if piece.codec else torch_dtype(bundles[piece.source].weight)
                elements[dtype] += prod(piece.shape)
    for dtype, count in elements.items():
        if count // threads >= native.WORTHWHILE:
            native.prepare(dtype)


def _open(plan: Plan, header: Header, bundles: Mapping[str, Bundle], reading: Reading) -> Reader:
    """The reader that the plan has decided on."""
    if not reading.ahead_mib:
        return open_reader(header, mmap=reading.mapped)
    device = torch.device(plan.device)
    taken = steps(plan.targets, bundles, reading.chunk_mib)
    cut = list(windows(taken, bundles, reading.window_bytes, prefetch=reading.prefetch))
    pinned = device.type == "cuda" and not reading.prefetch
    fetcher = _fetcher(header, bundles, device, reading, cut)
    return WindowReader(header, bundles, fetcher, cut, under_way=reading.windows, pinned=pinned)


def _fetcher(
    header: Header, bundles: Mapping[str, Bundle], device: torch.device, reading: Reading, cut: Sequence[Window]
) -> Fetcher:
    if reading.prefetch:
        return PrefetchFetcher(header, bundles, device, threads=reading.threads)
    size, count = max((window.nbytes for window in cut), default=0), min(reading.windows, len(cut))
    return SlabFetcher(header, bundles, device, size=size, count=count, threads=reading.threads)


def _read(work: _Work, reading: Reading) -> Iterator[Step]:
    """Do all steps, and say of each that it is done.

    On a GPU they are done in the caller's thread and stream: what takes long there are reads and copies, which others
    do ahead. CUDA's workspace for products of matrices is then the one that the model will need.
    """
    if isinstance(work.reader, WindowReader):
        for window in work.reader.in_turn():
            for step in window.steps:
                yield _do(work, step)
        return
    adopted = all(target.mapped or not target.pieces for target in work.plan.targets)  # there is nothing to share out
    with workers(1 if adopted else reading.threads) as done:
        yield from done(partial(_do, work, step) for step in steps(work.plan.targets, work.bundles, reading.chunk_mib))


def _do(work: _Work, step: Step) -> Step:
    """Do one step, in whatever thread."""
    with torch.no_grad():
        if step.action == "fill":
            _fill(work, step)
        elif step.action == "keep":
            _keep_rows(work, step)
        elif step.action == "sort":
            _keep_sorted(work, step)
        else:
            _keep_static_scale(work, step.target)
    return step


def _fill(work: _Work, step: Step) -> None:
    """Bring one chunk of the file into the tensor that a target is stored in, or quantise it."""
    target, piece, chunk = step.only
    dtype = torch.float32 if target.how == "encode" else getattr(torch, target.stored[0].dtype)
    values = work.weight(target, piece).values(*chunk.rows, dtype)
    rows = slice(*chunk.target_rows)
    values = undone(values, piece.operation)
    values = values.reshape((rows.stop - rows.start, *target.shape[1:]) if target.shape else ())
    if target.mapped:
        work.tensors[target.stored[0].name] = with_own_storage(values)
    elif target.how == "encode":
        _encode(work, target, values, rows)
    else:
        out = _rows(work.stored(target, 0), rows)
        if out.is_cuda or values.dtype != out.dtype:
            work.notes.look_at(target.stored[0].name, values)
        out.copy_(values)


def _rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _encode(work: _Work, target: Target, values: torch.Tensor, rows: slice) -> None:
    """Quantise rows into the parts of a weight, or a whole weight where its codec needs all rows at once."""
    codec = _codec(target)
    with _named(target):
        if codec.streams:
            out = {name: work.stored(target, index)[rows] for index, name in enumerate(_parts(target))}
            scratch = work.scratch(0 if codec.defers(work.device) else values.numel())
            codec.encode_rows_into(values, out, scratch)
        else:
            for index, part in enumerate(codec.encode(values.contiguous()).values()):
                work.stored(target, index).copy_(part)


def _refuse_not_finite(work: _Work) -> None:
    """Look at what was encoded without being looked at, all at once, so that the device is waited for a single time."""
    encoded = [target for target in work.plan.targets if target.how == "encode" and _codec(target).defers(work.device)]
    parts = [{name: work.stored(target, index) for index, name in enumerate(_parts(target))} for target in encoded]
    if not parts or bool(torch.cat([each[SCALE].flatten() for each in parts]).isfinite().all()):
        return
    for target, each in zip(encoded, parts, strict=True):
        with _named(target):
            _codec(target).refuse_not_finite(each)


def _codec(target: Target) -> Codec:
    return codec_named(target.codec or "")


def _parts(target: Target) -> Sequence[str]:
    return list(_codec(target).parts(target.shape))


@contextmanager
def _named(target: Target) -> Iterator[None]:
    """Say in errors which tensor it was."""
    try:
        yield
    except QuantisationError as error:
        raise QuantisationError(f"{target.name}: {error.found}", expected=error.expected, hint=error.hint) from error


def _keep_sorted(work: _Work, step: Step) -> None:
    """Put several ranges of rows of one weight one after another, or all of its rows in another order."""
    target, pieces = step.target, step.pieces
    parts = work.weight(target, pieces[0]).selected([piece_rows(piece) for piece in pieces], pieces[0].operation)
    for index, part in enumerate(parts.values()):
        work.stored(target, index).copy_(part)


def _keep_rows(work: _Work, step: Step) -> None:
    """Put the parts of some rows where the target keeps them; each row of a joined weight gets its part's one scale."""
    target, piece, chunk = step.only
    first, last = chunk.target_rows
    for index, (name, part) in enumerate(work.weight(target, piece).parts(*chunk.rows).items()):
        if target.mapped and name == CODES:
            work.tensors[target.stored[index].name] = with_own_storage(part).view(target.stored[index].shape)
            continue
        out = work.stored(target, index)
        if out.ndim:  # of a padded part the last rows have no row of the weight
            out = out[first : None if last == rows_of(target.shape) else last]
        out.copy_(part.view(out.shape) if part.ndim else part)


def _keep_static_scale(work: _Work, target: Target) -> None:
    """Take over the checkpoint's scale of activations, where the plan stores it; all pieces have the same."""
    for index, stored in enumerate(target.stored):
        if stored.name.rpartition(".")[2] == INPUT_SCALE:
            scale = work.bundles[target.pieces[0].source].sides[INPUT_SCALE]
            work.stored(target, index).copy_(work.reader.elements(scale, 0, 1).view(()))
