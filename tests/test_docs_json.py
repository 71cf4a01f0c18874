"""docs/json.md says what commands really write: the same keys, the same types, in its tables and in its examples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from slipcast.demo.prompted import PIPELINE
from slipcast.registry.errors import Extras
from support.command_line import json_of
from support.isolation import isolate
from support.tiny_pipelines import write_pipeline
from support.tiny_z_image import natively, tiny_tensors, write_native

TEXT = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
BY_NAME = {
    "formats",
    "config",
    "modules",
    "dropped",
    "folded",
    "synthesised",
    "settings",
    "left_out",
    "stayed",
    "compile",
    "arguments",
    "status",
}
"""Keys of objects whose own keys are names, of which an example shows some."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def model(folder):
    tensors = tiny_tensors()
    return write_native(folder / "turbo.safetensors", tensors, prefix="model.diffusion_model.")


def documented(section):
    """The keys of a section's table, and its example."""
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", SECTIONS[section], re.MULTILINE)
    keys = re.findall(r"`(\w+)`", " ".join(cells))
    (example,) = re.findall(r"```json\n(.*?)```", SECTIONS[section], re.DOTALL)
    return set(keys), json.loads(example)


def differing(example, real, where=""):
    """Places where an example has other keys or other types than what is really written."""
    if example is None or real is None:
        return []
    if type(example) is not type(real) and {type(example), type(real)} != {int, float}:
        return [f"{where}: {type(example).__name__}, really {type(real).__name__}"]
    if isinstance(example, list):
        return differing(example[0], real[0], f"{where}[]") if example and real else []
    if not isinstance(example, dict):
        return []
    by_name = where.rpartition(".")[2] in BY_NAME
    if by_name:
        pairs = list(zip(example.values(), real.values(), strict=False))
        return [problem for one, other in pairs for problem in differing(one, other, f"{where}.*")]
    wrong = [f"{where}.{key}: only in one" for key in example.keys() ^ real.keys()]
    for key in example.keys() & real.keys():
        wrong += differing(example[key], real[key], f"{where}.{key}")
    return wrong


def test_the_comparison_can_fail():
    assert differing({"a": [1]}, {"b": [1]}) != []
    assert differing({"a": [{"b": 1}]}, {"a": [{"b": "1"}]}) != []
    assert differing({"formats": {"x": 1}}, {"formats": {"y": 2.5, "z": 1}}) == []
    assert differing({"formats": {"x": 1}}, {"formats": {"y": "2"}}) != []


def agree(section, real):
    keys, example = documented(section)
    assert keys == example.keys()
    assert keys == real.keys()
    assert differing(example, real) == []


def test_inspect(model):
    agree("inspect", json_of("inspect", model))


FORMATS = (
    "plain fp8_scaled fp8_raw nvfp4 mxfp8 int8 int8_convrot gguf bnb_nf4 bnb_fp4 bnb_int8 torchao nunchaku sdnq "
    "compressed_tensors svdquant awq unknown"
)


def test_the_formats_are_listed():
    listed = SECTIONS["inspect"].split("The formats are ")[1].split(". ")[0]
    assert re.findall(r"`(\w+)`", listed) == FORMATS.split()


@pytest.mark.parametrize("device", ["cuda:8.6,12GiB", "cpu"])
def test_plan(folder, device):
    tensors = tiny_tensors()
    norm = {"norm_final.weight": tensors["cap_embedder.0.weight"].clone()}
    path = write_native(folder / "turbo.safetensors", tensors | norm)
    real = json_of("plan", path, "--device", device, "--set", "fp8=storage")
    inner = re.findall(r"`(\w+)`", SECTIONS["plan"].split("whenever their `version` does: ")[1])
    assert set(inner) < real.keys()
    agree("plan", {key: value for key, value in real.items() if key not in inner})


def test_load(model, monkeypatch):
    monkeypatch.setenv("CXX", "sh")  # a program that is there: nothing is compiled before a forward
    plan = json_of("plan", model, "--device", "cpu")
    real = json_of("load", model, "--device", "cpu", "--set", "compile=blocks")
    assert real["compile"]
    assert plan.keys() < real.keys()
    agree("load", {key: value for key, value in real.items() if key not in plan})


def test_generate(folder):
    pipeline = write_pipeline("z-image", folder / "pipeline")
    asked = ("--prompt", "a", "--steps", "1", "--size", "64x64", "--device", "cpu")
    agree("generate", json_of("generate", pipeline, *asked))
    plan = json_of("generate", pipeline, "--dry-run", "--device", "cpu")
    said = set(re.findall(r"`(\w+)`", SECTIONS["generate"].split("With `--dry-run`")[1]))
    keys = plan.keys() | {key for part in plan["parts"].values() for key in part}
    assert keys < said


def test_bench(folder):
    asked = ("--device", "cpu", "--iterations", "1", "--warmup", "0")
    drawn = ("--prompt", "seven", "--size", "64x64", "--steps", "1")
    json_of("bench", PIPELINE, *drawn, *asked, "--save", "reference.json")
    bound = ("--max-latency-regression", "0", "--min-psnr", "99", "--set", "fp8=storage")
    real = json_of("bench", PIPELINE, *asked, "--against", "reference.json", *bound, exit_code=1)
    agree("bench", real)
    assert real["against"].keys() <= set(re.findall(r"`(\w+)`", SECTIONS["bench"]))


def test_errors(folder):
    native = natively(tiny_tensors())
    del native["x_embedder.bias"]
    save_file(native, folder / "model.safetensors")
    real = json_of("plan", "model.safetensors", exit_code=2)
    agree("Errors", real)
    assert documented("Errors")[1] == real


def test_errors_in_documents():
    real = json_of("settings", "--set", "devise=cpu", exit_code=2)
    assert real.keys() - documented("Errors")[0] == {"line", "field"}
    assert "`line` (integer or null) and `field` (string" in SECTIONS["Errors"]


def test_keys_of_some_errors_alone():
    listed = SECTIONS["Errors"].partition("Some kinds have keys more:")[2]
    assert all(f"`{name}`" in listed for name in Extras.__annotations__)


def test_convert(model):
    agree("convert", json_of("convert", model, "transformer", "--layout", "diffusers"))


@pytest.mark.slow
def test_check():
    agree("check", json_of("check", "z-image"))


def test_explain(model):
    agree("explain", json_of("explain", model))


def test_families():
    agree("families", json_of("families"))
    one = json_of("families", "z-image")
    assert {"source", "header_sources"} <= one.keys()
    assert "`source`, and `header_sources`" in SECTIONS["families"]


def test_settings():
    agree("settings", json_of("settings", "--explain", "fp8.mode", "--set", "fp8=storage"))


def test_a_folder_of_checkpoints(folder, model):
    (folder / "odd.safetensors").write_bytes(b"")
    real = json_of("inspect", folder, exit_code=1)
    assert list(real) == ["path", "taken", "checkpoints"]
    assert "the document has `path`; `checkpoints`, a list" in SECTIONS["inspect"]
    assert "and `taken`, the path" in SECTIONS["inspect"]
    error, answer = real["checkpoints"]
    assert error.keys() == documented("Errors")[0]
    assert answer.keys() == documented("inspect")[0]
