"""``slipcast inspect``: the contract of its JSON, its text, and folders of checkpoints."""

from __future__ import annotations

import json

import pytest

from support.command_line import json_of, output_of, run
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint

TURBO = "z-image-turbo--comfy-bf16"
PREFIX = "model.diffusion_model."
TENSORS = 453 - 28 * 13
"""Of the record, with 2 of its 30 blocks."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def model(folder):
    return write_checkpoint(recorded(TURBO), folder / "model.safetensors", prefix=PREFIX, blocks=2)


def write_lora(path):
    return write_checkpoint({"layers.0.q.lora_A.weight": ("BF16", (4, 8))}, path)


def test_the_contract(model):
    answer = json_of("inspect", model)
    assert {
        key: answer[key] for key in ("family", "variant", "layout", "prefix", "formats", "tensors", "problems")
    } == {
        "family": "z-image",
        "variant": "base",
        "layout": "native",
        "prefix": PREFIX,
        "formats": {"plain": TENSORS},
        "tensors": TENSORS,
        "problems": [],
    }
    assert answer["bytes"] == model.stat().st_size - 8 - int.from_bytes(model.read_bytes()[:8], "little")
    assert [part["family"] for part in answer["components"]] == ["z-image"]
    assert any("cap_embedder.1.weight [3840, 2560]" in line for line in answer["evidence"])
    assert answer["guesses"] == ["variant base: no tensor and no file name says otherwise"]


def test_what_people_read(model):
    lines = output_of("inspect", model).splitlines()
    assert lines[0] == str(model)
    said = dict(line.strip().split("  ", 1) for line in lines[1:] if line.startswith("  ") and line[2] != " ")
    assert said["family"].strip() == "z-image, variant base"
    assert said["layout"].strip() == f"native names under the prefix {PREFIX}"
    assert said["formats"].strip() == f"{TENSORS} plain"
    assert f"in {TENSORS} tensors" in said["size"]
    assert "found cap_embedder.1.weight [3840, 2560]" in said["evidence"]
    assert "problems" not in said


def test_problems_are_shown(folder):
    tensors = {**recorded(TURBO).tensors, "nothing.scale_weight": ("F32", (1,))}
    path = write_checkpoint(tensors, folder / "odd.safetensors", blocks=1)
    assert "no weight consumes nothing.scale_weight" in output_of("inspect", path)


def test_a_pipeline_folder_lists_its_components(folder):
    pipeline = folder / "pipeline"
    for name in ("transformer", "vae"):
        (pipeline / name).mkdir(parents=True)
    classes = {"transformer": ["diffusers", "ZImageTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "ZImagePipeline", **classes}))
    write_checkpoint(recorded(TURBO), pipeline / "transformer" / "model.safetensors", blocks=1)
    write_checkpoint({"encoder.conv_in.weight": ("F32", (4, 3, 3, 3))}, pipeline / "vae" / "model.safetensors")
    answer = json_of("inspect", pipeline)
    assert [part["name"] for part in answer["components"]] == ["transformer"]
    assert answer["problems"] == ["no family claims the component vae"]
    assert output_of("inspect", pipeline).splitlines()[0] == str(pipeline)


def test_the_settings_of_the_call_reach_it(model):
    result = run("inspect", model, "--set", "family=nobody")
    assert result.exit_code == 2
    assert "no family is called 'nobody'" in result.stderr


def test_each_checkpoint_of_a_folder_is_inspected(folder, model):
    below = folder / "more" / "below"
    below.mkdir(parents=True)
    write_lora(below / "lora.safetensors")
    (folder / "notes.txt").write_text("no checkpoint")
    answer = json_of("inspect", folder)
    assert answer["path"] == str(folder)
    first, second = answer["checkpoints"]
    assert (first["path"], first["family"]) == (str(model), "z-image")
    assert (second["path"], second["error"]) == (str(below / "lora.safetensors"), "IdentificationError")
    assert "looks like an adapter" in second["found"]

    assert answer["taken"] == str(model)

    heading, _, known, unknown, more, taken = output_of("inspect", folder).splitlines()
    assert heading == f"{folder}: 2 checkpoints"
    assert known.split()[:3] == ["model.safetensors", "z-image,", "variant"]
    assert unknown.split()[:2] == ["more/below/lora.safetensors", "unknown"]
    assert unknown.endswith("…")
    assert len(unknown) < 160
    assert more.endswith(f": slipcast inspect {below / 'lora.safetensors'}")
    assert "the folder stands for model.safetensors" in taken
    assert json_of("plan", folder)["origin"] == json_of("plan", model)["origin"]


def test_a_folder_of_several_is_not_one_model_for_any_command(folder, model):
    (folder / "other.gguf").write_bytes(b"GGUF")
    answer = json_of("inspect", folder, exit_code=1)
    assert answer["taken"] is None
    error = json_of("load", folder, exit_code=2)
    assert [str(folder / name) for name in error["items"]] == [entry["path"] for entry in answer["checkpoints"]]
    assert "says what each is" in error["hint"]
    assert run("inspect", folder).stdout.splitlines()[-1].endswith("name it: the folder is not one model.")


def test_what_can_not_be_read_is_listed_with_its_reason(folder, model):
    (folder / "broken.safetensors").write_bytes(b"")
    (folder / "old.ckpt").write_bytes(b"")
    answer = json_of("inspect", folder, exit_code=1)
    assert [entry.get("error", entry.get("family")) for entry in answer["checkpoints"]] == [
        "HeaderError",
        "z-image",
        "UnsupportedFileError",
    ]
    result = run("inspect", folder)
    assert result.exit_code == 1
    lines = {line.split()[0]: line for line in result.stdout.splitlines()[2:]}
    assert lines["broken.safetensors"].split(maxsplit=2)[1:] == ["unreadable", "the file is empty"]
    assert "a Python pickle" in lines["old.ckpt"]


def test_a_folder_with_one_model_is_that_model(folder, model):
    assert json_of("inspect", folder)["family"] == "z-image"


def test_a_folder_whose_one_model_lies_deeper_lists_it(folder, model):
    (folder / "deep").mkdir()
    moved = model.rename(folder / "deep" / "model.safetensors")
    assert [entry["path"] for entry in json_of("inspect", folder)["checkpoints"]] == [str(moved)]


@pytest.mark.parametrize("empty", [True, False])
def test_a_folder_without_a_model_is_refused(folder, empty):
    if not empty:
        (folder / "notes.txt").write_text("no checkpoint")
    error = json_of("inspect", folder, exit_code=2)
    assert (error["error"], error["found"]) == ("UnsupportedFileError", "the folder holds no model")
