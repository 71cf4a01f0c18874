"""Valid headers: what is read from them, against safetensors' own writer and reader."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slipcast.registry.checkpoint import read_tensor_bytes
from slipcast.registry.dtypes import DTYPE_BITS, is_float, item_bits
from slipcast.registry.errors import SlipcastError
from slipcast.registry.safetensors_header import read_safetensors
from support.raw_safetensors import entry, write_raw
from support.recorded import recorded, recorded_names, write_checkpoint

NUMPY_DTYPES = ["bool", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"]
in_one_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def accepted_by_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    names = draw(st.lists(st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"), unique=True))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    result = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(NUMPY_DTYPES))
        result[name] = np.asarray(random.standard_normal(shape) * 10).astype(dtype)
    return result


@in_one_folder
@given(tensors=arrays(), metadata=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
def test_reads_what_safetensors_writes(tmp_path, tensors, metadata):
    path = tmp_path / "model.safetensors"
    save_file(
        tensors, path, metadata if tensors else None
    )  # neither tensors nor metadata: that writer's JSON is broken

    header = read_safetensors(path)

    with safe_open(path, "np") as oracle:
        assert set(header.tensors) == set(oracle.keys())
        assert dict(header.metadata) == (oracle.metadata() or {})
        for name, tensor in header.tensors.items():
            assert list(tensor.shape) == oracle.get_slice(name).get_shape()
            assert tensor.dtype == oracle.get_slice(name).get_dtype()
            assert read_tensor_bytes(header, tensor) == tensors[name].tobytes()
    starts = [(tensor.start, tensor.stop) for tensor in header.tensors.values()]
    assert starts == sorted(starts)
    assert not starts or starts[-1][1] == path.stat().st_size


@pytest.fixture(scope="module")
def valid_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "model.safetensors"
    tensors = {
        "a.weight": ("F32", (2, 3)),
        "a.scale": ("F32", ()),
        "b": ("BF16", (4,)),
        "empty": ("U8", (0, 7)),
        "é": ("I8", (3,)),
    }
    return write_checkpoint(tensors, path, fill="normal", metadata={"format": "pt", "a": "\u2028"}).read_bytes()


@settings(in_one_folder, max_examples=400)
@given(data=st.data())
def test_a_corrupted_file_is_refused_whenever_safetensors_refuses_it(tmp_path, valid_bytes, data):
    raw = bytearray(valid_bytes)
    header_end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        if not raw:
            break
        place = data.draw(st.integers(0, min(header_end, len(raw)) - 1))
        kind = data.draw(st.sampled_from(["replace", "json", "delete", "insert", "cut"]))
        byte = (
            data.draw(st.integers(0, 255))
            if kind != "json"
            else data.draw(st.sampled_from(b'{}[]",:0123456789-.eE\\ntu '))
        )
        if kind in ("replace", "json"):
            raw[place] = byte
        elif kind == "delete":
            del raw[place]
        elif kind == "insert":
            raw.insert(place, byte)
        else:
            del raw[place + 1 :]
        if kind in ("delete", "insert") and place >= 8:  # keep the declared length true, to get past the first check
            length = int.from_bytes(raw[:8], "little") + (1 if kind == "insert" else -1)
            raw[:8] = (length % 2**64).to_bytes(8, "little")
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)

    try:
        header = read_safetensors(path)
    except SlipcastError:
        return
    assert accepted_by_safetensors(path)
    with safe_open(path, "np") as oracle:
        assert set(header.tensors) == set(oracle.keys())


ODD_NUMBERS = ["-0", "-1", "1.0", "1e0", "18446744073709551616", "9" * 5000, "NaN", "null", '"4"', "true", "[4]"]
numbers = st.sampled_from(["0", "1", "2", "4", "8", "16"]) | st.sampled_from(ODD_NUMBERS)
fields = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ['"F32"', '"F4"', '"F6_E2M3"', '"U8"', '"BF16"', '"f32"', '"Q4_K"', "1", "null", '["F32"]']
        ),
        "shape": st.lists(numbers, max_size=3).map(lambda sizes: f"[{','.join(sizes)}]") | numbers,
        "data_offsets": st.lists(numbers, min_size=1, max_size=3).map(lambda ends: f"[{','.join(ends)}]"),
    }
)


@settings(in_one_folder, max_examples=400)
@given(
    entries=st.lists(st.tuples(st.sampled_from(["a", "b", "\\ud800", "__metadata__"]), fields), max_size=2),
    size=st.integers(0, 16),
)
def test_odd_numbers_and_types_are_refused_whenever_safetensors_refuses_them(tmp_path, entries, size):
    body = ",".join(
        f'"{name}":{{{",".join(f"{json.dumps(key)}:{value}" for key, value in entry.items())}}}'
        for name, entry in entries
    )
    path = write_raw(tmp_path / "model.safetensors", f"{{{body}}}".encode(), bytes(size))
    try:
        read_safetensors(path)
    except SlipcastError:
        return
    assert accepted_by_safetensors(path)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_takes_as_many_bits_as_safetensors_says(tmp_path, dtype):
    bytes_of_8 = item_bits(dtype)
    path = write_raw(tmp_path / "right.safetensors", {"w": entry(dtype, [2, 4], [0, bytes_of_8])}, bytes(bytes_of_8))
    assert read_safetensors(path).tensors["w"].nbytes == bytes_of_8
    assert accepted_by_safetensors(path)

    wrong = write_raw(
        tmp_path / "wrong.safetensors", {"w": entry(dtype, [2, 4], [0, 2 * bytes_of_8])}, bytes(2 * bytes_of_8)
    )
    assert not accepted_by_safetensors(wrong)


def test_kinds_of_dtypes():
    assert is_float("BF16")
    assert is_float("F4")
    assert not is_float("I8")
    assert not is_float("BOOL")


def test_tensors_come_in_the_order_of_their_bytes_and_empty_ones_are_legal(tmp_path):
    header = {
        "second": entry("U8", [4], [2, 6]),
        "empty": entry("F32", [3, 0], [2, 2]),
        "first": entry("U8", [2], [0, 2]),
        "last": entry("F32", [0], [6, 6]),
    }
    path = write_raw(tmp_path / "model.safetensors", header, b"abcdef")
    read = read_safetensors(path)
    assert list(read.tensors) == ["first", "empty", "second", "last"]
    assert read_tensor_bytes(read, read.tensors["second"]) == b"cdef"
    assert (read.nbytes, read.files, read.container) == (6, (path,), "safetensors")


def test_a_file_without_tensors_is_legal(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", b"{}")
    assert not read_safetensors(path).tensors
    assert accepted_by_safetensors(path)


@pytest.mark.parametrize("name", recorded_names())
def test_recorded_headers_are_read_as_they_were_recorded(tmp_path, name):
    record = recorded(name)
    header = read_safetensors(write_checkpoint(record, tmp_path / "model.safetensors"))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        name: (dtype or "BF16", shape) for name, (dtype, shape) in record.tensors.items()
    }
    assert dict(header.metadata) == dict(record.metadata)


def test_two_thousand_tensors_take_little_time_and_memory(tmp_path):
    path = write_checkpoint(recorded("qwen-image--comfy-bf16"), tmp_path / "model.safetensors")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        read_safetensors(path)
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    read_safetensors(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert min(times) < 0.1  # 7 ms on a quiet machine
    assert peak < 8 * 2**20
