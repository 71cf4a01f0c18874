"""What is planned where nobody names a size, against what diffusers' own pipelines then draw."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
from PIL import Image

from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in
from slipcast.engine.pipeline.assemble import assemble, pipeline_record
from slipcast.engine.pipeline.generate import generate
from slipcast.engine.pipeline.own_size import own_size
from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.policy.sizes import AskedSize, ImageSize
from slipcast.registry.settings import resolve_settings
from support.tiny_pipelines import PIPELINES, write_pipeline


class Drawn(Exception):  # noqa: N818
    """Ends a call where it would make its noise."""


def drawn_by_diffusers(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> ImageSize:
    """The size of the noise that a call without a size begins from."""
    seen: dict[str, int] = {}
    modular = isinstance(pipe, diffusers.ModularPipeline)
    owner = diffusers.modular_pipelines.anima.before_denoise.AnimaPrepareLatentsStep if modular else type(pipe)
    signature = inspect.signature(owner.prepare_latents)

    def noted(*arguments: Any, **options: Any) -> None:
        given = arguments[1:] if modular else arguments
        seen.update(signature.bind(*given, **options).arguments)
        raise Drawn

    monkeypatch.setattr(owner, "prepare_latents", noted)
    pipe.set_progress_bar_config(disable=True)
    denoiser = pipe.components.get("transformer") or pipe.components["unet"]
    with pytest.raises(Drawn), torchvision_or_stand_in(denoiser):
        pipe(prompt="a seven", num_inference_steps=1)
    return ImageSize(seen["width"], seen["height"], seen.get("num_frames", 1))


@pytest.mark.parametrize("family", sorted(PIPELINES))
def test_a_pipelines_own_size_is_what_diffusers_draws(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = PIPELINES[family]()
    denoiser = pipe.components.get("transformer") or pipe.components["unet"]
    found = own_size(type(pipe), dict(denoiser.config))
    assert found == drawn_by_diffusers(pipe, monkeypatch)


@pytest.mark.parametrize(
    ("name", "config", "size"),
    [
        ("StableDiffusionPipeline", {"sample_size": 64}, ImageSize(512, 512)),
        ("StableDiffusionPipeline", {"sample_size": [64, 96]}, ImageSize(768, 512)),
        ("StableDiffusionXLPipeline", {"sample_size": 128}, ImageSize(1024, 1024)),
        ("StableDiffusionPipeline", {"sample_size": -64}, ImageSize(1024, 1024)),
        ("FluxPipeline", {"sample_size": [-3, 128]}, ImageSize(1024, 1024)),
        ("WanPipeline", {}, ImageSize(832, 480, 81)),
        ("HunyuanImagePipeline", {}, ImageSize(2048, 2048)),
        ("MochiPipeline", {}, ImageSize(848, 480, 19)),
        ("ZImagePipeline", {}, ImageSize(1024, 1024)),
        ("QwenImage21Pipeline", {}, ImageSize(1024, 1024)),
    ],
)
def test_own_sizes_of_published_pipelines(name: str, config: dict[str, Any], size: ImageSize) -> None:
    assert own_size(getattr(diffusers, name), config) == size


@pytest.mark.parametrize("family", ["sd-1", "wan"])
def test_plan_and_generation_are_of_the_pipelines_own_size(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pipeline(family, tmp_path / "pipeline")
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
    size = plan.policies.size
    told = plan.to_json()["size"]
    assert told == {"width": size.width, "height": size.height, "frames": size.frames}
    pipe = assemble(plan)
    assert size == drawn_by_diffusers(pipe, monkeypatch) != ImageSize()
    seen: list[ImageSize] = []
    monkeypatch.setattr("slipcast.engine.pipeline.generate.refit_", lambda _, drawn, **__: seen.append(drawn))
    with pytest.raises(Drawn):
        generate(pipe, GenerationRequest("a seven", steps=1))
    assert seen == [size]


def test_a_picture_to_start_from_says_the_size(tmp_path: Path) -> None:
    folder = write_pipeline("sd-1", tmp_path / "pipeline")
    request = GenerationRequest("a seven", image=Image.new("RGB", (77, 130)), steps=2, strength=0.5)
    assert request.size == AskedSize(picture=(77, 130))
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values, request.size)
    assert plan.policies.size == ImageSize(72, 128)
    pipe = assemble(plan)
    assert generate(pipe, request).images[0].size == (72, 128)
    assert pipeline_record(pipe).policies.size == ImageSize(72, 128)
