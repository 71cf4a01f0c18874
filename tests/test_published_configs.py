"""Published configurations of checkpoints of which no header is recorded: their models' tensors show them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipcast.engine.build import build_on_meta, build_with_buffers, unknown_arguments
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.expression import evaluate_config

CONFIGS = Path(__file__).parent / "data" / "model_configs"
PUBLISHED = [
    ("cosmos-1", "nvidia--Cosmos-1.0-Diffusion-7B-Text2World.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.0-Diffusion-2B-Text2Image.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.0-Diffusion-2B-Video2World.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.0-Diffusion-14B-Text2Image.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.0-Diffusion-14B-Video2World.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.5-Predict-Base-2B.transformer"),
    ("cosmos-predict2", "nvidia--Cosmos-2.5-Predict-Base-14B.transformer"),
    ("qwen-image", "Qwen--Qwen-Image-Layered.transformer"),
]


@pytest.mark.parametrize(("family", "name"), PUBLISHED)
def test_the_tensors_of_a_model_show_its_published_configuration(family: str, name: str) -> None:
    published: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())["config"]
    of = load_catalogue()[family]
    published = {argument: value for argument, value in published.items() if not argument.startswith("_")}
    for unknown in unknown_arguments(of.model, published):
        del published[unknown]
    model = build_on_meta(of.model, published)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    inferred = evaluate_config(of.config, of.let, of.key_map.native_view(names))
    complete = build_on_meta(of.model, inferred).config
    assert {argument: _plain(complete[argument]) for argument in published} == published


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_qwen_image_s_vae_is_wan_s_but_for_its_name() -> None:
    small = {"base_dim": 8, "z_dim": 4}
    wan = build_with_buffers("diffusers.AutoencoderKLWan", {**small, "in_channels": 4, "out_channels": 4})
    qwen = build_with_buffers("diffusers.AutoencoderKLQwenImage", {**small, "input_channels": 4})
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(tensor.shape, generator=random) / 8 for name, tensor in wan.state_dict().items()}
    sample = torch.randn(1, 4, 5, 16, 16, generator=random)
    outputs = []
    for model in (wan, qwen):
        model.load_state_dict(values, assign=True)
        with torch.no_grad():
            outputs.append(model.eval()(sample, return_dict=False)[0])
    assert torch.equal(outputs[0], outputs[1])
    for argument in ("latents_mean", "latents_std", "dim_mult", "temperal_downsample"):
        assert wan.config[argument] == qwen.config[argument]
