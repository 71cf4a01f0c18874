"""Headers damaged in every which way: a command answers or refuses, and never fails."""

from __future__ import annotations

import json
import struct
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.command_line import run
from support.isolation import isolate
from support.tiny_z_image import natively, tiny_tensors

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
PREFIX = "model.diffusion_model."
NAMES = sorted(PREFIX + name for name in natively(tiny_tensors()))
LEAVES = ("scale_weight", "weight_scale", "weight_scale_2", "input_scale", "comfy_quant", "lora_A.weight", "x", "0")
COMMANDS = (["inspect"], ["inspect", "--json"], ["explain"], ["plan"], ["plan", "-s", "fp8=storage", "--json"])
METADATA = ({}, {"_quantization_metadata": "{"}, {"_quantization_metadata": '{"layers": [1]}'}, {"config": "null"})


@st.composite
def damages(draw):
    """What becomes of the tensors' names, dtypes and shapes: a few of them go, change or are joined by others."""
    shapes = {PREFIX + name: list(tensor.shape) for name, tensor in natively(tiny_tensors()).items()}
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        dtype, shape = tensors[name]
        damage = draw(st.sampled_from(["drop", "dtype", "axis", "more", "fewer", "rename", "join", "quantise"]))
        if damage == "drop":
            del tensors[name]
        elif damage == "dtype":
            tensors[name] = (draw(st.sampled_from(sorted(SIZES))), shape)
        elif damage == "axis":
            tensors[name] = (dtype, [draw(st.sampled_from([0, 1, 3, 4096])), *shape[1:]])
        elif damage in ("more", "fewer"):
            tensors[name] = (dtype, [*shape, 1] if damage == "more" else shape[:-1])
        elif damage == "rename":
            renamed = draw(
                st.sampled_from([name[len(PREFIX) :], f"\x1b[2J{name}", name.replace(".", ".."), "9" * 5000])
            )
            tensors[renamed] = tensors.pop(name)
        else:
            leaf = draw(st.sampled_from(LEAVES))
            shape_of_it = draw(st.sampled_from([[], [1], shape[:1], shape]))
            tensors[f"{name.rpartition('.')[0]}.{leaf}"] = (draw(st.sampled_from(sorted(SIZES))), shape_of_it)
        if damage == "quantise":
            tensors[name] = ("F8_E4M3", shape)
    return tensors, draw(st.sampled_from(METADATA))


def write(path, tensors, metadata):
    header = {"__metadata__": metadata} if metadata else {}
    stop = 0
    for name, (dtype, shape) in tensors.items():
        start = stop
        stop += SIZES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with path.open("r+b") as file:
        file.truncate(8 + len(raw) + stop)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages())
def test_a_damaged_header_is_answered_or_refused(folder, damage):
    path = folder / "model.safetensors"
    write(path, *damage)
    for arguments in (
        ["inspect"],
        ["inspect", "--json"],
        ["explain"],
        ["plan"],
        ["plan", "-s", "fp8=storage", "--json"],
    ):
        result = run(*arguments, path)
        assert result.exit_code in (0, 2)
        assert "\x1b" not in result.output
        if "--json" in arguments:
            assert ("error" in json.loads(result.stdout)) is (result.exit_code == 2)
