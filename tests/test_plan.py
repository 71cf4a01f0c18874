"""What a plan predicts and decides, on the published files' headers and on small files."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipcast
from slipcast.engine import reading
from slipcast.engine.build import build_on_meta
from slipcast.engine.devices import resolve_device
from slipcast.engine.plan import Plan
from slipcast.engine.policy.snapshot import take_snapshot
from slipcast.engine.prefetch import HOST_BYTES
from slipcast.engine.reading import Reading
from slipcast.registry.errors import DeviceError, QuantisationError, SettingsError, UnsupportedFormatError
from support.fp8_checkpoints import QUANTISED, Scaled, fp8_file
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

MIB = 2**20
KEPT = {"t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        recorded("z-image-turbo--comfy-bf16"), tmp_path_factory.mktemp("z") / "z-image-turbo.safetensors"
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_native(tmp_path / "tiny.safetensors", tiny_tensors())


def _linears(plan: Plan) -> set[str]:
    model = build_on_meta(plan.origin.model, plan.origin.config)
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_the_published_file_in_fp8_storage(published: Path) -> None:
    plan = slipcast.plan(published, device="cpu", fp8="storage", dtype="bfloat16")
    assert plan.bytes.resident == pytest.approx(5880 * MIB, rel=0.005)
    plain = {module.path for module in plan.modules if module.codec is None}
    assert _linears(plan) & plain == KEPT
    quantised = {module.path: module.codec for module in plan.modules if module.codec is not None}
    assert quantised.keys() == _linears(plan) - KEPT
    assert set(quantised.values()) == {"float8_e4m3fn/row"}
    reasons = {module.path: module.reason for module in plan.modules if module.path in KEPT}
    assert reasons["cap_embedder.1"] == "the family keeps its text embedding unquantised"
    assert (
        reasons["t_embedder.mlp.0"]
        == "the family keeps its time embedding unquantised: the forward looks at its weight's dtype"
    )


def test_resident_bytes_are_a_sum_over_shapes(published: Path) -> None:
    """Counted from the header alone: a byte for each weight of a quantised layer, a float32 for each row, else two."""
    plan = slipcast.plan(published, device="cpu", fp8="storage", dtype="bfloat16")
    total = 0
    for name, (_, shape) in recorded("z-image-turbo--comfy-bf16").tensors.items():
        layer = name.removesuffix(".weight")
        quantised = len(shape) == 2 and layer not in KEPT and name.endswith(".weight")
        total += prod(shape) + 4 * shape[0] if quantised else 2 * prod(shape)
    assert plan.bytes.resident == total


@pytest.mark.parametrize("chunk_mib", [1, 16])
def test_peaks_are_the_result_and_one_chunk(published: Path, chunk_mib: int) -> None:
    settings = {"dtype": "bfloat16", "fp8": "storage", "chunk_mib": chunk_mib, "threads": 1}
    mapped = slipcast.plan(published, device="cpu", **settings)
    held = sum(target.stored[0].nbytes for target in mapped.targets if target.mapped)
    assert held > 0
    scratch = mapped.bytes.host_peak_anonymous - (mapped.bytes.resident - held)
    assert chunk_mib * MIB * 0.9 < scratch < chunk_mib * MIB * 1.1
    copied = slipcast.plan(published, device="cpu", mmap=False, **settings).bytes
    slab = copied.host_peak_anonymous - copied.resident - scratch
    assert chunk_mib * MIB * 0.4 < slab <= chunk_mib * MIB * 0.5
    three = slipcast.plan(published, device="cpu", **settings | {"threads": 3})
    assert three.bytes.host_peak_anonymous == mapped.bytes.host_peak_anonymous + 2 * scratch


@pytest.mark.parametrize("reader", ["slabs", "prefetch"])
@pytest.mark.parametrize(("ahead_mib", "threads"), [(192, 8), (64, 2)])
def test_peaks_towards_a_gpu_are_the_result_and_what_is_under_way(
    published: Path, monkeypatch: pytest.MonkeyPatch, reader: str, ahead_mib: int, threads: int
) -> None:
    monkeypatch.setattr(reading, "prefetch_obstacle", lambda: None)
    settings = {"dtype": "bfloat16", "fp8": "storage", "chunk_mib": 8, "reader": reader, "threads": threads}
    plan = slipcast.plan(published, device="cuda:8.6,24GiB", ahead_mib=ahead_mib, **settings)
    assert plan.settings["reader"].engaged == reader
    under_way = plan.bytes.device_peak - plan.bytes.resident  # there is no scratch for chunks
    assert ahead_mib * MIB * 0.85 < under_way < ahead_mib * MIB + 2 * MIB
    if reader == "slabs":
        assert 0 <= under_way - plan.bytes.host_peak_anonymous < 2 * MIB
    else:
        assert plan.bytes.host_peak_anonymous == HOST_BYTES


@pytest.mark.parametrize(
    ("device", "settings", "engaged", "reason"),
    [
        ("cpu", {}, str(min(torch.get_num_threads(), 8)), f"torch uses {torch.get_num_threads()} here"),
        ("cpu", {"threads": 5}, "5", "as requested"),
        ("cpu", {"threads": 5, "mmap": False}, "5", "as requested"),
        ("cuda:8.6,24GiB", {"threads": 5}, "5", "as requested"),
    ],
)
def test_the_number_of_threads_is_decided(
    published: Path, device: str, settings: dict[str, Any], engaged: str, reason: str
) -> None:
    decision = slipcast.plan(published, device=device, **settings).settings["threads"]
    assert (decision.requested, decision.engaged) == (str(settings.get("threads", "auto")), engaged)
    assert decision.reason.startswith(reason)


@pytest.mark.parametrize(
    ("device", "reader", "requested", "engaged"),
    [
        ("cpu", "auto", None, "6"),
        ("cuda:8.6,24GiB", "slabs", None, "64"),
        ("cuda:8.6,24GiB", "prefetch", None, "160"),
        ("cpu", "auto", 3, "3"),
        ("cuda:8.6,24GiB", "slabs", 3, "3"),
    ],
)
def test_the_size_of_chunks_is_decided(
    published: Path, device: str, reader: str, requested: int | None, engaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "prefetch_obstacle", lambda: None)
    plan = slipcast.plan(published, device=device, fp8="storage", chunk_mib=requested, reader=reader)
    decision = plan.settings["chunk_mib"]
    assert (decision.requested, decision.engaged) == (str(requested or "auto"), engaged)
    assert Reading.of(plan.settings).chunk_mib == int(engaged)


def test_a_plan_says_what_was_asked_and_why(published: Path) -> None:
    plan = slipcast.plan(published, device="cpu", fp8="compute", dtype="float16", mmap=False)
    dtype, fp8 = plan.settings["dtype"], plan.settings["fp8"]
    assert (dtype.requested, dtype.engaged) == ("float16", "float32")
    assert dtype.reason == "activations of this family overflow float16"
    assert fp8.requested == "compute"
    assert fp8.engaged != "off"
    assert plan.settings["mmap"].engaged == "false"
    assert plan.compute_dtype == "float32"
    assert plan.origin.family == "z-image"
    assert plan.notes == ("variant turbo: the file name contains 'turbo'",)


def test_the_compute_dtype_is_that_of_most_of_the_checkpoint(tmp_path: Path, published: Path) -> None:
    card = "cuda:9.0,80GiB"
    assert slipcast.plan(published, device=card).settings["dtype"].reason == (
        "most bytes of the file's unquantised matrices are bfloat16"
    )
    old = slipcast.plan(published, device="cuda:7.5,16GiB").settings["dtype"]
    assert (old.engaged, "does not compute bfloat16 natively" in old.reason) == ("float32", True)
    full = write_native(tmp_path / "f32.safetensors", {k: v.float() for k, v in tiny_tensors().items()})
    decision = slipcast.plan(full, device=card).settings["dtype"]
    assert (decision.engaged, decision.reason) == (
        "bfloat16",
        "the family's default: the file's unquantised matrices are float32",
    )
    half = write_native(tmp_path / "f16.safetensors", {k: v.half() for k, v in tiny_tensors().items()})
    decision = slipcast.plan(half, device=card).settings["dtype"]
    assert (decision.engaged, decision.reason) == ("float32", "activations of this family overflow float16")
    codes = fp8_file(tiny_tensors())
    for name, tensor in list(codes.native.items()):
        if tensor.ndim > 1:
            codes.cast(name)
    decision = slipcast.plan(codes.write(tmp_path / "raw.safetensors"), device=card).settings["dtype"]
    assert (decision.engaged, decision.reason) == (
        "bfloat16",
        "the family's default: the file has no unquantised matrix",
    )


def test_every_tensor_of_the_published_file_has_one_fate(published: Path) -> None:
    plan = slipcast.plan(published, device="cpu")
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(recorded("z-image-turbo--comfy-bf16").tensors)
    assert (plan.dropped, plan.folded, plan.synthesised) == ({}, {}, {})
    shapes = [shape for _, shape in recorded("z-image-turbo--comfy-bf16").tensors.values()]
    assert plan.bytes.read == plan.bytes.resident == sum(2 * prod(shape) for shape in shapes)


def test_a_scaled_fp8_file_keeps_its_codes(tmp_path: Path) -> None:
    record = recorded("z-image-turbo--kijai-fp8-scaled")
    path = write_checkpoint(record, tmp_path / "z-image-turbo.safetensors")
    plan = slipcast.plan(path, device="cpu", dtype="bfloat16")
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(record.tensors)
    assert plan.settings["fp8"].engaged == "storage"
    assert plan.settings["fp8.remainder"].engaged == "keep"
    codes = {name.removesuffix(".weight") for name, (dtype, _) in record.tensors.items() if dtype == "F8_E4M3"}
    codes -= {"scaled_fp8"}
    kept = {
        name.removesuffix(".weight") for target in plan.targets if target.how == "keep" for name in _sources(target)
    }
    folded = {name.removesuffix(".weight") for name in plan.folded}
    assert kept | folded == codes
    assert kept.isdisjoint(folded)
    assert folded == codes & KEPT
    assert all(reason for reason in plan.folded.values())
    sides = {tensor.name: tensor.reason for tensor in plan.tensors if tensor.fate == "side tensor"}
    assert sides["scaled_fp8"] == "marks the file as quantised"
    assert sides["layers.0.attention.qkv.scale_weight"] == "weight_scale of layers.0.attention.qkv.weight"
    off = slipcast.plan(path, device="cpu", dtype="bfloat16", fp8="off")
    assert {name.removesuffix(".weight") for name in off.folded} == codes
    assert set(off.folded.values()) == {"dequantised: fp8 is off", *plan.folded.values()}
    assert off.bytes.resident > plan.bytes.resident


def _sources(target) -> list[str]:
    return [piece.source for piece in target.pieces]


def test_an_int8_file_is_kept_as_it_is(tmp_path: Path) -> None:
    path = write_checkpoint(recorded("z-image-turbo--comfy-int8-convrot"), tmp_path / "m.safetensors")
    plan = slipcast.plan(path, device="cpu")
    in_codes = [target for target in plan.targets if target.how == "keep"]
    assert {target.codec for target in in_codes} == {"int8/row/convrot256"}
    assert len({piece.source for target in in_codes for piece in target.pieces}) == 202
    assert plan.folded == {}
    assert plan.settings["fp8"].engaged == "keep"
    assert "int8_convrot" in plan.settings["fp8"].reason


@pytest.mark.parametrize(
    ("scale", "fault"),
    [("64", "float8 codes [192, 64] with a scale of F32 [64]"), ("3", "with a scale of F32 [3]")],
)
def test_a_scale_of_an_impossible_shape_is_refused(tmp_path: Path, scale: str, fault: str) -> None:
    file = fp8_file(tiny_tensors(), ["layers.0.attention.qkv"], Scaled("N"))
    file.native["layers.0.attention.qkv.weight_scale"] = torch.ones(int(scale))
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(file.write(tmp_path / "m.safetensors"), device="cpu")
    assert "unknown (1 weights)" in caught.value.found
    assert any(fault in item for item in caught.value.items)


ORPHANS = {
    "a scale without a weight": ("layers.9.attention.qkv.scale_weight", "F32"),
    "a scale beside a plain weight": ("layers.0.attention.out.weight_scale", "F32"),
    "a scale under an unknown name": ("layers.0.attention.qkv.weight_scale_inv", "F32"),
    "a second spelling": ("layers.0.attention.qkv.weight_scale", "F32"),
    "a marker without a weight": ("layers.9.attention.qkv.comfy_quant", "U8"),
    "block maxima of another format": ("layers.9.attention.qkv.weight.absmax", "F32"),
    "a calibrated input scale of a plain weight": ("layers.0.attention.out.input_scale", "F32"),
}


@pytest.mark.parametrize("kind", ORPHANS)
@pytest.mark.parametrize("unexpected", [[], ["*"]])
def test_scales_and_markers_that_no_weight_consumes_are_always_errors(
    tmp_path: Path, kind: str, unexpected: list[str]
) -> None:
    name, dtype = ORPHANS[kind]
    file = fp8_file(tiny_tensors(), QUANTISED[:1], Scaled("1", "old"))
    file.native[name] = torch.ones(1) if dtype == "F32" else torch.tensor(list(b'{"format":"x"}'), dtype=torch.uint8)
    path = file.write(tmp_path / "m.safetensors")
    with pytest.raises(QuantisationError) as caught:
        slipcast.plan(path, device="cpu", unexpected=unexpected)
    assert "1 scale or marker that no weight consumes" in caught.value.found
    assert [item.split()[0] for item in caught.value.items] == [name]
    assert "loading it would give wrong weights" in caught.value.hint
    assert any(name in problem for problem in slipcast.inspect(path).problems)


def test_a_plan_survives_json(tiny: Path) -> None:
    plan = slipcast.plan(tiny, device="cpu", fp8="storage")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_card_that_is_not_there(published: Path) -> None:
    whole = slipcast.plan(published, device="cuda:8.6,24GiB", dtype="bfloat16")
    assert whole.verdict is not None
    assert whole.verdict.fits
    assert whole.verdict.needed == whole.bytes.device_peak
    assert whole.verdict.available == 24 * 2**30 - 24 * 2**30 // 20
    assert "MiB are left for activations" in whole.verdict.advice
    assert not any(target.mapped for target in whole.targets)
    assert whole.settings["mmap"].engaged == "false"
    tight = slipcast.plan(published, device="cuda:8.6,10GiB", dtype="bfloat16")
    fp8 = slipcast.plan(published, device="cuda:8.6,10GiB", dtype="bfloat16", fp8="storage")
    assert tight.verdict is not None
    assert fp8.verdict is not None
    assert not tight.verdict.fits
    assert fp8.verdict.fits
    first, *_ = tight.verdict.remedies
    assert (first.settings, first.device_peak) == ({"fp8": "storage"}, fp8.bytes.device_peak)
    assert tight.verdict.advice.startswith(f"fp8=storage needs {first.device_peak / MIB:,.0f} MiB, which fits; ")
    for_2 = slipcast.plan(published, device="cuda:8.6,2GiB", dtype="bfloat16").verdict
    assert for_2 is not None
    assert for_2.advice.startswith("no setting makes them fit: fp8=storage fp8.weights=nvfp4 needs ")
    assert for_2.advice.endswith("does not fit either")
    smallest = {"mode": "storage", "weights": "nvfp4"}
    small = slipcast.plan(published, device="cuda:8.6,2GiB", dtype="bfloat16", fp8=smallest).verdict
    assert small is not None
    assert small.advice == "the weights are quantised already: this device can't hold them whole"


@pytest.mark.parametrize("card", ["10GiB", "7GiB", "5GiB", "2GiB"])
@pytest.mark.parametrize("asked", ["auto", "storage"])
def test_a_verdict_names_every_setting_whose_own_plan_fits(published: Path, card: str, asked: str) -> None:
    def verdict_of(**fp8: str) -> tuple[Any, int]:
        plan = slipcast.plan(published, device=f"cuda:8.6,{card}", dtype="bfloat16", fp8={"mode": asked, **fp8})
        assert plan.verdict is not None
        return plan.verdict, plan.bytes.device_peak

    verdict, _ = verdict_of()
    fitting = {}
    for shown, fp8 in (
        ("fp8=storage", {"mode": "storage"}),
        ("fp8=storage fp8.weights=nvfp4", {"mode": "storage", "weights": "nvfp4"}),
    ):
        other, peak = verdict_of(**fp8)
        if other.fits and not verdict.fits:
            fitting[shown] = peak
    named = {" ".join(f"{k}={v}" for k, v in remedy.settings.items()): remedy for remedy in verdict.remedies}
    assert {shown: remedy.device_peak for shown, remedy in named.items()} == fitting
    assert list(named) == list(fitting)
    assert all(f"{shown} needs {peak / MIB:,.0f} MiB, which fits" in verdict.advice for shown, peak in fitting.items())


def test_a_card_whose_memory_is_just_enough(tiny: Path) -> None:
    needed = slipcast.plan(tiny, device="cuda:8.6,1GiB").bytes.device_peak
    reserve = 2000  # above a twentieth, which is left alone in any case
    mib = -(-needed // MIB) + reserve
    for size, fits in ((mib, True), (mib - 1, False)):
        verdict = slipcast.plan(tiny, device=f"cuda:8.6,{size}MiB", device_reserve_mib=reserve).verdict
        assert verdict is not None
        assert verdict.fits is fits


def test_no_model_is_loaded_to_a_card_that_is_not_there(tiny: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        slipcast.load(tiny, device="cuda:8.6,12GiB")
    assert "a card of 12 GiB, capability 8.6, which is not there" in caught.value.found
    assert "device=cpu" in caught.value.hint


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:8.6", "cuda:8.6,12", "cuda:8,12GiB", "cuda:-1", "cuda:8.6,12GiB\n", ""]
)
def test_malformed_devices(tiny: Path, device: str) -> None:
    with pytest.raises(SettingsError) as caught:
        slipcast.plan(tiny, device=device)
    assert caught.value.field == "device"


def test_devices_that_can_not_be(tiny: Path) -> None:
    with pytest.raises(DeviceError, match=r"the device 'cuda:8\.6,0GiB'"):
        slipcast.plan(tiny, device="cuda:8.6,0GiB")
    with pytest.raises(DeviceError) as caught:
        slipcast.plan(tiny, device="cuda:97")
    assert "cuda:97, where torch sees" in caught.value.found
    assert "cuda:8.6,12GiB" in caught.value.hint


def test_memory_is_counted_in_the_unit_that_is_named(tiny: Path) -> None:
    def available(device: str) -> int:
        verdict = slipcast.plan(tiny, device=device, device_reserve_mib=0).verdict
        assert verdict is not None
        return verdict.available

    for device, total in (
        ("cuda:8.6,12GB", 12_000_000_000),
        ("cuda:8.6,1.5GiB", 3 * 2**29),
        ("cuda:8.6, 700 MiB", 700 * MIB),
    ):
        assert available(device) == total - total // 20


@pytest.mark.parametrize("reserve", [0, 512, 700, 4096, 20_000])
def test_what_is_available_is_what_a_pipeline_may_take(tiny: Path, reserve: int) -> None:
    verdict = slipcast.plan(tiny, device="cuda:8.6,12GiB", device_reserve_mib=reserve).verdict
    assert verdict is not None
    assert verdict.available == take_snapshot(resolve_device("cuda:8.6,12GiB")[0], reserve).budget
