"""Recorded headers as the checks read them, against what the tests read by themselves."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from slipcast.engine.check.records import Records, expand_name, recorded_headers
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import HeaderError
from slipcast.registry.quantisation import assemble
from support.recorded import recorded, recorded_names, write_checkpoint


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = recorded_headers()
    assert folder is not None
    return Records(folder, tmp_path_factory.mktemp("records"))


def test_every_record_has_its_names_and_shapes(records: Records) -> None:
    assert records.names == recorded_names()
    for name in records.names:
        header = records.header(name)
        expected = {tensor: (dtype or "BF16", shape) for tensor, (dtype, shape) in recorded(name).tensors.items()}
        assert {tensor: (info.dtype, info.shape) for tensor, info in header.tensors.items()} == expected
        assert header.metadata == recorded(name).metadata


@pytest.mark.parametrize("name", ["z-image-turbo--comfy-int8-convrot", "z-image-turbo--kijai-fp8-scaled"])
def test_formats_are_those_of_a_file_written_after_the_record(tmp_path: Path, records: Records, name: str) -> None:
    path = write_checkpoint(recorded(name), tmp_path / f"{name}.safetensors")
    written = assemble(read_checkpoint(path).headers[""])
    assert {key: bundle.format for key, bundle in records.bundles(name).weights.items()} == {
        key: bundle.format for key, bundle in written.weights.items()
    }
    assert records.bundles(name).problems == written.problems == ()


def test_weights_do_not_overlap(records: Records) -> None:
    tensors = [
        tensor
        for tensor in records.header("z-image-turbo--comfy-int8-convrot").tensors.values()
        if not tensor.name.endswith("comfy_quant")
    ]
    widths = {"I8": 1, "BF16": 2, "F32": 4}
    assert all(tensor.nbytes == prod(tensor.shape) * widths[tensor.dtype] for tensor in tensors)
    places = sorted((tensor.start, tensor.stop) for tensor in tensors)
    assert all(one[1] <= other[0] for one, other in pairwise(places))


def test_compact_names() -> None:
    assert list(expand_name("a.{0-1}.b.{3,5-6}")) == [f"a.{i}.b.{j}" for i in (0, 1) for j in (3, 5, 6)]
    assert list(expand_name("plain.weight")) == ["plain.weight"]


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"tensors": []}, "no object tensors"),
        ({"tensors": {"a": ["BF17", [2]]}}, "a is described as"),
        ({"tensors": {"a": ["BF16", [-2]]}}, "a is described as"),
        ({"tensors": {"a": None}}, "a is described as"),
        ({"tensors": {"a.comfy_quant": ["U8", [3]]}}, "the marker a.comfy_quant of 3 bytes"),
    ],
)
def test_a_damaged_record(tmp_path: Path, document: object, found: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(HeaderError, match=found):
        Records(tmp_path, tmp_path).header("x")


def test_a_configuration_that_is_not_there(records: Records) -> None:
    assert records.config("Tongyi-MAI--Z-Image-Turbo.transformer")["dim"] == 3840
    with pytest.raises(HeaderError, match="no such file"):
        records.config("nobody")
