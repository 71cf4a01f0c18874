"""Bytes of weights, blocks and layers against the loaded models and diffusers' own groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import _common, apply_group_offloading, group_offloading
from torch import nn

import slipcast
from slipcast.engine.plan import Plan
from slipcast.engine.policy.activations import denoiser_batch, denoiser_bytes, dequantised_bytes, encoder_bytes
from slipcast.engine.policy.memory import Part, peak_of
from slipcast.engine.policy.parts import STREAMED_LAYERS, blocks_of, layers_of, part_of_plan, tables_of
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.runtime import Offload, Runtime, Sampling
from support.recorded import recorded, write_checkpoint
from support.tiny_pipelines import PIPELINES, model_of, write_pipeline

SIZE = ImageSize(64, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline("z-image", tmp_path_factory.mktemp("parts") / "pipeline")


def groups(model: nn.Module, **options: Any) -> list[int]:
    """Bytes of each group that diffusers moves by itself, of those that hold a block or a layer."""
    apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), **options)
    hooks = [
        hook.group
        for module in model.modules()
        if (registry := getattr(module, "_diffusers_hook", None)) is not None
        and (hook := registry.get_hook(group_offloading._GROUP_OFFLOADING)) is not None
        and hook.group.onload_leader is module
        and hook.group.modules
        and module is not model
    ]
    sizes = [
        sum(tensor.nbytes for module in group.modules for tensor in (*module.parameters(), *module.buffers()))
        for group in hooks
    ]
    return sorted(filter(None, sizes))


@pytest.mark.parametrize("family", ["z-image", "flux-1", "qwen-image", "sd3", "wan", "chroma", "cogview-4"])
def test_blocks_are_among_those_that_diffusers_moves_one_by_one(family: str) -> None:
    model = PIPELINES[family]().transformer
    offload = load_catalogue()[family].runtime.offload
    assert offload is not None
    sizes = [
        sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))
        for block in map(model.get_submodule, blocks_of(model, offload))
    ]
    theirs = Counter(groups(model, offload_type="block_level", num_blocks_per_group=1))
    assert not Counter(sizes) - theirs
    assert sum(sizes) > 0.9 * sum((theirs - Counter(sizes)).elements()), "what is left out is small"


@pytest.mark.parametrize("family", ["sdxl", "sd-1", "sd-2", "sdxl-refiner"])
def test_unets_come_in_parts_of_their_blocks(family: str) -> None:
    model = model_of(family)
    offload = load_catalogue()[family].runtime.offload
    assert offload is not None
    blocks = [model.get_submodule(path) for path in blocks_of(model, offload)]
    kinds = {type(block).__name__ for block in blocks}
    assert kinds == {"BasicTransformerBlock", "ResnetBlock2D", "Downsample2D", "Upsample2D"}
    assert len(blocks) == sum(type(module).__name__ in kinds for module in model.modules())
    bytes_of = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(bytes_of) > whole / 2
    assert sum(sorted(bytes_of)[-2:]) < min(groups(model, offload_type="block_level", num_blocks_per_group=1)[-2:])


def test_a_block_is_the_outermost_member_of_a_list_that_is_named() -> None:
    offload = Offload(blocks=("a", "{s=b|c}.{i}.d", "a.{i}.e"))
    assert offload.block_of("a.3.e.1.weight") == "a.3"
    assert offload.block_of("b.0.d.10.weight") == "b.0.d.10"
    assert offload.block_of("c.0.d.1") == "c.0.d.1"
    for outside in ("a", "a.weight", "a.x.0.weight", "b.0.e.1.weight", "d.0.d.1.weight", "aa.1.weight", "a.01.weight"):
        assert offload.block_of(outside) is None


def test_layers_are_those_that_diffusers_moves_one_by_one() -> None:
    assert STREAMED_LAYERS == _common._GO_LC_SUPPORTED_PYTORCH_LAYERS
    model = PIPELINES["z-image"]().text_encoder
    sizes = [
        sum(tensor.nbytes for tensor in layer.parameters()) for layer in map(model.get_submodule, layers_of(model))
    ]
    assert sorted(sizes) == groups(model, offload_type="leaf_level")


@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_a_part_has_the_bytes_of_the_loaded_model(folder: Path, fp8: str) -> None:
    loaded = slipcast.load(folder, device="cpu", dtype="bfloat16", fp8=fp8, mmap=False)
    model, plan = loaded.model, loaded.report.plan
    family = load_catalogue()["z-image"]
    part = part_of_plan("transformer", plan, family.runtime, family.sampling, SIZE)
    assert part.kind == "denoiser"
    assert part.weight_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    blocks = [*model.layers, *model.noise_refiner, *model.context_refiner]
    sizes = [sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers())) for block in blocks]
    assert sorted(part.block_bytes) == sorted(sizes)
    assert part.table_bytes == ()
    assert part.streamed[0][0] < part.weight_bytes


def test_a_model_without_blocks_in_its_family_comes_as_a_whole(folder: Path) -> None:
    plan = slipcast.plan(folder, device="cpu", dtype="bfloat16")
    assert part_of_plan("transformer", plan, Runtime(), Sampling(), SIZE).block_bytes == ()
    assert part_of_plan("unet", plan, Runtime(), Sampling(denoiser="unet"), SIZE).kind == "denoiser"
    assert part_of_plan("controlnet", plan, Runtime(), Sampling(), SIZE).kind == "other"


def test_views_of_the_mapped_file_take_no_memory_of_their_own(folder: Path) -> None:
    mapped = slipcast.plan(folder, device="cpu", dtype="bfloat16", mmap=True)
    copied = slipcast.plan(folder, device="cpu", dtype="bfloat16", mmap=False)
    assert part_of_plan("transformer", mapped, Runtime(), Sampling(), SIZE).weight_bytes < copied.bytes.resident / 10
    assert part_of_plan("transformer", copied, Runtime(), Sampling(), SIZE).weight_bytes == copied.bytes.resident


def in_order(model: nn.Module, tokens: torch.Tensor) -> list[str]:
    """The layers that diffusers moves one by one, in the order in which a forward calls them."""
    called: list[str] = []
    for name in layers_of(model):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        model(tokens)
    return called


@pytest.mark.parametrize(
    ("family", "role"),
    [
        ("z-image", "text_encoder"),
        ("sd3", "text_encoder"),
        ("sd3", "text_encoder_3"),
        ("lumina-2", "text_encoder"),
        ("flux-1", "text_encoder_2"),
    ],
)
def test_a_text_encoder_looks_its_tables_up_before_any_layer_works(family: str, role: str, tmp_path: Path) -> None:
    folder = write_pipeline(family, tmp_path / "pipeline")
    plan = slipcast.plan(folder, component=role, device="cpu", dtype="bfloat16", mmap=False)
    part = part_of_plan(role, plan, Runtime(), Sampling(), SIZE)
    model = PIPELINES[family]().components[role]
    order = in_order(model, torch.zeros(1, 8, dtype=torch.long))
    tables = tables_of(model)
    assert tables
    assert part.table_bytes
    first = next(index for index, name in enumerate(order) if name not in tables)
    assert set(order[:first]) <= set(tables)
    assert not set(order[first:]) & set(tables)
    sizes = [sum(tensor.nbytes for tensor in model.get_submodule(name).parameters()) for name in order]
    pairs = [one + other for one, other in zip(sizes, [*sizes[1:], 0], strict=True)]
    (at_tables, lookup), (at_layers, activations) = part.streamed
    assert at_tables >= max(pairs[:first])
    assert at_layers >= max(pairs[first:])
    assert 0 < lookup < activations


def test_a_full_size_text_encoder_takes_its_table_and_little_more(tmp_path: Path) -> None:
    """Measured on an H200: 913 MiB, of which a VAE of 160 MiB that stayed beside it."""
    header = "te-qwen3-4b--comfy-bf16"
    path = write_checkpoint(recorded(header), tmp_path / "encoder.safetensors")
    plan = slipcast.plan(path, device="cuda:9.0,140GiB", dtype="bfloat16")
    part = part_of_plan("text_encoder", plan, Runtime(), Sampling(), SIZE)
    beside = Part("vae", "vae", 167_666_902)
    measured = 913 * 2**20
    assert measured <= peak_of("streamed_encoders", (part, beside)) <= 1.1 * measured
    assert peak_of("resident", (part, beside)) > part.weight_bytes + part.activation_bytes


def plan_of(folder: Path, **settings: Any) -> Plan:
    return slipcast.plan(folder, device="cpu", dtype="bfloat16", **settings)


def test_activations_follow_the_measured_coefficient(folder: Path) -> None:
    plan = plan_of(folder)
    facts = Sampling(size_multiple=16)
    work, measured = denoiser_bytes(plan, Runtime(activation_bytes_per_token=1000), facts, ImageSize(1024, 1024))
    assert (work, measured) == (1000 * (4096 + 512), True)
    guided = Sampling(size_multiple=16, guidance=4)
    assert denoiser_bytes(plan, Runtime(activation_bytes_per_token=1000), guided, ImageSize(1024, 1024))[0] == 2 * work
    float32 = slipcast.plan(folder, device="cpu", dtype="float32")
    assert (
        denoiser_bytes(float32, Runtime(activation_bytes_per_token=1000), facts, ImageSize(1024, 1024))[0] == 2 * work
    )
    guess, measured = denoiser_bytes(plan, Runtime(), facts, ImageSize(1024, 1024))
    assert not measured
    assert guess > work
    assert encoder_bytes(plan, Runtime(activation_bytes_per_token=10), ImageSize(batch=2)) == (2 * 5120, True)


def test_guidance_doubles_the_batch_unless_it_is_an_input() -> None:
    assert denoiser_batch(Sampling(guidance=4), {}) == 2
    assert denoiser_batch(Sampling(guidance=4), {"guidance_embeds": True}) == 1
    assert denoiser_batch(Sampling(guidance=0), {}) == denoiser_batch(Sampling(), {}) == 1


def test_one_dequantised_layer_is_counted(folder: Path) -> None:
    plain, quantised = plan_of(folder), plan_of(folder, fp8="storage")
    largest = max(torch.Size(target.shape).numel() for target in quantised.targets if target.codec is not None)
    assert dequantised_bytes(plain) == 0
    assert dequantised_bytes(quantised) == 2 * largest
