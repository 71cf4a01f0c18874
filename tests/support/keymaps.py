"""The sample families of tests/data/keymaps, the recorded headers that belong to them, and their model classes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.strict_yaml import load_yaml
from support.recorded import recorded

FOLDER = Path(__file__).parents[1] / "data" / "keymaps"
Shapes = dict[str, tuple[int, ...]]

_SIDE_LEAVES = {"weight_scale", "scale_weight", "scale_input", "input_scale", "comfy_quant", "scaled_fp8"}


@dataclass(frozen=True)
class Sample:
    """One sample family; ``model`` is "library.Class"."""

    model: str
    config: Mapping[str, Any]
    let: Mapping[str, Any]
    keys: Mapping[str, Any]
    key_map: KeyMap


NATIVE_PAIRS = [
    ("z-image", "z-image-turbo--comfy-bf16", ""),
    ("z-image", "z-image-turbo--comfy-int8-convrot", ""),
    ("z-image", "z-image-turbo--kijai-fp8-scaled", ""),
    ("flux1", "flux1-dev--bfl-native", ""),
    ("flux1", "flux1-schnell--bfl-native", ""),
    ("flux1", "flux1-fill-dev--bfl-native", ""),
    ("flux1", "flux1-dev--comfyanonymous-fp8-scaled-test", "model.diffusion_model."),
    ("flux2", "flux2-klein-4b--bfl-bf16", ""),
    ("flux2", "flux2-klein-9b--kv-bfl-bf16", ""),
    ("flux2", "flux2-dev--comfy-fp8mixed", ""),
    ("krea-2", "krea2--raw-native", ""),
    ("krea-2", "krea2-turbo--comfy-bf16", ""),
    ("krea-2", "krea2-turbo--comfy-fp8-scaled", ""),
    ("krea-2", "krea2-turbo--comfy-mxfp8", ""),
    ("anima", "anima--base-v1.0-comfy", "net."),
    ("anima", "anima--preview-comfy", "net."),
    ("anima-text-conditioner", "anima--base-v1.0-comfy", "net.llm_adapter."),
    ("wan", "wan2.1-t2v-1.3b--native", ""),
    ("wan", "wan2.1-t2v-14b--native", ""),
    ("wan", "wan2.1-i2v-14b--native", ""),
    ("wan", "wan2.2-i2v-a14b--native", ""),
    ("wan", "wan2.2-ti2v-5b--native", ""),
    ("wan-vace", "wan2.1-vace-1.3b--native", ""),
    ("sd3", "sd3-medium--incl-clips-aio", "model.diffusion_model."),
    ("sd3", "sd35-large--aio-dit-vae", "model.diffusion_model."),
    ("sdxl-unet", "sdxl--base-1.0-aio", "model.diffusion_model."),
    ("sd15-unet", "sd15--aio", "model.diffusion_model."),
    ("ldm-vae", "sd15--aio", "first_stage_model."),
    ("ldm-vae", "sdxl--base-1.0-aio", "first_stage_model."),
    ("ldm-vae", "sd3-medium--incl-clips-aio", "first_stage_model."),
    ("ldm-vae", "sd35-large--aio-dit-vae", "first_stage_model."),
    ("ldm-vae", "vae-flux1--ae-ldm", ""),
    ("hunyuan-video", "hunyuan-video--native", ""),
    ("t5-xxl", "te-t5xxl--comfy-fp16", ""),
    ("t5-xxl", "te-t5xxl--comfy-fp8-raw", ""),
    ("t5-xxl", "te-t5xxl--hf-sharded", ""),
    ("qwen3", "te-qwen3-0.6b--anima-comfy", "model."),
    ("qwen3", "te-qwen3-4b--comfy-bf16", "model."),
    ("qwen3", "te-qwen3-8b--klein9b", "model."),
    ("open-clip-g", "sdxl--base-1.0-aio", "conditioner.embedders.1.model."),
    ("qwen2.5-vl", "te-qwen2.5-vl-7b--qwen-image", ""),
    ("wan-vae", "vae-wan2.1--native", ""),
    ("wan-vae", "vae-qwen-image--comfy-bf16", ""),
]
"""Sample, record in native names, prefix in the record."""

MODEL_PAIRS = [
    ("z-image", "z-image--turbo-diffusers"),
    ("flux1", "flux1-dev--diffusers"),
    ("flux1", "flux1-schnell--diffusers"),
    ("flux2", "flux2-dev--diffusers"),
    ("flux2", "flux2-klein-4b--diffusers"),
    ("flux2", "flux2-klein-9b--diffusers"),
    ("krea-2", "krea2--raw-diffusers"),
    ("wan", "wan2.1-t2v-14b--diffusers"),
    ("sdxl-unet", "sdxl--unet-diffusers"),
    ("sd15-unet", "sd15--unet-diffusers"),
    ("ldm-vae", "sdxl--vae-diffusers"),
    ("ldm-vae", "vae-flux1--diffusers"),
    ("flux2-vae", "vae-flux2--comfy-f32"),
    ("flux2-vae", "vae-flux2--diffusers"),
    ("wan-vae", "vae-qwen-image--diffusers"),
    ("open-clip-g", "te-clip-g--sdxl"),
]
"""Sample, record in the model's names."""


def sample_names() -> list[str]:
    """All sample families."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def sections(name: str) -> dict[str, Any]:
    """A sample file's sections, laid over those of the sample that it extends."""
    data = dict(load_yaml(FOLDER / f"{name}.yaml").data)
    if "extends" in data:
        base = sections(data["extends"])
        for section in ("let", "config", "keys", "drop"):
            data[section] = {**base.get(section, {}), **data.get(section, {})}
        data = {**base, **data}
    return data


@cache
def sample(name: str) -> Sample:
    """A sample family, its key map parsed."""
    data = sections(name)
    key_map = KeyMap.parse(data.get("keys", {}), data.get("drop", {}), data.get("contains", {}))
    return Sample(data["model"], data["config"], data.get("let", {}), data.get("keys", {}), key_map)


def shapes_of(record: str, prefix: str = "") -> Shapes:
    """Names, without the prefix, and shapes of a record; scales and markers are left out."""
    return {
        name[len(prefix) :]: shape
        for name, (_, shape) in recorded(record).tensors.items()
        if shape is not None and name.startswith(prefix) and name.rpartition(".")[2] not in _SIDE_LEAVES
    }


def meta_shapes(model: str, config: Mapping[str, Any], names: Collection[str] = ()) -> Shapes:
    """Names and shapes of the model class built with this config; of tied tensors the first, and those in ``names``."""
    everything, first = _meta_shapes(model, json.dumps(config))
    return {name: shape for name, shape in everything.items() if name in first or name in names}


@cache
def _meta_shapes(model: str, config: str) -> tuple[Shapes, frozenset[str]]:
    library, name = model.split(".")
    model_class = getattr(import_module(library), name)
    arguments = json.loads(config)
    with torch.device("meta"):
        if library == "transformers":
            built = model_class(model_class.config_class(**arguments))
        else:
            built = model_class(**arguments)
    first = {name for name, _ in [*built.named_parameters(), *built.named_buffers()]}
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}, frozenset(first)
