"""Reading elements out of files: mapped and through a buffer, at any offset, and what outlives the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipcast.engine.reader import is_aligned, open_reader, torch_dtype
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import UnsupportedFormatError
from slipcast.registry.header import Header, TensorInfo
from support.number_formats import bytes_of
from support.raw_safetensors import entry, write_raw

VALUES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    """Three bytes, then 24 floats at odd addresses, and a tensor of no elements."""
    raw = bytes_of(VALUES).tobytes()
    entries = {
        "odd": entry("BOOL", [3], [0, 3]),
        "values": entry("F32", [4, 6], [3, 99]),
        "none": entry("F32", [0, 6], [99, 99]),
    }
    return read_checkpoint(write_raw(tmp_path / "m.safetensors", entries, b"\1\0\1" + raw)).headers[""]


@pytest.mark.parametrize("mmap", [True, False])
def test_elements_are_those_that_are_asked_for(header: Header, mmap: bool) -> None:
    reader = open_reader(header, mmap=mmap)
    info = header.tensors["values"]
    for start, stop in ((0, 24), (6, 12), (23, 24), (5, 5)):
        assert torch.equal(reader.elements(info, start, stop), VALUES.flatten()[start:stop])
    assert reader.elements(header.tensors["odd"], 0, 3).tolist() == [True, False, True]
    assert reader.elements(header.tensors["none"], 0, 0).shape == (0,)
    reader.close()


@pytest.mark.parametrize("mmap", [True, False])
def test_elements_lie_at_addresses_that_their_dtype_wants(header: Header, mmap: bool) -> None:
    values = open_reader(header, mmap=mmap).elements(header.tensors["values"], 1, 9)
    assert values.data_ptr() % 4 == 0


def test_views_of_a_mapped_file_outlive_the_reader(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"a": entry("F32", [4, 6], [0, 96])}, bytes_of(VALUES).tobytes())
    header = read_checkpoint(path).headers[""]
    reader = open_reader(header, mmap=True)
    rows = reader.elements(header.tensors["a"], 6, 18)
    assert rows.untyped_storage().nbytes() == 48
    reader.close()
    path.unlink()
    assert torch.equal(rows, VALUES.flatten()[6:18])


def test_one_buffer_serves_all_requests(header: Header) -> None:
    reader = open_reader(header, mmap=False)
    first = reader.elements(header.tensors["values"], 0, 24)
    place = first.data_ptr()
    assert reader.elements(header.tensors["values"], 6, 12).data_ptr() == place
    assert not torch.equal(first, VALUES.flatten())
    assert (reader.lasting, open_reader(header, mmap=True).lasting) == (False, True)


@pytest.mark.parametrize(
    ("start", "rows", "aligned"), [(0, None, True), (2, None, False), (8, (1, 2), True), (2, (1, 2), False)]
)
def test_alignment_counts_from_the_file_s_beginning(start: int, rows: tuple[int, int] | None, aligned: bool) -> None:
    assert is_aligned(TensorInfo("a", "F32", (4, 6), 0, start, start + 96), rows) is aligned


def test_a_dtype_that_torch_has_not() -> None:
    info = TensorInfo("a", "F6_E2M3", (4,), 0, 0, 3)
    assert not is_aligned(info)
    with pytest.raises(UnsupportedFormatError) as caught:
        torch_dtype(info)
    assert "a of the dtype F6_E2M3" in caught.value.found
    assert "BF16" in caught.value.expected
