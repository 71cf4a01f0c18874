"""What a path holds: files, shards, folders of components and of pipelines, and which of several files is taken."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from slipcast.registry.checkpoint import read_checkpoint, read_tensor_bytes
from slipcast.registry.errors import HeaderError, UnsupportedFileError
from slipcast.registry.weight_files import model_of_folder
from support.recorded import write_checkpoint

WEIGHTS = {"a.weight": ("F32", (2, 3)), "b": ("BF16", (4,)), "c": ("U8", (3,))}
PLAIN = "diffusion_pytorch_model.safetensors"


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_checkpoint(WEIGHTS, folder / name, fill="normal")
    return folder


def write_shards(folder: Path, stem: str = "model", index: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, names in enumerate([["a.weight", "b"], ["c"]], start=1):
        shard = f"{stem}-0000{number}-of-00002.safetensors"
        metadata = {"format": "pt", "shard": str(number), f"only{number}": "x"}
        write_checkpoint({name: WEIGHTS[name] for name in names}, folder / shard, fill="normal", metadata=metadata)
        weight_map |= dict.fromkeys(names, shard)
    path = folder / (index or f"{stem}.safetensors.index.json")
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def refused(path: Path, kind: type[Exception] = UnsupportedFileError):
    with pytest.raises(kind) as caught:
        read_checkpoint(path)
    return caught.value


def test_a_single_file(tmp_path):
    path = write(tmp_path, "model.safetensors") / "model.safetensors"
    checkpoint = read_checkpoint(str(path))
    assert checkpoint.path == path
    assert not checkpoint.classes
    header = checkpoint.headers[""]
    assert (header.path, header.files, header.container, header.config) == (path, (path,), "safetensors", None)
    assert list(header.tensors) == list(WEIGHTS)


def test_a_folder_of_one_file_is_that_file_and_a_component_is_its_folder(tmp_path):
    path = write(tmp_path, "model.safetensors") / "model.safetensors"
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.headers[""].path) == (path, path)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.headers[""].path) == (tmp_path, tmp_path)


def test_the_name_of_a_single_file_needs_no_suffix(tmp_path):
    write_checkpoint(WEIGHTS, tmp_path / "0123abcd")
    assert read_checkpoint(tmp_path / "0123abcd").headers[""].tensors.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("of_folder", [False, True])
def test_shards_are_read_as_one_header(tmp_path, of_folder):
    index = write_shards(tmp_path)
    header = read_checkpoint(tmp_path if of_folder else index).headers[""]
    assert header.container == "sharded safetensors"
    assert header.path == index
    assert [file.name for file in header.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {name: tensor.file for name, tensor in header.tensors.items()} == {"a.weight": 0, "b": 0, "c": 1}
    assert header.metadata == {"format": "pt", "shard": "1", "only1": "x", "only2": "x"}

    single = write_checkpoint(WEIGHTS, tmp_path / "single.sft", fill="normal")
    whole = read_checkpoint(single).headers[""]
    for name, tensor in header.tensors.items():
        assert read_tensor_bytes(header, tensor) == read_tensor_bytes(whole, whole.tensors[name]) != b""


def test_one_shard_alone_is_not_taken_for_the_model(tmp_path):
    write_shards(tmp_path)
    error = refused(tmp_path / "model-00001-of-00002.safetensors")
    assert "one of the 2 shards" in error.found
    assert ".safetensors.index.json" in error.hint


def test_shards_without_their_index(tmp_path):
    write_shards(tmp_path).unlink()
    error = refused(tmp_path)
    assert "2 shards of a model without their index" in error.found
    assert error.items == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_the_only_shard_of_a_model_is_the_model(tmp_path):
    write(tmp_path, "model-00001-of-00001.safetensors")
    assert read_checkpoint(tmp_path).headers[""].container == "safetensors"


def test_an_index_of_one_file_that_is_named_like_it(tmp_path):
    write(tmp_path, "model.safetensors")
    index = {"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).headers[""].container == "sharded safetensors"


def test_a_component_folder_has_its_config(tmp_path):
    write(tmp_path, PLAIN)
    (tmp_path / "config.json").write_text('{"_class_name": "Model", "sizes": [1, 2]}')
    header = read_checkpoint(tmp_path).headers[""]
    assert (header.container, header.path) == ("diffusers folder", tmp_path)
    assert header.config == {"_class_name": "Model", "sizes": [1, 2]}
    assert header.files == (tmp_path / PLAIN,)


@pytest.mark.parametrize("variant", ["fp16", "non_ema", "fp16.ema"])
def test_of_several_variants_the_plain_one_is_taken(tmp_path, variant):
    parts = variant.split(".")
    names = [f"diffusion_pytorch_model.{'.'.join(parts[: count + 1])}.safetensors" for count in range(len(parts))]
    write(tmp_path, PLAIN, *names)
    assert read_checkpoint(tmp_path).headers[""].files == (tmp_path / PLAIN,)


@pytest.mark.parametrize(
    "index",
    [
        "model.safetensors.index.fp16.json",
        "model.fp16.safetensors.index.json",
        "model.safetensors.fp16.index.json",
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_of_sharded_variants_the_plain_one_is_taken(tmp_path, index, sharded):
    write_shards(tmp_path, "model.fp16", index)
    if sharded:
        write_shards(tmp_path, "model")
    else:
        write(tmp_path, "model.safetensors")
    header = read_checkpoint(tmp_path).headers[""]
    assert not any("fp16" in file.name for file in header.files)
    assert len(header.files) == (2 if sharded else 1)


def test_a_variant_alone_is_the_model(tmp_path):
    write(tmp_path, "model.fp16.safetensors")
    assert read_checkpoint(tmp_path).headers[""].files[0].name == "model.fp16.safetensors"


@pytest.mark.parametrize(
    "names", [("one.safetensors", "two.safetensors"), ("model.fp16.safetensors", "model.fp32.safetensors")]
)
def test_several_unrelated_files_are_listed(tmp_path, names):
    error = refused(write(tmp_path, *names))
    assert "holds 2 models" in error.found
    assert error.hint == f"Name the file that you mean; 'slipcast inspect {tmp_path}' says what each is."
    assert error.items == names


def test_a_file_and_an_index_of_other_shards_are_two_models(tmp_path):
    write_shards(tmp_path)
    error = refused(write(tmp_path, "consolidated.safetensors"))
    assert error.items == ("model.safetensors.index.json", "consolidated.safetensors")


def test_a_folder_without_a_model(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    error = refused(tmp_path)
    assert "holds no model" in error.found
    assert "Name the folder or the file" in error.hint


def test_a_folder_with_pickles_only(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    error = refused(tmp_path)
    assert "pickle" in error.found
    assert error.path == str(tmp_path / "pytorch_model.bin")


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model-Q8_0.gguf", "any")
    writer.add_tensor("a.weight", np.ones((2, 3), dtype=np.float32))
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    header = read_checkpoint(tmp_path).headers[""]
    assert (header.container, header.files) == ("gguf", (tmp_path / "model-Q8_0.gguf",))
    assert model_of_folder(tmp_path) == tmp_path / "model-Q8_0.gguf"
    error = refused(write(tmp_path, "model.safetensors"))
    assert error.items == ("model.safetensors", "model-Q8_0.gguf")
    assert "GGUF" in error.expected
    assert model_of_folder(tmp_path) is None


def test_pickles_beside_safetensors_are_left_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert read_checkpoint(write(tmp_path, "model.safetensors")).headers[""].files[0].name == "model.safetensors"


@pytest.fixture
def pipeline(tmp_path):
    classes = {
        "_class_name": "SomePipeline",
        "_diffusers_version": "0.40.0",
        "feature_extractor": [None, None],
        "scheduler": ["diffusers", "SomeScheduler"],
        "text_encoder": ["transformers", "SomeEncoder"],
        "tokenizer": ["transformers", "SomeTokenizer"],
        "transformer": ["diffusers", "SomeTransformer"],
        "requires_safety_checker": True,
        "sizes": [1, 2],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(classes))
    write_shards(tmp_path / "transformer", "diffusion_pytorch_model")
    (tmp_path / "transformer" / "config.json").write_text('{"dim": 3}')
    write(tmp_path / "text_encoder", "model.safetensors", "model.fp16.safetensors")
    write(tmp_path / "unlisted", "model.safetensors")
    write(tmp_path, "everything.safetensors")
    for name in ("scheduler", "tokenizer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_a_pipeline_folder_has_a_header_for_each_component_with_weights(pipeline):
    checkpoint = read_checkpoint(pipeline)
    assert list(checkpoint.headers) == ["text_encoder", "transformer"]
    assert checkpoint.headers["transformer"].config == {"dim": 3}
    assert len(checkpoint.headers["transformer"].files) == 2
    assert checkpoint.headers["text_encoder"].path == pipeline / "text_encoder"
    assert checkpoint.classes == {
        "scheduler": ("diffusers", "SomeScheduler"),
        "text_encoder": ("transformers", "SomeEncoder"),
        "tokenizer": ("transformers", "SomeTokenizer"),
        "transformer": ("diffusers", "SomeTransformer"),
    }


def test_a_component_of_a_pipeline_with_pickles_only_is_refused(pipeline):
    (pipeline / "tokenizer" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert refused(pipeline).path == str(pipeline / "tokenizer" / "pytorch_model.bin")


def test_a_pipeline_without_weights(pipeline):
    (pipeline / "model_index.json").write_text('{"transformer_2": ["diffusers", "SomeTransformer"]}')
    error = refused(pipeline)
    assert "none of the components that model_index.json names has weights" in error.found
    assert error.items == ("transformer_2",)


def test_a_component_behind_a_broken_link(pipeline):
    (pipeline / "text_encoder").rename(pipeline / "elsewhere")
    (pipeline / "text_encoder").symlink_to(pipeline / "gone")
    assert "the link leads to" in refused(pipeline, HeaderError).found


def test_tensor_bytes_are_limited(tmp_path):
    header = read_checkpoint(write(tmp_path, "model.safetensors")).headers[""]
    tensor = header.tensors["a.weight"]
    assert len(read_tensor_bytes(header, tensor, limit=24)) == 24
    with pytest.raises(HeaderError) as caught:
        read_tensor_bytes(header, tensor, limit=23)
    assert "'a.weight' takes 24 bytes" in caught.value.found
    assert "at most 23 bytes" in caught.value.expected
    assert caught.value.items == ("a.weight",)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    header = read_checkpoint(write(tmp_path, "model.safetensors")).headers[""]
    path = header.files[0]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(HeaderError) as caught:
        read_tensor_bytes(header, header.tensors["b"])
    assert "2 bytes are missing" in caught.value.found
    assert "Another program" in caught.value.hint
