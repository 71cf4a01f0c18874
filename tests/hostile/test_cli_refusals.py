"""Inputs that must be refused, through the command line: said in full, without a traceback, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.command_line import json_of, run
from support.family_files import write_family
from support.isolation import isolate
from support.raw_safetensors import entry, write_raw
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import natively, tiny_tensors, write_native

PREFIX = "model.diffusion_model."
READING = ["inspect", "plan", "load", "explain"]
LOADING = ["plan", "load"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def tensors():
    return tiny_tensors()


def contents(folder):
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def refused(folder, *arguments):
    """The error object of a command line that is refused, which people read in full as well."""
    before = contents(folder)
    error = json_of(*arguments, exit_code=2)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for label, key in (("", "found"), ("expected: ", "expected"), ("to do:    ", "hint")):
        assert error[key]
        assert label + error[key] in result.stderr
    assert contents(folder) == before
    return error


def two(second="second", **changes):
    """A header of two tensors, the second of which may be odd."""
    return {"first": entry(), second: {**entry(offsets=(8, 16)), **changes}}


DUPLICATE = (
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
)


def write_truncated(path):
    path.write_bytes(write_raw(path, two(), bytes(16)).read_bytes()[:40])


DAMAGED = {
    "an empty file": (lambda path: path.write_bytes(b""), "the file is empty", "Download the file again"),
    "a truncated header": (write_truncated, "cut off inside its header", "Download the file again"),
    "truncated data": (
        lambda path: write_raw(path, two(), bytes(10)),
        "the file is cut off: 6 of 16 bytes of tensors are missing",
        "Download the file again",
    ),
    "a header of 2^63 bytes": (
        lambda path: write_raw(path, two(), bytes(16), length=2**63),
        "say that the header takes 9223372036854775808 bytes",
        "Download the file again",
    ),
    "overlapping offsets": (
        lambda path: write_raw(path, two(data_offsets=(4, 12)), bytes(16)),
        "there is an overlap of 4 bytes before 'second'",
        "download or convert it again",
    ),
    "a duplicate name": (
        lambda path: write_raw(path, DUPLICATE, bytes(8)),
        "the header holds the name a twice",
        "download or convert it again",
    ),
    "an unknown dtype": (
        lambda path: write_raw(path, two(dtype="F13"), bytes(16)),
        "of 'second', the dtype is 'F13'",
        "download or convert it again",
    ),
}


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("kind", list(DAMAGED))
def test_damaged_files(folder, command, kind):
    write, found, hint = DAMAGED[kind]
    path = folder / "model.safetensors"
    write(path)
    error = refused(folder, command, path)
    assert error["error"] == "HeaderError"
    assert error["path"] == str(path)
    assert found in error["found"]
    assert hint in error["hint"]


@pytest.mark.parametrize("command", READING)
def test_a_missing_shard(folder, command):
    write_raw(folder / "m-00001-of-00002.safetensors", {"a": entry()}, bytes(8))
    weight_map = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in (index, folder):
        error = refused(folder, command, path)
        assert error["error"] == "HeaderError"
        assert "m-00002-of-00002.safetensors" in error["found"] + " ".join(error["items"])
        assert "ownload" in error["hint"]


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin"])
def test_a_pickle(folder, command, suffix):
    path = folder / f"model{suffix}"
    path.write_bytes(b"\x80\x04anything")
    error = refused(folder, command, path)
    assert error["error"] == "UnsupportedFileError"
    assert f"the name ends in {suffix}, which is a Python pickle" in error["found"]
    assert "Convert it" in error["hint"]


@pytest.mark.parametrize("command", READING)
def test_a_folder_without_a_model(folder, command):
    below = folder / "models"
    below.mkdir()
    (below / "notes.txt").write_text("none")
    error = refused(folder, command, below)
    assert (error["error"], error["found"]) == ("UnsupportedFileError", "the folder holds no model")
    assert error["hint"] == "Name the folder or the file with the weights."


QUERY = "layers.0.attention.to_q"
LORA = {f"{QUERY}.lora_A.weight": ("BF16", (4, 64)), f"{QUERY}.lora_B.weight": ("BF16", (64, 4))}


@pytest.mark.parametrize("command", ["inspect", "plan", "load"])
@pytest.mark.parametrize(
    ("record", "said"),
    [
        (LORA, "it looks like an adapter"),
        (recorded("lora-flux1--kohya"), "it looks like an adapter"),
        ({f"model.{QUERY}.weight": ("BF16", (64, 64))}, "names begin with model."),
    ],
)
def test_what_is_no_model_of_a_known_family(folder, command, record, said):
    path = write_checkpoint(record, folder / "model.safetensors")
    error = refused(folder, command, path)
    assert error["error"] == "IdentificationError"
    assert "no family claims this checkpoint" in error["found"]
    assert said in error["found"]
    count = len(record if isinstance(record, dict) else record.tensors)
    assert f"{count} weight{'s' if count > 1 else ''}; formats" in error["found"]
    adapter = "adapter" in said
    assert ("load_lora_weights" if adapter else "slipcast explain PATH") in error["hint"]
    assert bool(error["items"]) == ("the nearest is " in error["expected"])
    assert not (adapter and error["items"])


@pytest.mark.parametrize("command", LOADING)
class TestFilesThatDoNotAddUp:
    def test_one_tensor_missing(self, folder, tensors, command):
        native = natively(tensors)
        del native["layers.1.feed_forward.w2.weight"]
        save_file(native, folder / "model.safetensors")
        error = refused(folder, command, folder / "model.safetensors")
        assert error["error"] == "AccountingError"
        assert error["found"] == "the tensors do not add up to a model of the family z-image: 1 missing"
        assert error["items"] == ["missing: layers.1.feed_forward.w2.weight (for layers.1.feed_forward.w2.weight)"]
        assert "incomplete" in error["hint"]

    def test_a_tensor_missing_that_shows_the_model_s_size(self, folder, tensors, command):
        native = natively(tensors)
        del native["x_embedder.weight"]
        save_file(native, folder / "model.safetensors")
        for each in (command, "inspect"):
            error = refused(folder, each, folder / "model.safetensors")
            assert error["error"] == "ConfigError"
            assert "show how to build a z-image: no tensor x_embedder.weight" in error["found"]
            assert "the file is incomplete or damaged" in error["hint"]
            assert "(slipcast.families/z-image.yaml, config.dim)" in error["hint"]
            assert error["path"] == str(folder / "model.safetensors")

    def test_one_tensor_too_many(self, folder, tensors, command):
        path = write_native(folder / "model.safetensors", tensors | {"odd.weight": torch.ones(3, 2)})
        error = refused(folder, command, path)
        assert error["found"] == "the tensors do not add up to a model of the family z-image: 1 left over"
        assert error["items"] == ["left over: odd.weight F32 [3, 2]"]
        assert "unexpected=[odd.weight]" in error["hint"]
        assert json_of(command, path, "--set", "unexpected=[odd.*]")["dropped"] == {
            "odd.weight": "left over; the setting unexpected lets it pass"
        }

    def test_a_scale_too_many_is_never_let_pass(self, folder, tensors, command):
        path = write_native(folder / "model.safetensors", tensors | {"odd.scale_weight": torch.ones(1)})
        error = refused(folder, command, path, "--set", "unexpected=['*']")
        assert error["error"] == "QuantisationError"
        assert error["found"] == "1 scale or marker that no weight consumes"
        assert error["items"] == ["odd.scale_weight F32 [1]"]

    def test_a_quantised_weight_too_many_is_never_let_pass(self, folder, tensors, command):
        more = {"odd.weight": torch.ones(4, 2).to(torch.float8_e4m3fn), "odd.scale_weight": torch.ones(1)}
        path = write_native(folder / "model.safetensors", tensors | more)
        error = refused(folder, command, path, "--set", "unexpected=['*']")
        assert error["error"] == "AccountingError"
        assert error["items"] == ["left over: odd.weight F8_E4M3 [4, 2]"]

    def test_one_wrong_shape(self, folder, tensors, command):
        wrong = {"layers.0.feed_forward.w2.weight": torch.ones(64, 100)}
        path = write_native(folder / "model.safetensors", tensors | wrong)
        error = refused(folder, command, path)
        assert error["found"] == "the tensors do not add up to a model of the family z-image: 1 of another shape"
        assert "layers.0.feed_forward.w2.weight is [64, 100]" in error["items"][0]

    def test_two_prefixes_mixed(self, folder, tensors, command):
        native = {PREFIX + name: tensor for name, tensor in natively(tensors).items()}
        stray = "layers.2.ffn_norm1.weight"
        native[f"diffusion_model.{stray}"] = native.pop(PREFIX + stray)
        save_file(native, folder / "model.safetensors")
        error = refused(folder, command, folder / "model.safetensors")
        assert error["error"] == "AccountingError"
        assert f"1 tensors lie outside the prefix '{PREFIX}'" in error["hint"]
        assert any(f"diffusion_model.{stray}" in item for item in error["items"])


@pytest.mark.parametrize("command", LOADING)
def test_a_format_that_is_recognised_but_not_loaded(folder, tensors, command):
    native = natively(tensors)
    name = "layers.0.feed_forward.w1.weight"
    codes = native[name].numel() // 2
    native[name] = torch.zeros(codes, 1, dtype=torch.uint8)
    native[f"{name}.absmax"] = torch.ones(codes // 32)
    native[f"{name}.quant_map"] = torch.linspace(-1, 1, 16)
    native[f"{name}.quant_state.bitsandbytes__nf4"] = torch.frombuffer(
        bytearray(b'{"blocksize": 64}'), dtype=torch.uint8
    )
    path = folder / "model.safetensors"
    save_file(native, path)
    assert json_of("inspect", path)["formats"]["bnb_nf4"] == 1
    error = refused(folder, command, path)
    assert error["error"] == "UnsupportedFormatError"
    assert "not supported yet: bnb_nf4 (1 weights)" in error["found"]
    assert error["hint"] == "load it with diffusers with bitsandbytes"


@pytest.mark.parametrize("command", [*READING, "families"])
@pytest.mark.parametrize(
    ("more", "found", "hint"),
    [
        ("prefixs: ['']\n", "unknown field 'prefixs'", "did you mean 'prefixes'?"),
        ("title: Again\n", "title", ""),
    ],
    ids=["a misspelt field", "a key twice"],
)
def test_a_wrong_family_file(folder, command, more, found, hint):
    path = write_family(folder / "mine", "mine", more=more)
    model = write_checkpoint(recorded("z-image-turbo--comfy-bf16"), folder / "model.safetensors", blocks=1)
    arguments = [command] if command == "families" else [command, model]
    error = refused(folder, *arguments, "--set", "families=[mine]")
    line = path.read_text().splitlines().index(more.strip()) + 1
    assert error["error"] == "FamilyFileError"
    assert (error["line"], error["path"]) == (line, f"{folder / 'mine' / 'mine.yaml'}:{line}")
    assert found in error["found"]
    assert hint in error["hint"]


@pytest.mark.parametrize("folders", [["mine"], ["mine", "yours"]])
def test_two_families_with_one_id(folder, folders):
    name = "z-image" if len(folders) == 1 else "mine"
    for each in folders:
        write_family(folder / each, name)
    error = refused(folder, "families", "--set", f"families=[{', '.join(folders)}]")
    assert error["error"] == "FamilyFileError"
    assert f"the id '{name}' is taken by " in error["found"]
    assert Path(error["path"].rpartition(":")[0]) == folder / folders[-1] / f"{name}.yaml"
    assert "rename the file and its id" in error["hint"]
