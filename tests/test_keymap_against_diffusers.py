"""Z-Image's key map against diffusers' own conversion of the same native files, name by name and value by value."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.conversion import convert_header
from slipcast.engine.convert import convert
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.identify import Match, identify
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import CONFIG, natively, tiny_tensors, write_native

PREFIXES = ["", "model.diffusion_model.", "diffusion_model."]
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors(torch.float32, seed=1)


@pytest.fixture
def config_folder(tmp_path: Path) -> str:
    config = {"_class_name": "ZImageTransformer2DModel", **CONFIG}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "config")


def _same(actual: Tensors, expected: Tensors) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor) for name, tensor in expected.items()
    )


def _from_diffusers(path: Path, config_folder: str) -> dict[str, torch.Tensor]:
    model = ZImageTransformer2DModel.from_single_file(
        str(path), config=config_folder, torch_dtype=torch.float32, local_files_only=True
    )
    return model.state_dict()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_loaded_model_is_the_one_that_diffusers_loads(
    tmp_path: Path, tensors: Tensors, config_folder: str, prefix: str
) -> None:
    path = write_native(tmp_path / "model.safetensors", tensors, prefix=prefix)
    theirs = _from_diffusers(path, config_folder)
    ours = slipcast.load(path, device="cpu", dtype="float32", fp8="off").model.state_dict()
    assert _same(ours, theirs)
    assert _same(ours, tensors)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_converted_file_is_what_diffusers_makes_of_it(tmp_path: Path, tensors: Tensors, prefix: str) -> None:
    path = write_native(tmp_path / "model.safetensors", tensors, prefix=prefix)
    bare = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(bare)
    _convert(path, tmp_path / "out.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "out.safetensors"), theirs)


def test_unique_values_come_back_where_they_were(tmp_path: Path, tensors: Tensors) -> None:
    stop = 0
    ids: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.numel()
        ids[name] = torch.arange(start, stop).view(tensor.shape)
    path = write_native(tmp_path / "ids.safetensors", ids)
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(copy.copy(load_file(path)))
    _convert(path, tmp_path / "out.safetensors", "diffusers")
    assert _same(load_file(tmp_path / "out.safetensors"), theirs)
    _convert(tmp_path / "out.safetensors", tmp_path / "back.safetensors", "native")
    assert _same(load_file(tmp_path / "back.safetensors"), natively(ids))


def test_the_published_names_go_where_diffusers_puts_them(tmp_path: Path) -> None:
    """At full height and a width of one, since diffusers only ever cuts rows."""
    path = write_checkpoint(recorded("z-image-turbo--comfy-bf16"), tmp_path / "full.safetensors")
    ours = {tensor.name: tensor.shape[0] for tensor in convert_header(_match(path), "diffusers").tensors}
    thin = {
        name: torch.empty((shape or (1,))[0], *(1 for _ in (shape or (1,))[1:]))
        for name, (_, shape) in recorded("z-image-turbo--comfy-bf16").tensors.items()
    }
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(thin)
    assert ours == {name: tensor.shape[0] for name, tensor in theirs.items()}


def test_padding_tokens_without_their_first_axis(tmp_path: Path, tensors: Tensors) -> None:
    flat = natively(tensors)
    for name in ("x_pad_token", "cap_pad_token"):
        flat[name] = flat[name][0].clone()
    save_file(flat, tmp_path / "model.safetensors")
    ours = slipcast.load(tmp_path / "model.safetensors", device="cpu", dtype="float32", fp8="off").model.state_dict()
    assert _same(ours, tensors)


def _match(path: Path) -> Match:
    return identify(read_checkpoint(path), load_catalogue())[0]


def _convert(path: Path, out: Path, layout: str) -> None:
    convert(_match(path), out, layout)  # type: ignore[arg-type]
