"""Where the parts of a pipeline lie, on made-up cards of 4 to 192 GB."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipcast.engine.devices import resolve_device
from slipcast.engine.policy.memory import TIERS, Mode, Part, decide_memory, first_fitting, peak_of
from slipcast.engine.policy.snapshot import Snapshot, reserve_of, take_snapshot
from slipcast.engine.policy.vae import VaeWay
from slipcast.registry.errors import DeviceError
from support.policy_cases import CARDS, GIB, PARTS, SNAPSHOTS, WAYS, snapshot

MODES: tuple[Mode, ...] = ("auto", "fast", "balanced", "low")
# A denoiser of 6 GiB in 30 blocks, an encoder of 8 GiB in 36 layers, a small VAE.
TYPICAL = (
    Part("transformer", "denoiser", 6 * GIB, (GIB // 5,) * 29, GIB),
    Part("text_encoder", "text_encoder", 8 * GIB, (GIB // 5,) * 36, GIB // 4),
    Part("vae", "vae", GIB // 6, (), 0),
)
WHOLE, TILED = VaeWay(False, False, 3 * GIB), VaeWay(True, False, GIB)


@given(SNAPSHOTS, PARTS, st.sampled_from(MODES), WAYS)
def test_what_is_decided_fits_and_what_is_refused_does_not(
    found: Snapshot, parts: tuple[Part, ...], mode: Mode, ways: tuple[VaeWay, ...]
) -> None:
    try:
        decision = decide_memory(found, parts, mode, ways)
    except DeviceError:
        tiers = ("resident",) if found.unified else {"low": TIERS[-1:], "balanced": TIERS[2:]}.get(mode, TIERS)
        peaks = [peak_of(tier, parts, way) for tier in tiers for way in ways or (None,)]
        assert min(peaks) > max(0, found.free - found.reserve)
        return
    assert decision.peak_bytes == peak_of(decision.tier, parts, decision.vae) <= max(0, found.free - found.reserve)
    assert decision.decision.requested == mode
    assert decision.decision.engaged == decision.tier
    assert set(decision.placements) == {part.role for part in parts}


@given(SNAPSHOTS, PARTS, WAYS)
def test_everything_stays_on_the_device_wherever_it_fits(
    found: Snapshot, parts: tuple[Part, ...], ways: tuple[VaeWay, ...]
) -> None:
    for mode in ("auto", "fast"):
        fits = min(peak_of("resident", parts, way) for way in ways or (None,)) <= found.budget
        try:
            assert (decide_memory(found, parts, mode, ways).tier == "resident") == fits
        except DeviceError:
            assert not fits


@given(PARTS, WAYS)
def test_each_streaming_tier_takes_no_more_than_the_last(parts: tuple[Part, ...], ways: tuple[VaeWay, ...]) -> None:
    for way in (*ways, None):
        peaks = [peak_of(tier, parts, way) for tier in ("resident", "streamed", "streamed_encoders", "whole_modules")]
        assert peaks == sorted(peaks, reverse=True)
        assert peak_of("in_turn", parts, way) <= peaks[0]


@given(PARTS, WAYS)
def test_memory_that_is_shared_with_the_host_is_never_moved(parts: tuple[Part, ...], ways: tuple[VaeWay, ...]) -> None:
    for mode in MODES:
        try:
            decision = decide_memory(snapshot(64, unified=True), parts, mode, ways)
        except DeviceError:
            continue
        assert decision.tier == "resident"
        assert set(decision.placements.values()) == {"resident"}


def refused(found: Snapshot, parts: tuple[Part, ...], mode: Mode, ways: tuple[VaeWay, ...]) -> DeviceError | None:
    try:
        decide_memory(found, parts, mode, ways)
    except DeviceError as refusal:
        return refusal
    return None


@given(SNAPSHOTS, PARTS, st.sampled_from(MODES), WAYS)
def test_a_refusal_has_both_numbers(
    found: Snapshot, parts: tuple[Part, ...], mode: Mode, ways: tuple[VaeWay, ...]
) -> None:
    refusal = refused(found, parts, mode, ways)
    if refusal is not None:
        assert re.search(r"needs [\d,]+ MiB", refusal.found)
        assert f"at most {found.budget / 2**20:,.0f} MiB" in refusal.expected
        assert [item.partition(":")[0] for item in refusal.items] == [part.role for part in parts]


@pytest.mark.parametrize(
    ("gib", "tier", "tiling"),
    [
        (4, "streamed_encoders", False),
        (6, "streamed_encoders", False),
        (8, "streamed_encoders", False),
        (12, "in_turn", False),
        (16, "resident", True),
        (24, "resident", False),
        (192, "resident", False),
    ],
)
def test_a_typical_pipeline_on_cards(gib: int, tier: str, tiling: bool) -> None:
    assert gib in CARDS
    decision = decide_memory(snapshot(gib), TYPICAL, "auto", (WHOLE, TILED))
    assert (decision.tier, decision.vae) == (tier, TILED if tiling else WHOLE)


def test_tiling_comes_before_a_lower_tier() -> None:
    found = snapshot(17, reserve_mib=0)
    assert peak_of("resident", TYPICAL, WHOLE) > found.budget
    decision = decide_memory(found, TYPICAL, "auto", (WHOLE, TILED))
    assert (decision.tier, decision.vae) == ("resident", TILED)
    assert decision.peaks["resident"] == decision.peak_bytes


def test_modes_say_what_moves() -> None:
    balanced = decide_memory(snapshot(80), TYPICAL, "balanced", (WHOLE,))
    assert balanced.placements == {"transformer": "streamed", "text_encoder": "resident", "vae": "resident"}
    low = decide_memory(snapshot(80), TYPICAL, "low", (WHOLE,))
    assert low.placements == {"transformer": "streamed", "text_encoder": "streamed", "vae": "moved"}
    in_turn = decide_memory(snapshot(12), TYPICAL, "fast", (WHOLE,))
    assert set(in_turn.placements.values()) == {"in_turn"}
    assert "resident would take" in in_turn.decision.reason


def test_a_reason_names_what_nobody_measured() -> None:
    guessed = [replace(part, measured=part.role != "vae") for part in TYPICAL]
    assert "the activations of vae are not measured" in decide_memory(snapshot(80), guessed).decision.reason
    assert "not measured" not in decide_memory(snapshot(80), TYPICAL).decision.reason


def test_a_way_that_fits_beside_what_is_placed() -> None:
    assert first_fitting(snapshot(17, reserve_mib=0), TYPICAL, "resident", (WHOLE, TILED)) == TILED
    assert first_fitting(snapshot(12), TYPICAL, "resident", (WHOLE, TILED)) is None


def test_a_snapshot_of_this_machine_and_of_a_card_that_is_not_there() -> None:
    cpu = take_snapshot(resolve_device("cpu")[0], 512)
    assert 0 < cpu.free <= cpu.total
    assert cpu.unified
    card = take_snapshot(resolve_device("cuda:8.6,12GiB")[0], 512)
    assert (card.free, card.total, card.unified) == (12 * GIB, 12 * GIB, False)
    assert card.reserve == reserve_of(12 * GIB, 512) == 12 * GIB // 20
    assert reserve_of(4 * GIB, 512) == GIB // 2
    assert snapshot(4, free=0.01).budget == 0
