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
from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.registry.errors import AccountingError, CompanionError, ConfigError, IdentificationError
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
