"""What a refusal names as remedy, against every setting tried by itself, with a made-up pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from slipcast.engine.devices import resolve_device
from slipcast.engine.pipeline.remedies import changed, find_remedies, with_remedies
from slipcast.engine.policy.memory import MemoryDecision, Part, decide_memory
from slipcast.engine.policy.sizes import ImageSize
from slipcast.engine.policy.snapshot import Snapshot
from slipcast.engine.policy.vae import VaeCosts, vae_ways
from slipcast.registry.errors import DeviceError
from slipcast.registry.settings import Settings, resolve_settings

MIB = 2**20
SIZE = ImageSize(1024, 768)
SINGLE: tuple[dict[str, Any], ...] = (
    {"memory": "auto"},
    {"memory": "balanced"},
    {"memory": "low"},
    {"vae.slicing": "auto"},
    {"vae.tiling": "auto"},
    {"text_encoder": "fp8"},
    {"fp8": "storage"},
    {"text_encoder": "nvfp4"},
    {"fp8": "storage", "fp8.weights": "nvfp4"},
)


def asked(**settings: Any) -> Settings:
    return resolve_settings({"device": "cpu", "vae": {"tiling": "off"}, **settings}, environ={}).values


class Device:
    """Decides as a plan does, on a pipeline whose bytes follow from settings and size by simple rules."""

    def __init__(self, mib: int, *, unified: bool = False) -> None:
        device = resolve_device("cpu")[0]
        self.snapshot = Snapshot(device, mib * MIB, mib * MIB, 0, unified)

    def decide(self, settings: Settings, size: ImageSize) -> MemoryDecision:
        of_denoiser = {"storage": 500}.get(settings.fp8.mode, 1000)
        if settings.fp8.mode == "storage" and settings.fp8.weights == "nvfp4":
            of_denoiser = 280
        of_encoder = {"fp8": 400, "nvfp4": 220}.get(settings.text_encoder, 800)
        work = size.pixels * 256
        parts = (
            Part("transformer", "denoiser", of_denoiser * MIB, (of_denoiser * MIB // 10,) * 9, work),
            Part("text_encoder", "text_encoder", of_encoder * MIB, (of_encoder * MIB // 10,) * 9, 30 * MIB),
            Part("vae", "vae", 100 * MIB),
        )
        costs = VaeCosts(1500, settings.vae.tile_size or 512)
        ways = vae_ways(costs, size, settings.vae.tiling, settings.vae.slicing)
        return decide_memory(self.snapshot, parts, settings.memory, ways)

    def fits(self, settings: Settings, size: ImageSize = SIZE) -> int | None:
        try:
            return self.decide(settings, size).peak_bytes
        except DeviceError:
            return None


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("memory", ["auto", "balanced", "low"])
@pytest.mark.parametrize("tiling", ["off", "auto"])
@pytest.mark.parametrize("mib", [100, 300, 500, 700, 900, 1200, 1500, 2000, 2400, 2900])
def test_every_setting_that_makes_it_fit_is_named_and_no_other(
    mib: int, tiling: str, memory: str, unified: bool
) -> None:
    device = Device(mib, unified=unified)
    settings = asked(memory=memory, vae={"tiling": tiling})
    if device.fits(settings) is not None:
        return
    found = find_remedies(settings, SIZE, 16, device.decide)
    for remedy in found:
        assert device.fits(changed(settings, remedy.given), remedy.size) == remedy.peak_bytes
        assert remedy.given or remedy.size != SIZE
    alone = [dict(remedy.given) for remedy in found if remedy.size == SIZE and "vae.tile_size" not in remedy.given]
    fitting = [
        given
        for given in SINGLE
        if changed(settings, given) != settings and device.fits(changed(settings, given)) is not None
    ]
    if fitting:
        assert alone == fitting
    sizes = [remedy.size for remedy in found if not remedy.given]
    for size in sizes:
        assert size.width % 16 == size.height % 16 == 0
        assert device.fits(settings, ImageSize(size.width + 48, size.height + 36)) is None, "a larger one fits"
    assert sum("vae.tile_size" in remedy.given for remedy in found) <= 1
    if not found:
        least = {"memory": "auto", "vae.tiling": "auto", "text_encoder": "nvfp4", "fp8": "storage"}
        lightest = changed(settings, {**least, "fp8.weights": "nvfp4"})
        assert device.fits(lightest, ImageSize(32, 16)) is None


def test_a_refusal_shows_each_with_its_peak() -> None:
    device = Device(1500, unified=True)
    settings = asked(memory="low", vae={"tiling": "auto"})
    with pytest.raises(DeviceError) as refused:
        device.decide(settings, SIZE)
    told = with_remedies(refused.value, settings, SIZE, 16, device.decide)
    assert (told.found, told.expected, told.items) == (
        refused.value.found,
        refused.value.expected,
        refused.value.items,
    )
    peaks = {remedy.peak_bytes for remedy in find_remedies(settings, SIZE, 16, device.decide)}
    assert told.hint.count("which takes") == len(told.hint.split("; or ")) >= 1
    assert all(f"which takes {peak / MIB:,.0f} MiB" in told.hint for peak in peaks)
    hopeless = with_remedies(refused.value, settings, SIZE, 16, Device(10).decide)
    assert hopeless.hint.startswith("no setting and no smaller size makes it fit")


def test_what_helps_only_together_is_named_together() -> None:
    device = Device(1100, unified=True)
    settings = asked(vae={"tiling": "auto"})
    (remedy,) = find_remedies(settings, ImageSize(64, 64), 64, device.decide)
    assert dict(remedy.given) == {"text_encoder": "fp8", "fp8": "storage"}


def test_a_loaded_pipeline_may_only_have_to_be_loaded_again() -> None:
    refusal = DeviceError("much", expected="less", hint="none")
    told = with_remedies(refusal, asked(), SIZE, 16, Device(9000).decide, loaded=True)
    assert told.hint.startswith("load the pipeline again for this size, which takes ")


def test_a_size_far_beyond_the_device_is_told_one_that_fits() -> None:
    (*_, remedy) = find_remedies(asked(), ImageSize(160_000, 80_000), 16, Device(4000).decide)
    assert not remedy.given
    assert 512 <= remedy.size.width == 2 * remedy.size.height <= 5000
