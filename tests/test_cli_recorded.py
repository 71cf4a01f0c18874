"""Published checkpoints through ``slipcast inspect``: which are recognised as what, and which are not."""

from __future__ import annotations

import pytest

from slipcast.registry.catalogue import load_catalogue
from support.command_line import json_of, run
from support.isolation import isolate
from support.recorded import recorded, recorded_names, write_checkpoint

NATIVE = "z-image-turbo--comfy-bf16"
DIFFUSERS = "z-image--turbo-diffusers"
FP8 = "z-image-turbo--kijai-fp8-scaled"
INT8 = "z-image-turbo--comfy-int8-convrot"
Z_IMAGE = {NATIVE, DIFFUSERS, FP8, INT8}
WITH_SHAPES = [
    name for name in recorded_names() if all(shape is not None for _, shape in recorded(name).tensors.values())
]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "prefix", "layout"),
    [
        (NATIVE, "", "native"),
        (NATIVE, "model.diffusion_model.", "native"),
        (NATIVE, "diffusion_model.", "native"),
        (DIFFUSERS, "", "diffusers"),
    ],
)
def test_z_image_is_recognised(folder, name, prefix, layout):
    path = write_checkpoint(recorded(name), folder / f"{name}.safetensors", prefix=prefix)
    answer = json_of("inspect", path)
    assert (answer["family"], answer["variant"]) == ("z-image", "turbo")
    assert (answer["layout"], answer["prefix"]) == (layout, prefix)
    assert answer["formats"] == {"plain": len(recorded(name).tensors)}
    assert answer["bytes"] == 12_309_817_472
    assert answer["problems"] == []
    assert answer["guesses"] == ["variant turbo: the file name contains 'turbo'"]


@pytest.mark.parametrize(("name", "kind", "codes"), [(FP8, "fp8_scaled", "F8_E4M3"), (INT8, "int8_convrot", "I8")])
def test_its_quantised_formats_are_named(folder, name, kind, codes):
    path = write_checkpoint(recorded(name), folder / "model.safetensors")
    dtypes = {tensor: dtype for tensor, (dtype, _) in recorded(name).tensors.items() if tensor.endswith(".weight")}
    answer = json_of("inspect", path)
    assert answer["family"] == "z-image"
    assert answer["formats"][kind] == list(dtypes.values()).count(codes) > 100
    assert set(answer["formats"]) <= {"plain", kind}
    assert answer["problems"] == []


@pytest.mark.parametrize("name", [name for name in WITH_SHAPES if name not in Z_IMAGE])
def test_nothing_else_is_taken_for_it(folder, name):
    path = write_checkpoint(recorded(name), folder / f"{name}.safetensors")
    result = run("inspect", path)
    if result.exit_code == 0:  # another family's
        assert json_of("inspect", path)["family"] in set(load_catalogue()) - {"z-image"}
    else:
        assert result.exit_code == 2
        assert "no family claims this checkpoint" in result.stderr


def test_most_records_have_shapes():
    assert len(WITH_SHAPES) > 60
