"""Requests: what no pipeline could draw is refused in Python as on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import slipcast
from slipcast import Session
from slipcast.demo.prompted import PIPELINE
from slipcast.engine.pipeline.request import GenerationRequest, make_request
from slipcast.engine.policy.sizes import AskedSize
from slipcast.registry.errors import SettingsError, UnsupportedFileError
from slipcast.registry.settings import resolve_settings
from support.isolation import isolate

PICTURE = Image.new("RGB", (64, 64))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("asked", "field", "found"),
    [
        ({"prompt": None}, "prompt", "prompt is None"),
        ({"prompt": 5}, "prompt", "prompt is 5"),
        ({"negative_prompt": 5}, "negative_prompt", "negative_prompt is 5"),
        ({"steps": 0}, "steps", "steps is 0"),
        ({"steps": 10_001}, "steps", "steps is 10001"),
        ({"steps": "a"}, "steps", "steps is 'a'"),
        ({"steps": True}, "steps", "steps is true"),
        ({"seed": 2**70}, "seed", f"seed is {2**70}"),
        ({"seed": "a"}, "seed", "seed is 'a'"),
        ({"seed": -1}, "seed", "seed is -1"),
        ({"seed": None}, "seed", "seed is None"),
        ({"width": "64"}, "width", "width is '64'"),
        ({"height": 64.0}, "height", "height is 64.0"),
        ({"frames": 0}, "frames", "frames is 0"),
        ({"guidance": float("nan")}, "guidance", "guidance is nan"),
        ({"guidance": float("inf")}, "guidance", "guidance is inf"),
        ({"guidance": -1.0}, "guidance", "guidance is -1.0"),
        ({"guidance": "a"}, "guidance", "guidance is 'a'"),
        ({"image": "a.png"}, "image", "image is 'a.png'"),
        ({"image": PICTURE, "strength": 0}, "strength", "strength is 0"),
        ({"image": PICTURE, "strength": 2.0}, "strength", "strength is 2.0"),
        ({"image": PICTURE, "strength": float("nan")}, "strength", "strength is nan"),
        ({"strength": 0.5}, "strength", "a strength of 0.5 without a picture to start from"),
        ({"stepps": 3}, "stepps", "unknown field 'stepps' of a generation"),
    ],
)
def test_what_can_not_be_drawn_is_refused(asked: dict[str, Any], field: str, found: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Session().generate(**{"prompt": "seven", **asked})
    error = caught.value
    assert (error.field, error.found) == (field, found)
    assert error.expected
    assert error.hint


def test_what_can_be_drawn_is_accepted() -> None:
    request = make_request(prompt="", steps=1, seed=2**63 - 1, guidance=0, image=PICTURE, strength=1)
    assert (request.strength, request.guidance, request.seed) == (1.0, 0.0, 2**63 - 1)


@pytest.mark.parametrize("side", [0, -1, None])
def test_a_side_that_is_not_positive_counts_as_not_given(side: int | None) -> None:
    request = GenerationRequest("seven", width=side, height=64)
    assert (request.width, request.height, request.size) == (None, 64, AskedSize(None, 64))


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ("64x64", "size is '64x64'"),
        ((64,), "size is a list"),
        (64, "size is 64"),
        (("64", 64), "width is '64'"),
        ((64, 65), "a height of 65 pixels"),
    ],
)
def test_a_session_refuses_sizes_that_are_none(size: Any, found: str) -> None:
    with Session(device="cpu") as session:
        with pytest.raises(SettingsError) as caught:
            session.load(PIPELINE, size=size)
        assert caught.value.found == found
        assert session.status().state == "empty"


@pytest.mark.parametrize(
    ("settings", "found"), [({"fp8": "banana"}, "banana"), ({"foo": 3}, "foo")], ids=["value", "name"]
)
def test_a_session_refuses_wrong_settings_when_it_is_made(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        Session(**settings)


@pytest.mark.parametrize("path", [None, 5, b"a"])
def test_a_path_that_is_none(path: Any) -> None:
    for call in (slipcast.load, slipcast.plan, slipcast.inspect, slipcast.pipeline, Session().load):
        with pytest.raises(UnsupportedFileError, match="as the path"):
            call(path)


def test_dtypes_and_devices_of_torch_stand_for_their_names() -> None:
    call = {"dtype": torch.float32, "device": torch.device("cuda", 1)}
    values = resolve_settings(call).values
    assert (values.dtype, values.device) == ("float32", "cuda:1")
    assert Session(dtype=torch.bfloat16, device=torch.device("cpu")).load(PIPELINE).device == "cpu"
    with pytest.raises(SettingsError, match="complex64"):
        resolve_settings({"dtype": torch.complex64})
