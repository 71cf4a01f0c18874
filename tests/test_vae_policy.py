"""How a VAE runs, and sizes of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipcast.engine.policy.sizes import AskedSize, ImageSize, tokens
from slipcast.engine.policy.vae import VaeCosts, vae_ways
from slipcast.registry.runtime import Sampling

SIDES = st.integers(1, 4096)
SIZES = st.builds(ImageSize, SIDES, SIDES, st.integers(1, 81), st.integers(1, 8))
CHOICES = st.sampled_from(["auto", "on", "off"])


@given(SIZES, CHOICES, CHOICES, st.integers(0, 1024))
def test_settings_are_followed_and_what_changes_least_comes_first(
    size: ImageSize, tiling: str, slicing: str, side: int
) -> None:
    ways = vae_ways(VaeCosts(2048, side), size, tiling, slicing)  # type: ignore[arg-type]
    assert ways
    if tiling != "auto":
        assert {way.tiling for way in ways} == {tiling == "on" and side > 0}
    if slicing != "auto":
        assert {way.slicing for way in ways} == {slicing == "on"}
    if tiling == slicing == "auto":
        assert not ways[0].tiling
        assert not ways[0].slicing
        assert [way.tiling for way in ways] == sorted(way.tiling for way in ways)


@given(SIZES, st.integers(1, 1024))
def test_tiles_and_slices_lower_the_peak(size: ImageSize, side: int) -> None:
    costs = VaeCosts(2048, side)
    whole = vae_ways(costs, size, "off", "off")[0].activation_bytes
    sliced = vae_ways(costs, size, "off", "on")[0].activation_bytes
    tiled = vae_ways(costs, size, "on", "off")[0].activation_bytes
    if size.batch > 1:
        assert sliced < whole
    if 2 * side < max(size.width, size.height) and side <= min(size.width, size.height):
        assert tiled < whole
    assert whole == 2048 * size.pixels * size.batch


def test_a_video_costs_the_frames_that_are_decoded_at_a_time() -> None:
    size = ImageSize(832, 480, frames=81)
    whole = vae_ways(VaeCosts(2048, 256), size, "off", "off")[0].activation_bytes
    at_once = vae_ways(VaeCosts(2048, 256, frames_at_once=4), size, "off", "off")[0].activation_bytes
    assert 4 * 832 * 480 * 2048 < at_once < whole / 10


@pytest.mark.parametrize("given_", [None, 0, -1])
def test_what_is_not_positive_counts_as_not_given(given_: int | None) -> None:
    own = ImageSize(832, 480, 81)
    assert AskedSize(given_, given_, given_).of(own, 16) == own
    assert AskedSize(512, given_).of(own, 16) == ImageSize(512, 480, 81)
    assert AskedSize(given_, 512, 5, picture=(333, 10)).of(own, 16) == ImageSize(320, 512, 5)
    assert AskedSize(given_, given_, picture=(333, 10)).of(own, 16) == ImageSize(320, 16, 81)
    assert AskedSize(picture=(333, 10)).of(own, None) == ImageSize(333, 10, 81)


def test_tokens_cover_the_picture() -> None:
    sampling = Sampling(size_multiple=16)
    assert tokens(ImageSize(1024, 1024), sampling) == 4096
    assert tokens(ImageSize(1025, 1024, batch=2), sampling) == 2 * 65 * 64
    assert tokens(ImageSize(1024, 1024), Sampling()) == 4096
    video = Sampling(size_multiple=16, latent_frames=4)
    assert tokens(ImageSize(160, 160, frames=81), video) == 21 * 100
