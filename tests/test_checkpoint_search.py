"""Which checkpoints are found below a folder."""

from __future__ import annotations

import json

import pytest

from slipcast.registry import checkpoint_search
from slipcast.registry.checkpoint_search import find_checkpoints
from slipcast.registry.errors import UnsupportedFileError


def names_in(folder):
    return [path.relative_to(folder).as_posix() for path in find_checkpoints(folder)]


def test_the_search(tmp_path):
    for name in ("a", "component", "pipeline/vae", "sharded", ".hidden", "several"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "z.safetensors",
        "a/x.SAFETENSORS",
        "a/y.gguf",
        "component/model.safetensors",
        "component/config.json",
        "pipeline/vae/model.safetensors",
        "pipeline/model_index.json",
        "sharded/m-00001-of-00002.safetensors",
        "sharded/m-00002-of-00002.safetensors",
        ".hidden/model.safetensors",
        "several/config.json",
        "several/one.safetensors",
        "several/two.safetensors",
    ):
        (tmp_path / name).write_text("{}")
    weight_map = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
    (tmp_path / "sharded" / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "also.safetensors").symlink_to(tmp_path / "z.safetensors")
    assert names_in(tmp_path) == [
        "also.safetensors",
        "z.safetensors",
        "a/x.SAFETENSORS",
        "a/y.gguf",
        "component",
        "pipeline",
        "several/one.safetensors",
        "several/two.safetensors",
        "sharded/m.safetensors.index.json",
    ]
    assert names_in(tmp_path / "component") == ["."]


def test_an_index_that_can_not_be_read_hides_no_shard(tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text("[]")
    (tmp_path / "m-00001-of-00001.safetensors").write_text("")
    assert names_in(tmp_path) == ["m-00001-of-00001.safetensors", "m.safetensors.index.json"]


@pytest.mark.parametrize(("limit", "count"), [("_MOST_FOLDERS", 3), ("_MOST_CHECKPOINTS", 2)])
def test_the_search_is_bounded(tmp_path, monkeypatch, limit, count):
    for index in range(3):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "model.safetensors").write_text("")
    monkeypatch.setattr(checkpoint_search, limit, count + 1)
    assert len(find_checkpoints(tmp_path)) == 3
    monkeypatch.setattr(checkpoint_search, limit, count)
    with pytest.raises(UnsupportedFileError, match=r"more than .* folders or .* checkpoints") as caught:
        find_checkpoints(tmp_path)
    assert caught.value.hint == "Name one of the folders in it."
