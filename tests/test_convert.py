"""Files written in the other naming: the values of every tensor, the way back, and what is refused."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipcast.engine import safetensors_writer
from slipcast.engine.convert import Converted, convert
from slipcast.registry.catalogue import Catalogue, load_catalogue, load_family_file
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import Layout
from slipcast.registry.errors import Cancelled, SettingsError, SlipcastError, UnsupportedFileError
from slipcast.registry.family import Family
from slipcast.registry.identify import Match, identify
from support import links as executor
from support.tiny_z_image import CONFIG, natively, tiny_tensors, write_folder, write_native

PREFIX = "model.diffusion_model."
Tensors = dict[str, torch.Tensor]


def _match(path: Path, catalogue: Mapping[str, Family] | None = None) -> Match:
    return identify(read_checkpoint(path), Catalogue(catalogue) if catalogue else load_catalogue())[0]


def _convert(path: Path, out: Path, layout: str, **options: object) -> Converted:
    return convert(_match(path), out, layout, **options)  # type: ignore[arg-type]


def _same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor) for name, tensor in expected.items()
    )


def _shards(path: Path, folder: Path) -> Path:
    model = ZImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


@pytest.fixture
def native(tmp_path: Path, tensors: Tensors) -> Path:
    return write_native(tmp_path / "native.safetensors", tensors, prefix=PREFIX, metadata={"title": "äöü", "n": "1"})


def test_native_becomes_diffusers_value_by_value(tmp_path: Path, native: Path, tensors: Tensors) -> None:
    _convert(native, tmp_path / "out.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "out.safetensors"), tensors)


def test_there_and_back_gives_the_same_bytes(tmp_path: Path, native: Path) -> None:
    _convert(native, tmp_path / "model.safetensors", "diffusers")
    _convert(tmp_path / "model.safetensors", tmp_path / "back.safetensors", "native", prefix=PREFIX)
    assert _same(load_file(tmp_path / "back.safetensors"), load_file(native))


def test_the_shipped_model_comes_back_byte_for_byte(tmp_path: Path) -> None:
    shipped = Path(str(resources.files("slipcast.demo"))) / "digits.safetensors"
    match = _match(shipped)
    _convert(shipped, tmp_path / "model", "diffusers")
    _convert(tmp_path / "model", tmp_path / "back.safetensors", "native", prefix=match.prefix)
    assert _same(load_file(tmp_path / "back.safetensors"), load_file(shipped))


@pytest.mark.parametrize("title", ["", "x", "xyzuv"])
def test_the_data_begins_at_whole_items(tmp_path: Path, tensors: Tensors, title: str) -> None:
    path = write_native(tmp_path / "native.safetensors", tensors, metadata={"title": title})
    _convert(path, tmp_path / "out.safetensors", "diffusers")
    (length,) = struct.unpack("<Q", (tmp_path / "out.safetensors").read_bytes()[:8])
    assert length % 8 == 0


def test_metadata_is_kept(tmp_path: Path, native: Path) -> None:
    _convert(native, tmp_path / "out.safetensors", "diffusers")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"title": "äöü", "n": "1", "format": "pt"}


def test_a_folder_is_what_diffusers_loads(tmp_path: Path, native: Path, tensors: Tensors) -> None:
    converted = _convert(native, tmp_path / "transformer", "diffusers")
    assert sorted(path.name for path in (tmp_path / "transformer").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]
    model = ZImageTransformer2DModel.from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    assert _same(model.state_dict(), tensors)
    assert {name: model.config[name] for name in CONFIG} == CONFIG
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "ZImageTransformer2DModel"
    assert converted.to_dict()["files"] == [str(path) for path in converted.files]


def test_a_folder_of_shards_is_read(tmp_path: Path, tensors: Tensors) -> None:
    shards = _shards(tmp_path / "sharded", write_folder(tmp_path / "transformer", tensors))
    assert len(list(shards.glob("*.safetensors"))) > 2
    _convert(shards, tmp_path / "out.safetensors", "native")
    assert _same(load_file(tmp_path / "out.safetensors"), natively(tensors))


def test_another_prefix_in_the_same_naming(tmp_path: Path, native: Path, tensors: Tensors) -> None:
    _convert(native, tmp_path / "bare.safetensors", "native", prefix="")
    assert _same(load_file(tmp_path / "bare.safetensors"), natively(tensors))
    folder = write_folder(tmp_path / "folder", tensors)
    _convert(folder, tmp_path / "single.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "single.safetensors"), tensors)


def test_tensors_of_several_dtypes_stay_as_they_are(tmp_path: Path, tensors: Tensors) -> None:
    mixed = dict(tensors)
    for name in ("all_x_embedder.2-1.bias", "t_embedder.mlp.0.weight"):
        mixed[name] = tensors[name].float()
    mixed["layers.1.attention.norm_q.weight"] = tensors["layers.1.attention.norm_q.weight"].half()
    path = write_native(tmp_path / "mixed.safetensors", mixed)
    _convert(path, tmp_path / "out.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "out.safetensors"), mixed)


EVERY_OPERATION = """\
schema: 1
id: every-operation
title: Every operation of the language
kind: denoiser
model: diffusers.ZImageTransformer2DModel
identify: {has: [turned, fused.to_apart.0]}
config: CONFIG
keys:
  turned: transpose(t_embedder.mlp.0.weight)
  swapped: swap_halves(cap_embedder.1)
  flattened: flat(x_pad_token)
  convolution: conv1x1(all_final_layer.2-1.linear)
  interleaved: interleave(layers.0.attention.to_out.0, 8)
  "fused.to_apart.{i}": swap_halves(layers.{i}.attention.to_q) + layers.{i}.attention.to_k + layers.{i}.attention.to_v
  "apart.{i}.first + apart.{i}.second": layers.{i}.feed_forward.w1
precision: {fp16: safe, fp8: {storage: supported, compute: supported}}
"""


def test_every_operation_both_ways(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "every-operation.yaml").write_text(EVERY_OPERATION.replace("CONFIG", json.dumps(CONFIG)))
    family = load_family_file(tmp_path / "every-operation.yaml")
    expected = executor.save(family.key_map.links(tensors), tensors)
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, tmp_path / "file.safetensors")
    monkeypatch.setattr(safetensors_writer, "_PIECE", 1000)

    convert(_match(tmp_path / "file.safetensors", {family.id: family}), tmp_path / "model.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "model.safetensors"), tensors)
    convert(_match(tmp_path / "model.safetensors", {family.id: family}), tmp_path / "back.safetensors", "native")
    assert _same(load_file(tmp_path / "back.safetensors"), expected)


def test_memory_does_not_grow_with_the_file(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = safetensors_writer.BufferedReader.elements

    def elements(self, tensor, start, stop):  # type: ignore[no-untyped-def]
        asked.append((stop - start) * tensor.nbytes // tensor.elements)
        return read(self, tensor, start, stop)

    monkeypatch.setattr(safetensors_writer, "_PIECE", 4096)
    monkeypatch.setattr(safetensors_writer.BufferedReader, "elements", elements)
    path = write_native(tmp_path / "native.safetensors", tensors)
    _convert(path, tmp_path / "out.safetensors", "diffusers")
    assert max(asked) == 4096
    assert sum(asked) == _match(path).header.nbytes


def test_progress_ends_with_all_bytes(tmp_path: Path, native: Path) -> None:
    seen: list[tuple[int, int]] = []
    converted = _convert(
        native, tmp_path / "out.safetensors", "diffusers", progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (converted.conversion.nbytes, converted.conversion.nbytes)


@pytest.mark.parametrize("out", ["out.safetensors", "folder"])
def test_nothing_is_left_of_a_conversion_that_ends_early(tmp_path: Path, native: Path, out: str) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(native, tmp_path / out, "diffusers", progress=interrupt)
    with pytest.raises(Cancelled, match="cancelled after"):
        _convert(native, tmp_path / out, "diffusers", cancelled=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["native.safetensors"]


def test_a_file_that_is_replaced_stays_whole_until_the_end(tmp_path: Path, native: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(native, out, "diffusers", overwrite=True, progress=interrupt)
    assert out.read_bytes() == b"before"
    _convert(native, out, "diffusers", overwrite=True)
    assert len(load_file(out)) > 10


def test_what_is_there_is_not_overwritten(tmp_path: Path, native: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"mine")
    with pytest.raises(UnsupportedFileError, match=r"there already(.|\n)*--overwrite"):
        _convert(native, tmp_path / "out.safetensors", "diffusers")
    assert (tmp_path / "out.safetensors").read_bytes() == b"mine"
    _convert(native, tmp_path / "folder", "diffusers")
    with pytest.raises(UnsupportedFileError, match="there already"):
        _convert(native, tmp_path / "folder", "diffusers")
    _convert(native, tmp_path / "folder", "diffusers", overwrite=True)


def test_the_input_is_never_the_output(tmp_path: Path, native: Path, tensors: Tensors) -> None:
    before = native.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(native)
    for out in (native, tmp_path / "link.safetensors", tmp_path / "x" / ".." / native.name):
        with pytest.raises(UnsupportedFileError, match="the output is the input itself"):
            _convert(native, out, "native", prefix="", overwrite=True)
    folder = write_folder(tmp_path / "folder", tensors)
    with pytest.raises(UnsupportedFileError, match="the output is the input itself"):
        _convert(folder, folder, "diffusers", overwrite=True)
    shards = _shards(tmp_path / "sharded", folder)
    for out in (shards, next(shards.glob("*-00001-of-*"))):
        with pytest.raises(UnsupportedFileError, match="the output is the input itself"):
            _convert(shards, out, "diffusers", overwrite=True)
    assert native.read_bytes() == before


def test_a_folder_that_can_not_be_the_output(tmp_path: Path, native: Path) -> None:
    with pytest.raises(UnsupportedFileError, match=r"a folder for a checkpoint in native names(.|\n)*out\.safetensors"):
        _convert(native, tmp_path / "out", "native")
    with pytest.raises(SettingsError, match=r"the prefix 'diffusion_model\.' in a folder"):
        _convert(native, tmp_path / "out", "diffusers", prefix="diffusion_model.")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UnsupportedFileError, match=r"holds 1 other files(.|\n)*notes\.txt"):
        _convert(native, tmp_path / "other", "diffusers", overwrite=True)
    for out in ("nowhere/out", "nowhere/out.safetensors"):
        with pytest.raises(UnsupportedFileError, match=r"nowhere: there is no such folder"):
            _convert(native, tmp_path / out, "diffusers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", [None, "native", "diffusers"])
@pytest.mark.parametrize("name", ["x.bin", "x.PT", "x.gguf", "x.json"])
def test_a_name_of_another_kind_of_file_can_not_be_the_output(
    tmp_path: Path, native: Path, name: str, layout: Layout | None
) -> None:
    with pytest.raises(UnsupportedFileError, match=rf"the name ends in \.{name[2:]}: files of that kind are") as caught:
        _convert(native, tmp_path / name, layout)
    assert caught.value.expected == (
        "a file whose name ends in .safetensors; in the model's names, as with --layout diffusers, also a folder"
    )
    assert caught.value.hint == "name for example x.safetensors"


def test_the_ending_of_a_name_may_be_in_capitals(tmp_path: Path, native: Path) -> None:
    _convert(native, tmp_path / "x.SAFETENSORS", None)
    assert (tmp_path / "x.SAFETENSORS").is_file()


def test_a_full_disk_leaves_nothing(tmp_path: Path, native: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SlipcastError, match="can't be written: File too large"):
            _convert(native, tmp_path / "out.safetensors", "diffusers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["native.safetensors"]
