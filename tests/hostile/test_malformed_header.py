"""Damaged and hostile safetensors files: each is refused with a message that says what is wrong."""

from __future__ import annotations

import tracemalloc

import pytest

from slipcast.registry.errors import HeaderError
from slipcast.registry.safetensors_header import read_safetensors
from support.raw_safetensors import entry, write_raw


def refused(path, **options) -> HeaderError:
    with pytest.raises(HeaderError) as caught:
        read_safetensors(path, **options)
    assert caught.value.path == str(path)
    return caught.value


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_an_empty_file(path):
    path.write_bytes(b"")
    error = refused(path)
    assert error.found == "the file is empty"
    assert "Download the file again" in error.hint
    assert "a safetensors or GGUF file" in error.expected


@pytest.mark.parametrize("size", [1, 7, 8])
def test_a_file_too_short_for_a_header(path, size):
    path.write_bytes(b"\x02" * size)
    assert f"the file is only {size} bytes long" in refused(path).found


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
def test_a_header_length_beyond_the_file(path, length):
    error = refused(write_raw(path, b"{}", length=length))
    assert f"the first 8 bytes say that the header takes {length} bytes, but only 2 follow" in error.found
    assert error.found.startswith("not a safetensors file, or a damaged one: ")


def test_a_file_that_ends_inside_its_header(path):
    error = refused(write_raw(path, b'{"a": {"dtype"', length=1000))
    assert "cut off inside its header, at least 986 bytes are missing" in error.found
    assert error.hint == "Download the file again."


def test_a_header_over_the_limit_is_not_read(path):
    write_raw(path, b"{}", length=3 * 2**20)
    with path.open("r+b") as file:
        file.truncate(8 + 3 * 2**20)
    tracemalloc.start()
    error = refused(path, limit_mib=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "the header takes 3145728 bytes" in error.found
    assert error.expected == "at most 2 MiB"
    assert "limit_mib" in error.hint
    assert peak < 2**20


@pytest.mark.parametrize("header", [b" {}", b"[1]", b"nonsense"])
def test_a_header_that_does_not_begin_with_a_brace(path, header):
    assert "the header doesn't begin with '{'" in refused(write_raw(path, header)).found


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"a": }', "is no JSON"),
        (b"{} {}", "is no JSON: Extra data"),
        (b"{}\0\0", "is no JSON: Extra data"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"__metadata__": {"a": -Infinity}}', "-Infinity is no JSON number"),
        (b'{"a\xff": 1}', "is no UTF-8 at its byte 3"),
        (b'{"\\ud800": 1}', "half a character (a lone surrogate)"),
        (b'{"a\n": 1}', "is no JSON: Invalid control character"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b'{"b":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
)
def test_a_header_that_is_no_strict_json(path, header, words):
    error = refused(write_raw(path, header))
    assert words in error.found
    assert "each name once" in error.expected


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": 1}', "w"),
        (b'{"w": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', "dtype"),
        (b'{"__metadata__": {}, "__metadata__": {}}', "__metadata__"),
        (b'{"__metadata__": {"format": "pt", "format": "np"}}', "format"),
    ],
)
def test_names_that_stand_twice(path, header, name):
    error = refused(write_raw(path, header, b"1"))
    assert f"holds the name {name} twice" in error.found
    assert error.items == (name,)


@pytest.mark.parametrize(("metadata", "kind"), [([], "list"), ("x", "str"), (None, "NoneType")])
def test_metadata_that_is_no_object(path, metadata, kind):
    assert refused(write_raw(path, {"__metadata__": metadata})).found == f"__metadata__ is a {kind}"


def test_metadata_that_holds_other_than_strings(path):
    error = refused(write_raw(path, {"__metadata__": {"a": 1, "b": "x", "c": None}}))
    assert "2 values that are no strings" in error.found
    assert error.items == ("a", "c")


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ([], "the description is a list"),
        ({"dtype": "F32", "shape": [2]}, "has the fields dtype, shape"),
        ({}, "has the fields (none)"),
        ({**entry(), "extra": 1}, "has the fields data_offsets, dtype, extra, shape"),
        (entry(dtype="Q4_K"), "the dtype is 'Q4_K'"),
        (entry(dtype=7), "the dtype is 7"),
        (entry(dtype=["F32"]), "the dtype is ['F32']"),
        (entry(shape=2), "the shape is 2"),
        (entry(shape=[-1, 2]), "the shape is [-1, 2]"),
        (entry(shape=[2.0]), "the shape is [2.0]"),
        (entry(shape=[True, 2]), "the shape is [True, 2]"),
        (entry(shape=["2"]), "the shape is ['2']"),
        (entry(shape=[1] * 65), "the shape is [1, 1, "),
        (entry(shape=[10**30]), "the shape is [1e+30]"),
        (entry(shape=[2**62, 0], offsets=[0, 0]), "is too large"),
        (entry(offsets=[0]), "the byte range is [0]"),
        (entry(offsets=[0, 8, 9]), "the byte range is [0, 8, 9]"),
        (entry(offsets=[8, 0]), "the byte range is [8, 0]"),
        (entry(offsets=[-8, 0]), "the byte range is [-8, 0]"),
        (entry(offsets=[0, True]), "the byte range is [0, True]"),
        (entry(offsets={"0": 8}), "the byte range is {'0': 8}"),
        (entry(shape=[3]), "F32 [3] takes 12 bytes, but the range has 8"),
        (entry("F4", [3], [0, 2]), "the shape [3] in F4 is no whole number of bytes"),
        (entry("F6_E2M3", [2], [0, 2]), "the shape [2] in F6_E2M3 is no whole number of bytes"),
    ],
)
def test_tensors_that_are_described_wrongly(path, description, words):
    error = refused(write_raw(path, {"bad": description, "good": entry("U8", [1], [8, 9])}, bytes(9)))
    assert "1 of the 2 tensors are described wrongly; of 'bad', " in error.found
    assert words in error.found
    assert error.items == ("bad",)


def test_a_minus_zero_is_no_count(path):
    error = refused(write_raw(path, b'{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}'))
    assert "the shape is [-0.0]" in error.found


def test_a_gap_between_tensors(path):
    error = refused(write_raw(path, {"b": entry("U8", [1], [4, 5]), "a": entry("U8", [2], [0, 2])}, bytes(5)))
    assert error.found == "there is a gap of 2 bytes before 'b'"
    assert error.items == ("a", "b")


def test_tensors_that_overlap(path):
    error = refused(write_raw(path, {"a": entry("U8", [3], [0, 3]), "b": entry("U8", [3], [2, 5])}, bytes(5)))
    assert error.found == "there is an overlap of 1 bytes before 'b'"


def test_two_tensors_of_the_same_bytes(path):
    error = refused(write_raw(path, {"a": entry(), "b": entry()}, bytes(8)))
    assert error.found == "there is an overlap of 8 bytes before 'b'"


def test_a_first_tensor_that_does_not_begin_the_data(path):
    error = refused(write_raw(path, {"a": entry("U8", [1], [1, 2])}, bytes(2)))
    assert error.found == "there is a gap of 1 bytes before 'a'"


def test_a_truncated_file_says_how_much_is_missing(path):
    header = {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [4, 8]), "c": entry("U8", [2], [8, 10])}
    error = refused(write_raw(path, header, bytes(5)))
    assert error.found == "the file is cut off: 5 of 10 bytes of tensors are missing"
    assert error.items == ("b", "c")
    assert "Download the file again" in error.hint


def test_bytes_after_the_last_tensor(path):
    assert refused(write_raw(path, {"a": entry()}, bytes(11))).found == "3 bytes follow the last tensor"
