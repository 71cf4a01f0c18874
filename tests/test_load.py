"""Loading plain checkpoints: values, dtypes and bytes for every layout and setting, and what a load leaves behind."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import slipcast
from slipcast.engine import chunks
from slipcast.engine.codecs.float8 import Float8
from slipcast.registry.errors import Cancelled, HeaderError, QuantisationError
from slipcast.registry.header import Header
from support.fp8_checkpoints import KEPT, decoded
from support.isolation import isolate
from support.number_formats import relative_l2
from support.tiny_z_image import Tensors, natively, tiny_tensors, write_folder

PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("files")
    written: dict[tuple[str, str], Path] = {}
    for layout, prefix in itertools.product(("native", "diffusers"), ("", PREFIX)):
        names = natively(tensors) if layout == "native" else tensors
        path = folder / f"{layout}{bool(prefix)}.safetensors"
        save_file({prefix + name: tensor.contiguous() for name, tensor in names.items()}, path)
        written[layout, prefix] = path
    return written


def _actual_bytes(model: nn.Module) -> int:
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def _quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "weight_scale")}


def _check_values(model: nn.Module, tensors: Tensors, dtype: torch.dtype) -> None:
    """Every tensor against what was written: exact where it is only cast, decoded with its scale where it is codes."""
    held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, expected in tensors.items():
        scale = held.pop(name.removesuffix(".weight") + ".weight_scale", None)
        tensor = held.pop(name)
        if scale is None:
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected.to(dtype)), name
            continue
        assert (tensor.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, expected.shape[:1])
        values = decoded(tensor, scale)
        assert relative_l2(values, expected) <= 0.03, name
        layer: Any = model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(layer.dequantised_weight(), values.to(dtype)), name
    assert held == {}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fp8", ["off", "storage"])
@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_what_is_predicted_is_what_is_loaded(
    files: dict[tuple[str, str], Path],
    tensors: Tensors,
    layout: str,
    prefix: str,
    fp8: str,
    dtype: str,
    mmap: bool,
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": dtype, "fp8": fp8, "mmap": mmap}
    plan = slipcast.plan(files[layout, prefix], **settings)
    loaded = slipcast.load(files[layout, prefix], **settings)
    assert loaded.report.plan == plan
    assert (plan.origin.layout, plan.origin.prefix) == (layout, prefix)
    assert loaded.report.differences == ()
    assert loaded.report.resident == plan.bytes.resident == _actual_bytes(loaded.model)
    assert not loaded.model.training
    assert len(_quantised_layers(loaded.model)) == (0 if fp8 == "off" else 42)
    _check_values(loaded.model, tensors, getattr(torch, dtype))
    assert slipcast.compute_dtype(loaded.model) == loaded.model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_a_folder(tmp_path: Path, tensors: Tensors, fp8: str) -> None:
    loaded = slipcast.load(write_folder(tmp_path / "folder", tensors), device="cpu", dtype="bfloat16", fp8=fp8)
    assert loaded.report.differences == ()
    _check_values(loaded.model, tensors, torch.bfloat16)


@pytest.mark.parametrize(
    ("mmap", "rows", "threads"), [(True, 1, 1), (False, 7, 1), (True, 64, 1), (True, 9, 3), (False, 9, 3)]
)
def test_the_size_and_number_of_chunks_change_nothing(
    files: dict[tuple[str, str], Path],
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    mmap: bool,
    threads: int,
) -> None:
    path = files["native", PREFIX]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "mmap": mmap}
    whole = {fp8: slipcast.load(path, fp8=fp8, threads=1, **settings).model.state_dict() for fp8 in ("off", "storage")}
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    for fp8, expected in whole.items():
        model = slipcast.load(path, fp8=fp8, threads=threads, **settings).model
        _check_values(model, tensors, torch.float32)
        assert _same_bits(model.state_dict(), expected)


def _same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor.detach().view(torch.uint8), second[name].detach().view(torch.uint8))
        for name, tensor in first.items()
    )


def test_uncast_tensors_are_views_of_the_mapped_file(files: dict[tuple[str, str], Path]) -> None:
    plan = slipcast.plan(files["native", ""], device="cpu", dtype="bfloat16")
    assert all(target.mapped for target in plan.targets)
    assert plan.bytes.host_peak_anonymous == 0
    copied = slipcast.plan(files["native", ""], device="cpu", dtype="bfloat16", mmap=False)
    assert not any(target.mapped for target in copied.targets)
    assert copied.bytes.host_peak_anonymous > copied.bytes.resident
    other = slipcast.plan(files["native", ""], device="cpu", dtype="float32")
    assert not any(target.mapped for target in other.targets)


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "m.safetensors"
    save_file(natively(tensors), path)
    before = path.read_bytes()
    model = slipcast.load(path, device="cpu", dtype="bfloat16").model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert path.read_bytes() == before


def test_without_mapping_a_model_survives_its_file(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "m.safetensors"
    save_file(natively(tensors), path)
    model = slipcast.load(path, device="cpu", dtype="bfloat16", mmap=False).model
    path.write_bytes(b"\0" * 100)
    _check_values(model, tensors, torch.bfloat16)


def test_tensors_that_do_not_lie_at_whole_items(tmp_path: Path, tensors: Tensors) -> None:
    """A U8 tensor of odd length before them shifts all bf16 values to odd addresses."""
    import json
    import struct

    native = natively(tensors)
    header: dict[str, Any] = {"odd": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}
    data = bytearray(3)
    for name, tensor in native.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    for fp8, mmap in itertools.product(("off", "storage"), (True, False)):
        loaded = slipcast.load(path, device="cpu", dtype="bfloat16", fp8=fp8, mmap=mmap, unexpected=["odd"])
        assert not any(target.mapped for target in loaded.report.plan.targets)
        assert loaded.report.differences == ()
        _check_values(loaded.model, tensors, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floats_are_cast_once(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tiny_tensors(dtype)
    save_file(natively(tensors), tmp_path / "m.safetensors")
    for target in ("float32", "bfloat16"):
        model = slipcast.load(tmp_path / "m.safetensors", device="cpu", dtype=target).model
        _check_values(model, tensors, getattr(torch, target))


@pytest.mark.parametrize(("mmap", "threads"), [(True, 1), (False, 1), (True, 3), (False, 3)])
@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_progress_rises_to_the_bytes_that_the_plan_says(
    files: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch, fp8: str, mmap: bool, threads: int
) -> None:
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: 50)
    steps: list[tuple[int, int]] = []
    path = files["native", ""]
    settings = {"device": "cpu", "dtype": "bfloat16", "fp8": fp8, "mmap": mmap, "threads": threads}
    loaded = slipcast.load(path, progress=lambda *step: steps.append(step), **settings)
    assert loaded.report.differences == ()
    total = loaded.report.plan.bytes.read
    done = [step for step, _ in steps]
    assert {of for _, of in steps} == {total}
    assert done == sorted(set(done))
    assert done[-1] == total
    assert total == sum(tensor.nbytes for tensor in natively(tiny_tensors()).values())


@pytest.mark.parametrize(("after", "threads"), [(1, 1), (2, 1), (40, 1), (1, 3), (20, 3)])
def test_a_cancelled_load_leaves_nothing(
    files: dict[tuple[str, str], Path], after: int, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipcast")
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) == after

    gc.collect()
    before = _big_tensors()
    settings = {"device": "cpu", "dtype": "float32", "fp8": "storage", "threads": threads}
    with pytest.raises(Cancelled) as caught:
        slipcast.load(files["native", ""], cancelled=cancelled, **settings)
    assert len(asked) == after
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slipcast-load")]
    assert "the load was cancelled after" in caught.value.found
    assert caught.value.hint == "nothing of it is left; load again when wanted"
    assert _big_tensors() <= before + 1  # at most the chunk that the traceback still names
    assert caplog.records == []


def _big_tensors() -> int:
    return sum(type(thing) in (torch.Tensor, nn.Parameter) and thing.numel() > 1000 for thing in gc.get_objects())


def test_one_line_says_what_was_loaded(files: dict[tuple[str, str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipcast")
    loaded = slipcast.load(files["native", ""], device="cpu", dtype="float16", fp8="storage")
    (record,) = caplog.records
    line = record.getMessage()
    assert (record.levelname, record.name) == ("INFO", "slipcast")
    mib = f"{loaded.report.resident / 2**20:,.1f} MiB"
    assert line.startswith("z-image (base): storage fp8, compute float32, ")
    assert f"{mib} predicted, {mib} resident on cpu, 42 modules quantised, 3 kept in float32" in line
    assert "[dtype=float16 became float32: activations of this family overflow float16]" in line
    caplog.clear()
    slipcast.load(files["native", ""], device="cpu", dtype="bfloat16")
    (record,) = caplog.records
    assert "storage bfloat16, compute bfloat16" in record.getMessage()
    assert "became" not in record.getMessage()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("deferred", [False, True])
def test_values_that_no_scale_fits_are_refused_by_name(
    tmp_path: Path, tensors: Tensors, value: float, threads: int, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if deferred:  # as on a GPU
        monkeypatch.setattr(Float8, "defers", lambda *_: True)
    native = {name: tensor.clone() for name, tensor in natively(tensors).items()}
    native["layers.1.attention.qkv.weight"][70, 3] = value
    save_file(native, tmp_path / "m.safetensors")
    with pytest.raises(QuantisationError) as caught:
        slipcast.load(tmp_path / "m.safetensors", device="cpu", fp8="storage", threads=threads)
    assert caught.value.found.startswith("layers.1.attention.to_k.weight: a weight with values that are not finite")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_shorter_than_its_header_said_is_an_error(
    tmp_path: Path, tensors: Tensors, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _truncated_after_its_header_was_read(tmp_path, tensors, monkeypatch, keep=1000)
    with pytest.raises(HeaderError) as caught:
        slipcast.load(path, device="cpu", dtype="float32", mmap=mmap)
    assert "the file has changed since its header was read: it has" in caught.value.found
    assert "wait until the download or copy is complete" in caught.value.hint


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "m.safetensors"
    save_file(natively(tensors), path)

    def shrink(done: int, total: int) -> None:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)

    with pytest.raises(HeaderError, match="it ends inside"):
        slipcast.load(path, device="cpu", dtype="float32", mmap=False, threads=1, progress=shrink)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _truncated_after_its_header_was_read(tmp_path, tensors, monkeypatch, keep=None)
    with pytest.raises(HeaderError, match="it can't be opened"):
        slipcast.load(path, device="cpu", dtype="float32")


def _truncated_after_its_header_was_read(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, keep: int | None
) -> Path:
    from slipcast.engine import loader

    path = tmp_path / "m.safetensors"
    save_file(natively(tensors), path)
    execute = loader.execute

    def late(plan: slipcast.Plan, header: Header, **options: Any) -> nn.Module:
        if keep is None:
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(keep)
        return execute(plan, header, **options)[0]

    monkeypatch.setattr(loader, "execute", late)
    return path


def test_shards_are_read_one_by_one(tmp_path: Path, tensors: Tensors) -> None:
    import json

    names = list(tensors)
    folder = tmp_path / "shards"
    folder.mkdir()
    weight_map = {name: f"model-0000{1 + index % 3}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for mmap in (True, False):
        loaded = slipcast.load(folder, device="cpu", dtype="bfloat16", mmap=mmap)
        assert loaded.report.differences == ()
        _check_values(loaded.model, tensors, torch.bfloat16)


def test_the_layers_that_the_family_keeps_stay_plain(files: dict[tuple[str, str], Path]) -> None:
    model = slipcast.load(files["native", ""], device="cpu", dtype="bfloat16", fp8="storage").model
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - _quantised_layers(model).keys() == set(KEPT)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def test_loading_twice_gives_equal_bits_in_memory_of_their_own(files: dict[tuple[str, str], Path]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "fp8": "storage", "mmap": False}
    first, second = (slipcast.load(files["native", ""], **settings).model for _ in range(2))
    assert _same_bits(first.state_dict(), second.state_dict())
    places = [{tensor.data_ptr() for tensor in _tensors_of(model)} for model in (first, second)]
    assert places[0].isdisjoint(places[1])
