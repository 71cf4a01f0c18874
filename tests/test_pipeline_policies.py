"""Policies of whole pipelines: what is decided, what is done, and that the pictures stay the same. All on the CPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import slipcast
from slipcast.api import resolve
from slipcast.engine.devices import resolve_device
from slipcast.engine.pipeline.apply_policies import refit_
from slipcast.engine.pipeline.assemble import assemble, pipeline_record
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan, make_pipeline_plan
from slipcast.engine.pipeline.policies import policy_parts
from slipcast.engine.policy.global_flags import Tf32
from slipcast.engine.policy.memory import TIERS, peak_of
from slipcast.engine.policy.sizes import ImageSize
from slipcast.engine.policy.snapshot import Snapshot
from slipcast.engine.policy.speed import compiled_by_speed, decide_speed, is_gguf
from slipcast.engine.policy.vae import VaeWay
from slipcast.engine.policy.vae_calls import VaeCalls, set_tile_side_, tile_side
from slipcast.engine.policy.visiting import Turns, visit_
from slipcast.registry.errors import DeviceError, SettingsError
from support.tiny_pipelines import PIPELINES, heavy_z_image, plain_pipeline, qwen_image_vae, write_pipeline

SIZE = ImageSize(64, 64)
MEMORY = 64 * 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_pipeline(family, tmp_path_factory.mktemp(family) / "pipeline")
        for family in ("z-image", "sd-1", "sdxl", "anima")
    }


def planned(
    folder: Path, free: int = MEMORY, size: ImageSize = SIZE, unified: bool = False, **settings: Any
) -> PipelinePlan:
    """A plan for this CPU, taken for a device with memory of its own."""
    device = resolve_device("cpu")[0]
    snapshot = Snapshot(device, MEMORY, free, 0, unified)
    return make_pipeline_plan(
        folder, resolve(folder, {"device": "cpu", "dtype": "bfloat16", "mmap": False, **settings}), size, snapshot
    )


def picture(pipe: Any, **more: Any) -> np.ndarray:
    call: dict[str, Any] = {"prompt": "a seven", "num_inference_steps": 2, "height": 64, "width": 64, **more}
    pipe.set_progress_bar_config(disable=True)
    call["generator"] = torch.Generator().manual_seed(3)
    if isinstance(pipe, diffusers.ModularPipeline):
        return np.asarray(pipe(**call, output_type="np", output="images"))
    return np.asarray(pipe(**call, output_type="np").images)


def peaks(folder: Path) -> dict[str, int]:
    plan = planned(folder)
    parts = policy_parts(plan.parts, plan.found.sampling, SIZE)
    return {tier: peak_of(tier, parts, plan.policies.memory.vae) for tier in TIERS}


def test_a_made_up_device_gets_the_tier_that_its_memory_allows(folders: dict[str, Path]) -> None:
    folder = folders["z-image"]
    expected = peaks(folder)
    assert expected["resident"] > expected["streamed"] > expected["streamed_encoders"] >= expected["whole_modules"]
    for tier in TIERS:
        fitting = next(each for each in TIERS if expected[each] <= expected[tier])
        plan = planned(folder, expected[tier], vae={"tiling": "off"})
        assert plan.policies.memory.tier == fitting
        assert plan.settings["memory"].engaged == fitting
        for role, placement in plan.policies.memory.placements.items():
            planned_part = plan.parts[role].plan
            assert planned_part is not None
            assert planned_part.device == "cpu"
            assert placement in ("resident", "in_turn", "streamed", "moved")
    with pytest.raises(DeviceError, match="at its peak"):
        planned(folder, min(expected.values()) - 1, vae={"tiling": "off"})


def test_a_refused_pipeline_reads_no_weight(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipcast.engine.pipeline.assemble.load_planned", None)
    with pytest.raises(DeviceError) as refusal:
        slipcast.pipeline(folders["z-image"], device="cpu", memory="low", device_reserve_mib=1 << 30)
    assert "MiB are free" in refusal.value.expected


@pytest.mark.parametrize("reserve", [40_000, 1 << 30])
def test_a_refusal_for_the_memory_that_is_left_alone_names_its_setting(folders: dict[str, Path], reserve: int) -> None:
    settings: dict[str, Any] = {"device": "cuda:8.6,12GiB", "device_reserve_mib": reserve}
    with pytest.raises(DeviceError) as refusal:
        make_pipeline_plan(folders["z-image"], resolve(folders["z-image"], settings), SIZE)
    assert refusal.value.hint.startswith("set device_reserve_mib=512, which takes ")
    settings["device_reserve_mib"] = 512
    fitting = make_pipeline_plan(folders["z-image"], resolve(folders["z-image"], settings), SIZE).policies.memory
    assert f"{fitting.peak_bytes / 2**20:,.0f} MiB" in refusal.value.hint


def test_a_pipeline_is_planned_for_the_size_that_it_is_made_for(folders: dict[str, Path]) -> None:
    folder, settings = folders["z-image"], {"device": "cpu", "dtype": "bfloat16"}
    pipe = slipcast.pipeline(folder, size=(64, 96), **settings)
    assert pipeline_record(pipe).policies.size == ImageSize(64, 96)
    own = pipeline_record(slipcast.pipeline(folder, **settings)).plan.own_size
    assert pipeline_record(slipcast.pipeline(folder, size=(64, 0), **settings)).policies.size == ImageSize(
        64, own.height
    )
    with pytest.raises(DeviceError, match="at its peak"):
        slipcast.pipeline(folder, size=(160_000, 160_000), **settings)
    with pytest.raises(SettingsError, match="a height of 65 pixels"):
        slipcast.pipeline(folder, size=(64, 65), **settings)
    with pytest.raises(SettingsError, match="size is"):
        slipcast.pipeline(folder, size="64x64", **settings)


def named(hint: str) -> dict[str, int]:
    """What a hint names, with the MiB of each."""
    found = re.findall(r"(?:set|ask for) (.*?), which takes ([\d,]+) MiB", hint)
    return {what: int(mib.replace(",", "")) for what, mib in found}


def test_a_refusal_names_settings_that_make_it_fit(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    heavy_z_image().save_pretrained(str(folder))
    free = planned(folder, unified=True).policies.memory.peak_bytes - 1
    with pytest.raises(DeviceError) as refusal:
        planned(folder, free, unified=True)
    found = named(refusal.value.hint)
    assert [*found][:4] == ["text_encoder=fp8", "fp8=storage", "text_encoder=nvfp4", "fp8=storage fp8.weights=nvfp4"]
    given = ({"text_encoder": "fp8"}, {"fp8": "storage"}, {"fp8": {"mode": "storage", "weights": "nvfp4"}})
    for what, settings in zip([*found][:2] + [*found][3:4], given, strict=True):
        peak = planned(folder, free, unified=True, **settings).policies.memory.peak_bytes
        assert round(peak / 2**20) == found[what]


@pytest.mark.parametrize("family", ["z-image", "sd-1", "sdxl"])
@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_every_tier_draws_the_same_picture(family: str, fp8: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    expected = picture(resident := assemble(planned(folder, fp8=fp8)))
    if fp8 == "off":
        assert np.array_equal(expected, picture(plain_pipeline(type(resident), folder)))
    for tier, mode, free in (("streamed", "balanced", MEMORY), ("whole_modules", "low", MEMORY)):
        plan = planned(folder, free, memory=mode, fp8=fp8)
        assert plan.policies.memory.tier == tier
        pipe = assemble(plan)
        for _ in range(2):
            assert np.array_equal(picture(pipe), expected)
        assert slipcast.status(pipe)["memory"].engaged == tier


def test_models_that_are_there_in_turn_draw_the_same_picture(folders: dict[str, Path]) -> None:
    for family in ("z-image", "sd-1"):
        plan = planned(folders[family])
        in_turn = replace(
            plan.policies.memory,
            tier="in_turn",
            placements=dict.fromkeys(plan.policies.memory.placements, "in_turn"),
        )
        pipe = assemble(replace(plan, policies=replace(plan.policies, memory=in_turn)))
        assert np.array_equal(picture(pipe), picture(assemble(plan)))
        assert pipe._execution_device == torch.device("cpu")
        hooks = [pipe.components[role]._hf_hook for role in in_turn.placements]
        assert [bool(hook._homes) for hook in hooks].count(True) == 1, "only the VAE, which worked last, is there"


def test_a_visiting_model_leaves_also_after_a_failure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    visitor = visit_(model, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not visitor._homes
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    model(torch.ones(1, 2))
    assert not visitor._homes
    visitor.detach_hook(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_of_models_in_turn_one_is_there() -> None:
    turns = Turns()
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    one, two = (visit_(model, torch.device("cpu"), turns) for model in (first, second))
    first(torch.ones(1, 2))
    assert one._homes
    assert not two._homes
    second(torch.ones(1, 2))
    assert two._homes
    assert not one._homes


@pytest.mark.parametrize(
    ("setting", "precision", "engaged"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("bf16", "bfloat16", "bfloat16"),
        ("fp8", "fp8", "fp8"),
        ("nvfp4", "nvfp4", "nvfp4"),
    ],
)
def test_text_encoders_are_kept_as_the_setting_says(
    setting: str, precision: str, engaged: str, folders: dict[str, Path]
) -> None:
    plan = planned(folders["z-image"], text_encoder=setting)
    encoder = plan.parts["text_encoder"].plan
    assert encoder is not None
    assert precision in encoder.precisions
    kept = {module.path: module.precision for module in encoder.modules}
    assert kept["embed_tokens"] == "bfloat16"
    assert kept["norm"] == "bfloat16"
    assert (plan.settings["text_encoder"].requested, plan.settings["text_encoder"].engaged) == (setting, engaged)
    assert plan.denoiser.plan is not None
    assert set(plan.denoiser.plan.precisions) == {"bfloat16"}
    resident = planned(folders["z-image"]).policies.memory.peak_bytes
    assert (plan.policies.memory.peak_bytes < resident) == (setting in ("fp8", "nvfp4"))


def test_a_pipeline_with_everything_set_draws_a_picture_and_says_so(folders: dict[str, Path]) -> None:
    plan = planned(
        folders["z-image"],
        memory="low",
        vae={"tiling": "on", "tile_size": 40, "slicing": "on"},
        text_encoder="fp8",
        speed="default",
        fp8="storage",
    )
    pipe = assemble(plan)
    assert picture(pipe).std() > 0
    status = slipcast.status(pipe)
    assert status["memory"].engaged == "whole_modules"
    assert status["vae.tiling"].engaged == status["vae.slicing"].engaged == "encode and decode"
    assert status["vae.tile_size"].engaged == "64"
    assert "at least 8" in status["vae.tile_size"].reason
    assert status["text_encoder"].engaged == "fp8"
    assert status["speed"].engaged == "channels-last VAE"
    assert "no compiled blocks: blocks are compiled on a GPU" in status["speed"].reason
    assert pipe.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert not pipe.vae.use_tiling, "the switch is set around each call"


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_blocks_are_compiled_on_a_gpu_where_the_weights_are_not_gguf(
    device_kind: str, folders: dict[str, Path]
) -> None:
    device = "cpu" if device_kind == "cpu" else "cuda:9.0,80GiB"
    settings = resolve(folders["z-image"], {"device": device, "dtype": "bfloat16", "speed": "default"})
    plan = make_pipeline_plan(folders["z-image"], settings, SIZE)
    assert plan.denoiser.plan is not None
    assert bool(plan.denoiser.plan.compiled) == (device_kind == "cuda")
    assert ("compiled blocks" in plan.settings["speed"].engaged) == (device_kind == "cuda")
    assert plan.settings["compile"].engaged == ("blocks" if device_kind == "cuda" else "off")
    assert "speed=default" in plan.settings["compile"].reason


def test_of_gguf_weights_only_the_decode_is_compiled(folders: dict[str, Path]) -> None:
    settings = {"device": "cuda:9.0,80GiB", "dtype": "bfloat16", "speed": "default"}
    plan = make_pipeline_plan(folders["z-image"], resolve(folders["z-image"], settings), SIZE)
    denoiser = plan.denoiser.plan
    vae = plan.parts["vae"].plan
    assert denoiser is not None
    assert vae is not None
    first, *others = denoiser.modules
    packed = compiled_by_speed(
        denoiser.model_copy(update={"modules": (first.model_copy(update={"precision": "gguf"}), *others)}), "default"
    )
    assert is_gguf(packed)
    assert not is_gguf(denoiser)
    assert packed.compiled == ()
    assert packed.settings["compile"].requested == "auto"
    assert "weights are GGUF: with speed=default" in packed.settings["compile"].reason
    device = plan.policies.snapshot.device
    speed = decide_speed("default", device, {"transformer": packed}, vae, room=0, resident=True)
    assert speed.compile_decode
    assert speed.decision.engaged == "channels-last VAE, compiled decode"
    assert not decide_speed("default", device, {"transformer": denoiser}, vae, room=0, resident=True).compile_decode
    off = decide_speed("default", device, {"transformer": packed}, vae, compile_="off", room=0, resident=True)
    assert not off.compile_decode
    assert off.decision.engaged == "channels-last VAE"
    assert "compile=off was requested, which wins over speed" in off.decision.reason


def compiling(folder: Path, **settings: Any) -> PipelinePlan:
    asked = {"device": "cuda:9.0,80GiB", "dtype": "bfloat16", **settings}
    return make_pipeline_plan(folder, resolve(folder, asked), SIZE)


def test_what_is_asked_of_compile_wins_over_speed(folders: dict[str, Path]) -> None:
    folder = folders["z-image"]
    found = {}
    for speed in ("off", "default", "max"):
        for asked in ({}, {"compile": "off"}, {"compile": "blocks"}, {"compile": "max"}):
            plan = compiling(folder, speed=speed, **asked)
            denoiser = plan.denoiser.plan
            assert denoiser is not None
            decision = plan.settings["compile"]
            assert decision.requested == asked.get("compile", "auto")
            assert bool(denoiser.compiled) == (decision.engaged != "off")
            found[speed, decision.requested] = decision.engaged
            if speed != "off":
                assert ("compiled blocks" in plan.settings["speed"].engaged) == (decision.engaged != "off")
                wins = "compile=off was requested, which wins over speed" in plan.settings["speed"].reason
                assert wins == (decision.requested == "off")
    assert found == {
        **{(speed, given): given for speed in ("off", "default", "max") for given in ("off", "blocks", "max")},
        ("off", "auto"): "off",
        ("default", "auto"): "blocks",
        ("max", "auto"): "blocks",
    }
    assert compiling(folder, speed="default").settings["compile"].reason.startswith("by speed=default: ")
    assert compiling(folder, speed="default", compile="off").settings["compile"].reason == "as requested"
    assert "as compile=blocks asks for" in compiling(folder, compile="blocks").settings["speed"].reason


def test_speed_off_changes_nothing(folders: dict[str, Path]) -> None:
    flags = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    pipe = slipcast.pipeline(folders["z-image"], device="cpu", dtype="bfloat16", speed="off")
    assert np.array_equal(picture(pipe), picture(plain_pipeline(type(pipe), folders["z-image"])))
    assert flags == (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    assert slipcast.status(pipe)["speed"].engaged == "off"


def test_fused_projections_are_those_of_diffusers(tmp_path: Path) -> None:
    folder = write_pipeline("sd-1", tmp_path / "pipeline")
    plan = planned(folder, speed="max")
    assert plan.settings["speed"].engaged == "channels-last VAE, fused projections"
    assert plan.policies.speed.fuse == ("unet",)
    assert "no TF32" in plan.settings["speed"].reason
    plain = plain_pipeline(diffusers.StableDiffusionPipeline, folder)
    plain.vae.to(memory_format=torch.channels_last)
    plain.unet.fuse_qkv_projections()
    assert np.array_equal(picture(assemble(plan)), picture(plain))
    assert "quantised layers are not fused" in planned(folder, speed="max", fp8="storage").settings["speed"].reason
    assert planned(folder, speed="max", memory="low").policies.speed.fuse == ()
    tight = planned(folder, plan.policies.memory.peak_bytes, speed="max", vae={"tiling": "off"})
    assert "more than fit" in tight.settings["speed"].reason


@pytest.fixture
def _flags() -> Iterator[None]:
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    yield
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before


@pytest.mark.usefixtures("_flags")
def test_flags_are_restored_when_the_last_holder_goes() -> None:
    def on() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = on()
    first, second = Tf32(), Tf32()
    assert on() == (True, True)
    first.release()
    first.release()
    assert on() == (True, True)
    second.release()
    assert on() == before == (False, True)
    owner = torch.nn.Linear(1, 1)
    Tf32().until_gone(owner)
    assert on() == (True, True)
    del owner
    gc.collect()
    assert on() == before


@pytest.mark.usefixtures("_flags")
def test_flags_are_restored_when_putting_a_pipeline_together_fails(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(folders["z-image"])
    with_tf32 = replace(plan, policies=replace(plan.policies, speed=replace(plan.policies.speed, tf32=True)))
    pipe = assemble(with_tf32)
    assert torch.backends.cuda.matmul.allow_tf32
    del pipe
    gc.collect()
    assert not torch.backends.cuda.matmul.allow_tf32

    def fail(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr("slipcast.engine.pipeline.apply_policies.place_", fail)
    with pytest.raises(ValueError):
        assemble(with_tf32)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_encode_and_decode_have_switches_of_their_own() -> None:
    vae = PIPELINES["z-image"]().vae
    seen: list[tuple[str, bool, bool]] = []
    tiled_decode = vae.tiled_decode

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(("decode", vae.use_tiling, vae.use_slicing))
        return tiled_decode(*arguments, **options)

    vae.tiled_decode = noted
    plain = type(vae).encode
    latents = torch.randn(1, 16, 16, 16, dtype=torch.bfloat16)
    pixels = torch.randn(1, 3, 96, 96, dtype=torch.bfloat16)
    expected = plain(vae, pixels).latent_dist.mean
    VaeCalls(vae, {"encode": VaeWay(False, False, 0), "decode": VaeWay(True, True, 0)}, None)
    vae.decode(latents)
    assert seen == [("decode", True, True)]
    assert torch.equal(vae.encode(pixels).latent_dist.mean, expected)
    assert (vae.use_tiling, vae.use_slicing) == (False, False)
    vae.enable_tiling()
    assert not torch.equal(vae.encode(pixels).latent_dist.mean, expected), "what somebody switches on stays on"


def test_tiles_of_the_size_that_is_asked_for() -> None:
    vae = PIPELINES["z-image"]().vae
    assert tile_side(vae) == 64
    assert set_tile_side_(vae, 150) == 128
    assert (vae.tile_sample_min_size, vae.tile_latent_min_size) == (128, 16)
    video = qwen_image_vae()
    assert tile_side(video) == 256
    assert set_tile_side_(video, 128) == 128
    assert (video.tile_sample_stride_height, video.tile_sample_stride_width) == (96, 96)
    assert set_tile_side_(video, 1) == 64
    assert (video.tile_sample_stride_height, video.tile_sample_stride_width) == (48, 48)
    assert tile_side(torch.nn.Linear(1, 1)) == set_tile_side_(torch.nn.Linear(1, 1), 64) == 0


class Means(torch.nn.Module):
    """An encoder whose latents depend on their own pixels alone: means, and as many log variances."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(pixels, 8).repeat(1, 2, 1, 1)


@pytest.mark.parametrize("side", [1, 8, 16, 40, 64, 72, 100, 120, 200, 240])
@pytest.mark.parametrize("size", [(256, 320), (512, 512)])
def test_tiles_join_to_what_they_were_cut_from(side: int, size: tuple[int, int]) -> None:
    vae = PIPELINES["z-image"]().vae
    assert set_tile_side_(vae, side) == max(side // 64 * 64, 64)
    vae.encoder, vae.decoder = Means(), torch.nn.Upsample(scale_factor=8)
    latents, pixels = torch.randn(1, 3, size[0] // 8, size[1] // 8), torch.randn(1, 3, *size)
    whole = vae.decode(latents).sample, vae.encode(pixels).latent_dist.mean
    vae.enable_tiling()
    tiled = vae.decode(latents).sample, vae.encode(pixels).latent_dist.mean
    for plain, joined in zip(whole, tiled, strict=True):
        assert joined.shape == plain.shape
        assert torch.allclose(joined, plain, atol=1e-6)


@pytest.mark.parametrize(("own", "expected"), [([64, 64], 64), (100, 64), (20, 64), (64, 64), (32, 32)])
def test_the_tiles_of_a_configuration_are_made_to_work(own: int | list[int], expected: int) -> None:
    config = dict(PIPELINES["z-image"]().vae.config) | {"sample_size": own}
    vae = type(PIPELINES["z-image"]().vae).from_config(config)
    assert set_tile_side_(vae, 0) == tile_side(vae) == expected
    vae.enable_tiling()
    with torch.no_grad():
        assert vae.decode(torch.randn(1, 16, 18, 20)).sample.shape == (1, 3, 144, 160)
        assert vae.encode(torch.randn(1, 3, 144, 160)).latent_dist.mean.shape == (1, 16, 18, 20)


def test_a_larger_picture_has_the_vae_tiled_or_is_refused(folders: dict[str, Path]) -> None:
    folder = folders["z-image"]
    pipe = assemble(planned(folder))
    policies = pipeline_record(pipe).plan.policies
    larger = ImageSize(512, 512)
    whole = planned(folder, size=larger, vae={"tiling": "off"}).policies.memory.peak_bytes
    snapshot = replace(policies.snapshot, free=whole - 1)
    refit_(pipe, larger, snapshot=snapshot)
    status = slipcast.status(pipe)
    assert status["vae.tiling"].engaged == "decode"
    calls = pipeline_record(pipe).applied.vae_calls
    assert calls is not None
    ways = [calls.ways[call] for call in ("encode", "decode")]
    assert [way is not None and way.tiling for way in ways] == [False, True]
    refit_(pipe, SIZE, snapshot=snapshot)
    assert slipcast.status(pipe)["vae.tiling"].engaged == "off"
    with pytest.raises(DeviceError) as refusal:
        refit_(pipe, ImageSize(65536, 65536), snapshot=snapshot)
    assert "needs" in refusal.value.found
    assert "at most" in refusal.value.expected
    assert slipcast.status(pipe)["vae.tiling"].engaged == "off"
    assert picture(pipe).std() > 0


def test_a_refused_picture_is_told_what_fits_with_the_pipeline_as_it_lies(folders: dict[str, Path]) -> None:
    folder = folders["z-image"]
    pipe = assemble(planned(folder, vae={"tiling": "off"}))
    policies = pipeline_record(pipe).policies
    larger = ImageSize(512, 512)
    free = planned(folder, size=larger, vae={"tiling": "on"}).policies.memory.peak_bytes
    snapshot = replace(policies.snapshot, free=free)
    with pytest.raises(DeviceError) as refusal:
        refit_(pipe, larger, snapshot=snapshot)
    found = named(refusal.value.hint)
    assert found["vae.tiling=auto"] == round(free / 2**20)
    width, height = map(int, next(what for what in found if "pixels" in what).split(" pixels")[0].split(" x "))
    refit_(pipe, ImageSize(width, height), snapshot=snapshot)
    with pytest.raises(DeviceError):
        refit_(pipe, ImageSize(width + 16, height + 16), snapshot=snapshot)


class Garbage:
    """Counts collections, and a device's memory, of which garbage takes some until it is collected."""

    def __init__(self, snapshot: Snapshot, garbage: int) -> None:
        self.snapshot, self.garbage, self.collected = snapshot, garbage, 0

    def look(self, *_: Any, collect: bool = True) -> Snapshot:
        self.collected += collect
        return replace(self.snapshot, free=self.snapshot.free - (0 if collect else self.garbage))


def test_garbage_is_collected_only_where_that_could_change_what_is_decided(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["z-image"]
    pipe = assemble(planned(folder))
    larger = ImageSize(512, 512)
    whole = planned(folder, size=larger, vae={"tiling": "off"}).policies.memory.peak_bytes
    held = sum(tensor.nbytes for role in ("transformer", "text_encoder", "vae") for tensor in weights(pipe, role))

    def drawn(free: int, garbage: int) -> tuple[str, int]:
        snapshot = replace(pipeline_record(pipe).policies.snapshot, free=free - held)
        device = Garbage(snapshot, garbage)
        monkeypatch.setattr("slipcast.engine.pipeline.apply_policies.take_snapshot", device.look)
        refit_(pipe, larger)
        return slipcast.status(pipe)["vae.tiling"].engaged, device.collected

    assert drawn(whole + 2, 0) == ("off", 0)
    assert drawn(whole + 2, 1) == ("off", 0), "what fits beside garbage is not better without it"
    assert drawn(whole, 1) == ("off", 1), "without garbage it need not tile"
    assert drawn(whole - 1, 0) == ("decode", 1)
    assert drawn(whole - 1, 0) == ("decode", 0), "the same was decided before, with no more memory"
    assert drawn(whole - 2, 0) == ("decode", 1), "memory has shrunk since"
    assert drawn(whole, 0) == ("off", 0)
    with pytest.raises(DeviceError):
        drawn(held, 0)


def weights(pipe: Any, role: str) -> list[torch.Tensor]:
    return [*pipe.components[role].parameters(), *pipe.components[role].buffers()]
