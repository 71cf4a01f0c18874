"""What family files say of schedulers, against what diffusers says of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import diffusers
import pytest
from diffusers.loaders.single_file_utils import SCHEDULER_DEFAULT_CONFIG
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.wan import pipeline_wan

from slipcast.engine.pipeline.classes import scheduler_class
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.family import Family
from slipcast.registry.runtime import Sampling

CATALOGUE = load_catalogue()


def stated(family: str, variant: str | None) -> Mapping[str, Any] | None:
    """The scheduler's arguments of a variant, its own or the family's."""
    own = CATALOGUE[family].sampling or Sampling()
    return (own if variant is None else own.joined(CATALOGUE[family].variants[variant].sampling)).scheduler


def with_scheduler() -> list[tuple[Family, str | None]]:
    everything = [(family, variant) for family in CATALOGUE.values() for variant in family.variants or (None,)]
    return [(family, variant) for family, variant in everything if stated(family.id, variant) is not None]


@pytest.mark.parametrize(("family", "variant"), [("sd-1", "base"), ("sd-1", "inpaint"), ("sdxl", "base")])
def test_stable_diffusions_scheduler_is_that_of_single_files(family: str, variant: str) -> None:
    arguments = stated(family, variant)
    assert arguments
    assert arguments.items() <= SCHEDULER_DEFAULT_CONFIG.items()
    kind = scheduler_class(CATALOGUE[family].companions["scheduler"])
    made, expected = kind(**arguments), kind.from_config(SCHEDULER_DEFAULT_CONFIG)
    assert made.betas.equal(expected.betas)
    made.set_timesteps(5)
    expected.set_timesteps(5)
    assert made.timesteps.equal(expected.timesteps)


def test_a_shift_by_the_pictures_size_is_that_of_the_pipeline() -> None:
    said = {name: value.default for name, value in inspect.signature(calculate_shift).parameters.items()}
    assert stated("flux-1", "dev") == {
        "use_dynamic_shifting": True,
        "base_shift": said["base_shift"],
        "max_shift": said["max_shift"],
        "base_image_seq_len": said["base_seq_len"],
        "max_image_seq_len": said["max_seq_len"],
    }


@pytest.mark.parametrize("variant", ["base", "turbo"])
def test_what_a_pipelines_docstring_expects_of_its_scheduler_is_stated(variant: str) -> None:
    (scheduler,) = re.findall(r"scheduler \(\[.*?\n {8}vae ", diffusers.Krea2Pipeline.__doc__ or "", re.DOTALL)
    said = dict(re.findall(r"`(\w+)=([\d.]+|True)`", scheduler))
    assert {name: str(value) for name, value in (stated("krea-2", variant) or {}).items()} == said


def test_the_shift_of_a_video_is_that_of_the_size_that_the_pipeline_draws() -> None:
    example = pipeline_wan.EXAMPLE_DOC_STRING
    said = {height: float(shift) for shift, height in re.findall(r"([\d.]+) for (\d+)P", example)}
    height = inspect.signature(diffusers.WanPipeline.__call__).parameters["height"].default
    for variant in ("t2v-1.3b", "t2v-14b", "i2v"):
        assert (stated("wan", variant) or {})["flow_shift"] == said[str(height)]
    assert (stated("wan", "ti2v-5b") or {})["flow_shift"] == said["720"]


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("chroma", None),
        ("cogview-4", "base"),
        ("lumina-2", None),
        ("sd3", "medium"),
        ("sdxl", "turbo"),
        ("wan", "flf2v"),
        ("wan", "t2v-a14b"),
        ("z-image", "base"),
        ("z-image", "omni"),
    ],
)
def test_no_scheduler_is_made_where_no_source_states_one(family: str, variant: str | None) -> None:
    assert stated(family, variant) is None


@pytest.mark.parametrize(
    ("family", "variant"), [pytest.param(*each, id=f"{each[0].id}-{each[1]}") for each in with_scheduler()]
)
def test_a_scheduler_can_be_made_of_what_is_stated(family: Family, variant: str | None) -> None:
    arguments = stated(family.id, variant) or {}
    own = family.variants[variant].companions if variant is not None else {}
    made = scheduler_class(own.get("scheduler", family.companions["scheduler"]))(**arguments)
    assert {name: made.config[name] for name in arguments} == dict(arguments)
