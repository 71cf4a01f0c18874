"""Published configurations of checkpoints of which no header is recorded: their models' tensors show them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipcast.engine.build import build_on_meta, unknown_arguments
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
