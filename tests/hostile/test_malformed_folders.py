"""Indexes, configurations and pipeline descriptions that are damaged, or reach for what is not theirs."""

from __future__ import annotations

import json

import pytest

from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import HeaderError
from support.recorded import write_checkpoint

TENSOR = ("F32", (2,))


@pytest.fixture
def model(tmp_path):
    """A folder with two shards, and a function that writes its index."""
    write_checkpoint({"a": TENSOR, "b": TENSOR}, tmp_path / "model-00001-of-00002.safetensors")
    write_checkpoint({"c": TENSOR}, tmp_path / "model-00002-of-00002.safetensors")
    write_checkpoint({"outside": TENSOR}, tmp_path.parent / "outside.safetensors")
    path = tmp_path / "model.safetensors.index.json"

    def refused(content, target=path):
        path.write_text(content if isinstance(content, str) else json.dumps({"weight_map": content}))
        with pytest.raises(HeaderError) as caught:
            read_checkpoint(target)
        return caught.value

    return refused


RIGHT = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd.safetensors",
        "folder/x.safetensors",
        "folder\\x.safetensors",
        "C:x.safetensors",
        "..",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        "config.json",
        "x.bin",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_shards_are_plain_names_of_safetensors_files(model, name):
    error = model({**RIGHT, "c": name})
    assert "names 1 shards by something else than a file beside it" in error.found
    assert error.items == (str(name),)
    assert "Don't trust this file" in error.hint


def test_an_absolute_shard_is_refused_even_where_it_exists(model, tmp_path):
    name = str(tmp_path / SECOND)
    assert model({**RIGHT, "c": name}).items == (name,)


def test_missing_shards_are_named_with_what_they_hold(model, tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    error = model({**RIGHT, "c": SECOND, "d": "gone.safetensors"})
    assert "2 of 3 shards are missing; 'gone.safetensors' holds 1 of the model's 4 tensors" in error.found
    assert error.items == ("gone.safetensors (1 tensors)", "model-00001-of-00002.safetensors (2 tensors)")
    assert "Download the missing shards" in error.hint


def test_tensors_that_are_not_in_their_shard(model):
    error = model({**RIGHT, "c": SECOND, "d": SECOND})
    assert "1 tensors of the index are not in the shard that it names for them" in error.found
    assert error.items == (f"d ({SECOND})",)


def test_tensors_that_are_in_another_shard(model):
    error = model({"a": RIGHT["a"], "b": SECOND, "c": SECOND})
    assert error.items == (f"b ({SECOND})",)


def test_tensors_that_the_index_does_not_name(model):
    error = model({"a": RIGHT["a"], "c": SECOND})
    assert "the shards hold 1 tensors that the index doesn't place there" in error.found
    assert error.items == (f"b ({RIGHT['b']})",)


def test_a_tensor_that_lies_in_two_shards(model, tmp_path):
    write_checkpoint({"c": TENSOR, "a": TENSOR}, tmp_path / SECOND)
    assert model({**RIGHT, "c": SECOND}).items == (f"a ({SECOND})",)


def test_a_damaged_shard_is_named(model, tmp_path):
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[:-3])
    error = model({**RIGHT, "c": SECOND})
    assert "3 of 8 bytes of tensors are missing" in error.found
    assert error.path == str(path)


@pytest.mark.parametrize("of_folder", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the file is empty"),
        ("{}", "the index has no weight_map"),
        ('{"weight_map": {}}', "weight_map is empty or no object"),
        ('{"weight_map": ["a"]}', "weight_map is empty or no object"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "holds the name a twice"),
        ('{"weight_map": ', "is no JSON"),
        ('{"metadata": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32 levels deep"),
        ("[1]", "the JSON file is a JSON list, no object"),
        ("\x80", "is no JSON"),
    ],
)
def test_a_damaged_index(model, tmp_path, content, words, of_folder):
    path = tmp_path / "model.safetensors.index.json"
    error = model(content, tmp_path if of_folder else path)
    assert words in error.found
    assert error.path == str(path)


def test_an_index_over_the_limit(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}}' + " " * 2**20)
    with pytest.raises(HeaderError) as caught:
        read_checkpoint(path, limit_mib=1)
    assert "the JSON file takes 1048594 bytes" in caught.value.found
    assert caught.value.expected == "at most 1 MiB"


@pytest.mark.parametrize("name", ["config.json", "model_index.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"dim": NaN}', "NaN is no JSON number"),
        ('{"eps": -1e999}', "the number -1e999 is out of range"),
        ('{"eps": ' + "9" * 400 + "}", "the number 99999999999999999999... is out of range"),
        ('{"dim": 1, "dim": 2}', "holds the name dim twice"),
        ('{"dim": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32 levels deep"),
        ("{" + " " * (4 * 2**20) + "}", "the JSON file takes 4194306 bytes"),
        ('"text"', "is a JSON str, no object"),
    ],
)
def test_a_damaged_config_or_pipeline_description(tmp_path, name, content, words):
    write_checkpoint({"a": TENSOR}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(content)
    with pytest.raises(HeaderError) as caught:
        read_checkpoint(tmp_path)
    assert words in caught.value.found
    assert caught.value.path == str(tmp_path / name)


def test_a_pipeline_description_reaches_no_folder_outside(tmp_path):
    write_checkpoint({"outside": TENSOR}, tmp_path / "outside.safetensors")
    pipeline = tmp_path / "pipeline"
    (pipeline / "vae").mkdir(parents=True)
    write_checkpoint({"a": TENSOR}, pipeline / "vae" / "model.safetensors")
    names = ["vae", "..", ".", "", str(tmp_path), "../pipeline/vae", "vae/"]
    (pipeline / "model_index.json").write_text(json.dumps({name: ["diffusers", "Model"] for name in names}))
    assert list(read_checkpoint(pipeline).headers) == ["vae"]
