"""Pipelines' folders that are incomplete, exchanged or made with intent: each is refused, by what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.pipeline.classes import pipeline_class, takes_value
from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.registry.errors import (
    AccountingError,
    CompanionError,
    ConfigError,
    HeaderError,
    IdentificationError,
    SettingsError,
    UnsupportedFileError,
)
from slipcast.registry.settings import resolve_settings
from support.tiny_pipelines import write_pipeline

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("originals")
    return {family: write_pipeline(family, place / family) for family in ("z-image", "flux-1", "sd-1", "cogview-4")}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Folder:
    """A pipeline's folder that may be changed, by family."""
    return lambda family: shutil.copytree(originals[family], tmp_path / family)


def without(part: Path, *words: str) -> None:
    """Leave the tensors whose names have one of the words out of a part's file."""
    (file,) = part.glob("*.safetensors")
    kept = {name: tensor for name, tensor in load_file(file).items() if not any(word in name for word in words)}
    save_file(kept, file, metadata={"format": "pt"})


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def plan(path: Path, **settings: Any) -> Any:
    return make_pipeline_plan(path, resolve_settings({"device": "cpu", **settings}).values)


@pytest.mark.parametrize(
    ("family", "role", "lacking"),
    [
        ("z-image", "text_encoder", "embed_tokens"),
        ("z-image", "text_encoder", "q_norm"),
        ("z-image", "text_encoder", "layers.0.self_attn"),
        ("flux-1", "text_encoder_2", "shared"),
        ("z-image", "vae", "decoder.mid"),
    ],
)
def test_a_part_that_lacks_tensors_is_never_filled_with_random_ones(
    folder: Folder, family: str, role: str, lacking: str
) -> None:
    path = folder(family)
    without(path / role, lacking)
    with pytest.raises((AccountingError, ConfigError, IdentificationError)):
        slipcast.pipeline(path, device="cpu")


def test_a_part_whose_file_is_of_something_else_is_refused(folder: Folder) -> None:
    path = folder("z-image")
    save_file({"foo": torch.ones(2)}, next((path / "text_encoder").glob("*.safetensors")), metadata={"format": "pt"})
    with pytest.raises(IdentificationError):
        plan(path)


def test_what_its_own_library_reads_is_complete_as_well(folder: Folder) -> None:
    path = folder("cogview-4")
    without(path / "text_encoder", "embed_tokens")
    with pytest.raises(AccountingError) as caught:
        slipcast.pipeline(path, device="cpu")
    assert caught.value.items == ("embed_tokens.weight: missing",)


def test_parts_of_other_families_are_refused_in_a_folder_too(folder: Folder) -> None:
    path = folder("flux-1")
    (path / "text_encoder").rename(path / "x")
    (path / "text_encoder_2").rename(path / "text_encoder")
    (path / "x").rename(path / "text_encoder_2")
    with pytest.raises((CompanionError, IdentificationError)) as swapped:
        plan(path)
    assert "text_encoder" in str(swapped.value)
    path = folder("z-image")
    shutil.rmtree(path / "vae")
    shutil.copytree(folder("sd-1") / "vae", path / "vae")
    with pytest.raises(CompanionError, match="as the vae"):
        plan(path)


SECRET = "a-word-from-elsewhere"


@pytest.fixture
def outside(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A vocabulary and merges beside the pipeline's folder, and a whole tokenizer."""
    place = tmp_path / "outside"
    place.mkdir()
    whole = json.loads((originals["z-image"] / "tokenizer" / "tokenizer.json").read_text())
    (place / "vocab.json").write_text(json.dumps({**whole["model"]["vocab"], SECRET: 999}))
    (place / "merges.txt").write_text("#version: 0.2\n")
    (place / "tokenizer.json").write_text(json.dumps(whole))
    return place


@pytest.mark.parametrize("class_name", ["CLIPTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {"vocab": "vocab.json", "merges": "merges.txt"},
        {"vocab_file": "vocab.json"},
        {"tokenizer_file": "tokenizer.json"},
    ],
)
def test_a_tokenizer_reads_no_file_outside_its_folder(
    folder: Folder,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    class_name: str,
    absolute: bool,
    keys: dict[str, str],
) -> None:
    path = folder("z-image")
    monkeypatch.chdir(outside)
    edit(path / "model_index.json", tokenizer=["transformers", class_name])
    (path / "tokenizer" / "tokenizer.json").unlink()
    named = {key: str(outside / name) if absolute else name for key, name in keys.items()}
    edit(path / "tokenizer" / "tokenizer_config.json", tokenizer_class=class_name, **named)
    with pytest.raises(CompanionError) as caught:
        plan(path)
    assert (caught.value.roles, len(caught.value.items)) == (("tokenizer",), len(keys))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"fast_tokenizer_files": ["../outside/tokenizer.json"]}),
        ("tokenizer_config.json", {"init_inputs": ["vocab.json"]}),
        ("tokenizer_config.json", {"extra": {"deep": ["../../outside/vocab.json"]}}),
        ("special_tokens_map.json", {"vocab": "vocab.json"}),
        ("preprocessor_config.json", {"other_file": "../x"}),
        ("processor_config.json", {"audio_tokenizer": {"audio_tokenizer_name_or_path": "/nowhere"}}),
    ],
)
def test_no_configuration_of_a_processor_names_files_elsewhere(
    folder: Folder, outside: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, Any]
) -> None:
    path = folder("z-image")
    monkeypatch.chdir(outside)
    file = path / "tokenizer" / name
    if not file.exists():
        file.write_text("{}")
    edit(file, **values)
    with pytest.raises(CompanionError, match="names files outside its folder"):
        plan(path)


def test_where_a_published_tokenizer_was_once_saved_does_no_harm(folder: Folder, outside: Path) -> None:
    path = folder("z-image")
    saved = {"name_or_path": str(outside), "special_tokens_map_file": str(outside / "vocab.json"), "unk_token": "<unk>"}
    edit(path / "tokenizer" / "tokenizer_config.json", vocab_file="tokenizer.json", merges_file=None, **saved)
    (path / "tokenizer" / "special_tokens_map.json").write_text(json.dumps({"merges": ["/ etc", "/ /"]}))
    assert "tokenizer" in plan(path).parts


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "vae", "folder"])
@pytest.mark.parametrize("named", ["a" * 5000, "a\0b", "", "not-there"])
def test_settings_that_name_nothing_readable_are_refused(folder: Folder, role: str, named: str) -> None:
    with pytest.raises((HeaderError, SettingsError)):
        plan(folder("z-image"), companions={role: named})


def test_a_tokenizer_that_is_no_folder_is_refused(folder: Folder) -> None:
    path = folder("z-image")
    with pytest.raises(CompanionError, match="as the tokenizer: no folder"):
        plan(path, companions={"tokenizer": str(path / "model_index.json")})


@pytest.mark.parametrize("path", [5, None, b"model"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UnsupportedFileError, match="as the path"):
        slipcast.pipeline(path)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("flux-1", "image_encoder", "x"),
        ("flux-1", "feature_extractor", {"a": 1}),
        ("flux-1", "image_encoder", ["a", "b", "c"]),
        ("sd-1", "safety_checker", "x"),
        ("sd-1", "safety_checker", {"x": 1}),
        ("sd-1", "image_encoder", 7),
        ("sd-1", "requires_safety_checker", "yes"),
    ],
)
def test_a_plain_value_in_a_parts_place_is_refused(folder: Folder, family: str, name: str, value: Any) -> None:
    path = folder(family)
    edit(path / "model_index.json", **{name: value})
    with pytest.raises(CompanionError, match=f"{name} is") as caught:
        plan(path)
    assert caught.value.roles == (name,)


def test_a_pipelines_own_plain_arguments_are_taken(folder: Folder) -> None:
    path = folder("sd-1")
    edit(path / "model_index.json", requires_safety_checker=False, image_encoder=None)
    assert plan(path).arguments["requires_safety_checker"] is False


@pytest.mark.parametrize(
    ("pipeline", "name", "value", "taken"),
    [
        ("Krea2Pipeline", "text_encoder_select_layers", (1, 2), True),
        ("Krea2Pipeline", "text_encoder_select_layers", ({},), False),
        ("Krea2Pipeline", "patch_size", 2, True),
        ("Krea2Pipeline", "patch_size", True, False),
        ("WanPipeline", "boundary_ratio", 0.9, True),
        ("WanPipeline", "expand_timesteps", 1, False),
        ("WanPipeline", "transformer_2", "x", False),
        ("FluxPipeline", "vae", "x", False),
    ],
)
def test_which_values_a_pipelines_class_takes(pipeline: str, name: str, value: Any, taken: bool) -> None:
    assert takes_value(pipeline_class(pipeline), name, value) is taken


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"scaling_factor": None}, "scaling_factor: None"),
        ({"scaling_factor": "x"}, "scaling_factor: 'x'"),
        ({"scaling_factor": 0}, "scaling_factor: 0"),
        ({"scaling_factor": True}, "scaling_factor: True"),
        ({"shift_factor": "x"}, "shift_factor: 'x'"),
        ({"shift_factor": [0.5]}, "shift_factor: [0.5]"),
    ],
)
def test_latents_are_scaled_by_numbers_alone(folder: Folder, values: dict[str, Any], line: str) -> None:
    path = folder("z-image")
    edit(path / "vae" / "config.json", **values)
    with pytest.raises(ConfigError, match="can't be scaled or moved by") as caught:
        plan(path)
    assert caught.value.items == (line,)


def test_text_is_no_number_of_a_configuration(folder: Folder) -> None:
    path = folder("z-image")
    edit(path / "transformer" / "config.json", norm_eps="x")
    with pytest.raises(ConfigError, match="norm_eps is 'x', and by default the number"):
        plan(path)


def test_a_vae_need_not_shift_its_latents(folder: Folder) -> None:
    path = folder("z-image")
    edit(path / "vae" / "config.json", shift_factor=None)
    assert plan(path).parts["vae"].plan is not None


@pytest.mark.parametrize("lacking", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_lacks_what_the_pipeline_needs_is_refused_as_it_loads(folder: Folder, lacking: str) -> None:
    path = folder("z-image")
    (path / "tokenizer" / lacking).unlink()
    with pytest.raises(CompanionError, match=lacking) as caught:
        slipcast.pipeline(path, device="cpu")
    assert caught.value.roles == ("tokenizer",)


def test_a_pipeline_without_chat_needs_no_template(folder: Folder) -> None:
    path = folder("sd-1")
    (path / "tokenizer" / "chat_template.jinja").unlink()
    assert slipcast.pipeline(path, device="cpu").tokenizer.chat_template is None
