"""Windows that are read ahead, and both ways of fetching them, on a CPU: the bits of a plain load, and no remains."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors
import torch
from torch import nn

import slipcast
from slipcast.engine import loader, prefetch, reading
from slipcast.engine.plan import Plan
from slipcast.engine.prefetch import PrefetchFetcher
from slipcast.engine.reader import OpenFiles
from slipcast.engine.reading import Reading
from slipcast.engine.steps import spans, steps
from slipcast.engine.windows import most_under_way, windows
from slipcast.registry.errors import Cancelled, DeviceError, HeaderError
from slipcast.registry.header import TensorInfo
from slipcast.registry.inspection import identify_path
from slipcast.registry.quantisation import assemble
from slipcast.registry.safetensors_header import read_safetensors
from slipcast.registry.settings import resolve_settings
from support.fp8_checkpoints import KEPT, QUANTISED, Scaled, fp8_file
from support.isolation import isolate
from support.number_formats import bytes_of
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

CARD = "cuda:9.0,80GiB"
SOURCES = ["plain", "scaled", "blocks", "raw"]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


class _Loader:
    """What safetensors documents of its ``PrefetchLoader``, on the CPU: each tensor once, until it is closed."""

    open: ClassVar[list[_Loader]] = []

    def __init__(self, file: Any, plan: Mapping[str, slice | None]) -> None:
        self._file, self._plan = file, dict(plan)
        assert plan, "prefetch plan selects no tensors"
        self.open.append(self)

    def take(self, name: str) -> torch.Tensor:
        rows = self._plan.pop(name)
        assert rows is None or rows.step is None
        return self._file.get_tensor(name) if rows is None else self._file.get_slice(name)[rows]

    def close(self) -> None:
        self.open.remove(self)


class _File:
    real = safetensors.safe_open

    def __init__(self, path: str, framework: str, *, backend: str) -> None:
        assert backend == "pread"
        self._file = self.real(path, framework)

    def prefetch(self, plan: Mapping[str, slice | None], *, device: str, threads: int) -> _Loader:
        assert (device, threads) == ("cpu", 3)
        return _Loader(self._file.__enter__(), plan)

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)


class _OtherArguments(_File):
    def prefetch(self, plan: Mapping[str, slice | None], *, device: str) -> _Loader:  # type: ignore[override]
        raise NotImplementedError


class _OtherOpening(_File):
    def __init__(self, path: str, framework: str) -> None:
        raise NotImplementedError


class _Unsaid(_File):
    prefetch = max  # type: ignore[assignment]


@pytest.fixture
def _prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch.safetensors, "safe_open", _File)
    _Loader.open.clear()


def _source(tmp_path: Path, name: str) -> Path:
    tensors = tiny_tensors()
    path = tmp_path / f"{name}.safetensors"
    if name == "plain":
        return write_native(path, tensors, prefix="model.diffusion_model.")
    if name == "scaled":
        scaled = fp8_file(tensors, QUANTISED[::2], Scaled(""))
        for layer in (*QUANTISED[1::2], *KEPT):
            scaled.scale_layer(layer, Scaled("N", "old"))
        return scaled.write(path)
    if name == "blocks":
        return fp8_file(tensors, QUANTISED, Scaled("NB1")).write(path)
    raw = fp8_file(tensors)
    for each in list(raw.native):
        raw.cast(each)
    return raw.write(path)


def _planned(path: Path, reader: str, **settings: Any) -> Plan:
    """A plan for a card, to be executed on the CPU."""
    settings = {"dtype": "bfloat16", "threads": 3, "chunk_mib": 1, "ahead_mib": 1} | settings
    plan = slipcast.plan(path, device=CARD, reader=reader, **settings)
    assert plan.settings["reader"].engaged == reader
    return plan.model_copy(update={"device": "cpu"})


def _execute(path: Path, plan: Plan, **options: Any) -> nn.Module:
    return loader.execute(plan, identify_path(path, resolve_settings().values).main.header, **options)[0]


def _bits(model: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (tensor.dtype, bytes_of(tensor).tobytes()) for name, tensor in model.state_dict().items()}


@pytest.mark.usefixtures("_prefetching")
@pytest.mark.parametrize("reader", ["slabs", "prefetch"])
@pytest.mark.parametrize("fp8", ["auto", "off", "storage"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_load_in_windows_has_the_bits_of_a_plain_one(tmp_path: Path, source: str, fp8: str, reader: str) -> None:
    path = _source(tmp_path, source)
    done: list[tuple[int, int]] = []
    plan = _planned(path, reader, fp8=fp8)
    model = _execute(path, plan, progress=lambda read, total: done.append((read, total)))
    assert _bits(model) == _bits(slipcast.load(path, device="cpu", dtype="bfloat16", fp8=fp8).model)
    assert done[-1] == (plan.bytes.read, plan.bytes.read)
    assert not _Loader.open
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slipcast")]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("prefetch", [False, True], ids=["slabs", "prefetch"])
def test_windows_hold_what_their_steps_read_and_no_more(tmp_path: Path, source: str, prefetch: bool) -> None:
    path, size = _source(tmp_path, source), 12_000
    plan = _planned(path, "slabs")
    bundles = identify_path(path, resolve_settings().values).main.everything.weights
    taken = list(steps(plan.targets, bundles, 1))
    cut = list(windows(taken, bundles, size, prefetch=prefetch))
    assert [step for window in cut for step in window.steps] == taken
    assert len(cut) > 3
    held = 0
    for window in cut:
        held += sum(span.nbytes for span in window.spans)
        places = {span.source: span for span in window.spans}
        assert len(places) == len(window.spans)
        assert window.nbytes <= size or (prefetch and len(window.steps) == 1)
        for step in window.steps:
            for span in spans(step, bundles):
                if not prefetch and span.nbytes > size:
                    continue
                assert places[span.source].first <= span.first <= span.last <= places[span.source].last
    alone = sum(span.nbytes for step in taken for span in spans(step, bundles) if not prefetch and span.nbytes > size)
    assert (alone > 0) != prefetch
    weights = sum(span.nbytes for step in taken for span in spans(step, bundles))
    assert held + alone == weights  # nothing is read twice
    assert most_under_way(cut, 1) == max(window.nbytes for window in cut)
    assert most_under_way(cut, len(cut)) == sum(window.nbytes for window in cut)


@pytest.mark.usefixtures("_prefetching")
@pytest.mark.parametrize("reader", ["slabs", "prefetch"])
def test_a_cancelled_load_in_windows_leaves_nothing(tmp_path: Path, reader: str) -> None:
    path = _source(tmp_path, "plain")
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 7

    with pytest.raises(Cancelled):
        _execute(path, _planned(path, reader), cancelled=cancelled)
    assert len(asked) == 7
    assert not _Loader.open
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slipcast")]


def _truncated_before(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


@pytest.mark.usefixtures("_prefetching")
@pytest.mark.parametrize("reader", ["slabs", "prefetch"])
def test_a_truncated_file_is_refused(tmp_path: Path, reader: str) -> None:
    path = _source(tmp_path, "plain")
    plan = _planned(path, reader)
    header = identify_path(path, resolve_settings().values).main.header
    _truncated_before(path)
    with pytest.raises(HeaderError) as caught:
        loader.execute(plan, header)
    assert "bytes where its header needs" in caught.value.found
    assert not _Loader.open


@pytest.mark.usefixtures("_prefetching")
@pytest.mark.parametrize(
    ("fault", "error", "found"),
    [
        ("truncate", HeaderError, "bytes where its header needs"),
        ("exchange", HeaderError, "came as torch.int8"),
        ("fail", DeviceError, "safetensors' prefetch failed: cuda error 2"),
    ],
)
def test_what_goes_wrong_while_prefetching_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception], found: str
) -> None:
    path = _source(tmp_path, "plain")
    plan = _planned(path, "prefetch")
    take: Callable[..., torch.Tensor] = _Loader.take

    def faulty(self: _Loader, name: str) -> torch.Tensor:
        if fault == "exchange":
            return take(self, name).to(torch.int8)
        if fault == "truncate":
            _truncated_before(path)
        raise safetensors.SafetensorError("cuda error 2")

    monkeypatch.setattr(_Loader, "take", faulty)
    with pytest.raises(error) as caught:
        _execute(path, plan)
    assert found in str(caught.value)
    assert not _Loader.open


def test_a_failure_is_said_also_while_a_thread_opens_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = PrefetchFetcher(read_safetensors(_source(tmp_path, "plain")), {}, torch.device("cpu"), threads=1)
    fetcher._files = {0: None}
    monkeypatch.setattr(prefetch, "checked_size", lambda _, index: fetcher._files.update({index + 1: None}))
    assert "cuda error 2" in fetcher.failed(safetensors.SafetensorError("cuda error 2")).found


def test_a_file_that_shrinks_under_the_slabs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _source(tmp_path, "plain")
    plan = _planned(path, "slabs", threads=1)
    read = OpenFiles.read_into

    def shrunk(self: OpenFiles, view: memoryview, tensor: TensorInfo, first: int) -> None:
        self._file(tensor.file)  # it is opened while it is whole
        with path.open("r+b") as file:
            file.truncate(tensor.start + first + len(view) - 1)
        read(self, view, tensor, first)

    monkeypatch.setattr(OpenFiles, "read_into", shrunk)
    with pytest.raises(HeaderError) as caught:
        _execute(path, plan)
    assert "the file has changed since its header was read: it ends inside" in caught.value.found


@pytest.mark.parametrize(
    ("requested", "device", "obstacle", "engaged", "reason"),
    [
        ("auto", CARD, None, "prefetch", "the installed safetensors has it"),
        ("auto", CARD, "no prefetch", "slabs", "no prefetch"),
        ("prefetch", CARD, None, "prefetch", "as requested"),
        ("prefetch", CARD, "no prefetch", "slabs", "no prefetch"),
        ("slabs", CARD, None, "slabs", "as requested"),
        ("prefetch", "cpu", None, "file", "the CPU reads it as mmap says"),
    ],
)
def test_the_plan_decides_who_reads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    device: str,
    obstacle: str | None,
    engaged: str,
    reason: str,
) -> None:
    monkeypatch.setattr(reading, "prefetch_obstacle", lambda: obstacle)
    decision = slipcast.plan(_source(tmp_path, "plain"), device=device, reader=requested).settings["reader"]
    assert decision.model_dump() == {"requested": requested, "engaged": engaged, "reason": reason}


def test_a_file_of_which_tensors_begin_at_odd_bytes_is_not_prefetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "prefetch_obstacle", lambda: None)
    path = _source(tmp_path, "plain")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    decision = slipcast.plan(path, device=CARD).settings["reader"]
    assert decision.engaged == "slabs"
    assert "begins at no whole item" in decision.reason


@pytest.mark.usefixtures("_prefetching")
def test_a_few_tensors_at_odd_bytes_are_read_beside_what_is_prefetched(tmp_path: Path) -> None:
    path = _source(tmp_path, "plain")
    plain = _bits(slipcast.load(path, device="cpu", dtype="bfloat16").model)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    smallest = min((name for name in header if name != "__metadata__"), key=lambda name: _size(header[name]))
    first, last = header[smallest]["data_offsets"]
    end = len(data) - 8 - length
    header[smallest]["data_offsets"] = [end + 1, end + 1 + last - first]
    header["hole"] = {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]}
    header["odd"] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = data[8 + length :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + b"\0" + body[first:last])
    plan = _planned(path, "prefetch", unexpected=["hole", "odd"])
    assert plan.settings["reader"].engaged == "prefetch"
    assert _bits(_execute(path, plan)) == plain


def _size(tensor: Mapping[str, Any]) -> int:
    first, last = tensor["data_offsets"]
    return last - first


def test_prefetch_is_found_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch.safetensors, "safe_open", _File)
    assert prefetch.prefetch_obstacle() is None
    monkeypatch.setattr(prefetch.safetensors, "safe_open", object)
    assert prefetch.prefetch_obstacle() == f"safetensors {safetensors.__version__} has no prefetch"
    for changed in (_OtherArguments, _OtherOpening, _Unsaid):
        monkeypatch.setattr(prefetch.safetensors, "safe_open", changed)
        assert "has another prefetch than the one known here" in (prefetch.prefetch_obstacle() or "")
    monkeypatch.setattr(prefetch.safetensors, "safe_open", _File)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert prefetch.prefetch_obstacle() == "safetensors prefetches to CUDA devices alone"


@pytest.mark.parametrize("threads", [1, 2, 8, 16])
@pytest.mark.parametrize("header", ["z-image-turbo--comfy-bf16", "z-image-turbo--kijai-fp8-scaled"])
def test_by_default_every_chunk_of_a_full_size_file_fits_a_slab(tmp_path: Path, header: str, threads: int) -> None:
    """What does not fit is read by the thread that casts, alone: at a fraction of the speed."""
    path = write_checkpoint(recorded(header), tmp_path / f"{header}.safetensors")
    plan = slipcast.plan(path, device="cuda:9.0,80GiB", fp8="storage", reader="slabs", threads=threads)
    size = Reading.of(plan.settings).window_bytes
    bundles = assemble(read_safetensors(path)).weights
    taken = steps(plan.targets, bundles, int(plan.settings["chunk_mib"].engaged))
    largest = max(span.nbytes for step in taken for span in spans(step, bundles))
    assert size // 8 < largest <= size
