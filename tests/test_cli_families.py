"""``slipcast families`` and ``slipcast explain``: what is known, and what each family looks for in a file."""

from __future__ import annotations

import pytest
import yaml

from slipcast.cli import families_command
from slipcast.registry.catalogue import load_catalogue, load_family_file
from support.command_line import json_of, output_of, run
from support.family_files import write_family
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


def test_the_list():
    families = json_of("families")["families"]
    assert [family["id"] for family in families] == list(load_catalogue())
    (z_image,) = [family for family in families if family["id"] == "z-image"]
    assert z_image == {
        "id": "z-image",
        "title": "Z-Image",
        "kind": "denoiser",
        "class": "diffusers.ZImageTransformer2DModel",
        "variants": ["omni", "turbo", "base"],
        "examples": z_image["examples"],
        "source": "slipcast.families/z-image.yaml",
    }
    assert "z-image-turbo--comfy-bf16" in z_image["examples"]
    rows = [line.split() for line in output_of("families").splitlines()]
    assert rows[0] == ["id", "title", "kind", "class", "variants", "examples"]
    assert [row[0] for row in rows[1:]] == list(load_catalogue())
    assert ["z-image", "Z-Image", "denoiser", "diffusers.ZImageTransformer2DModel", "omni,", "turbo,", "base"] in [
        row[:7] for row in rows
    ]


def test_families_of_the_users_own(folder):
    write_family(folder / "mine", "own-family")
    rows = output_of("families", "--set", "families=[mine]")
    assert "own-family" in rows
    assert "own-family" not in output_of("families")


@pytest.mark.parametrize("family", list(load_catalogue()))
def test_a_family_is_shown_as_a_family_file_that_says_the_same(folder, family):
    path = folder / f"{family}.yaml"
    path.write_text(output_of("families", family))
    known = load_catalogue()[family]
    assert path.read_text().splitlines()[0] == f"# {known.source}"
    assert load_family_file(path).model_dump(exclude={"extends"}) == known.model_dump(exclude={"extends"})


def test_what_a_family_states_is_shown_though_it_is_the_default():
    shown = yaml.safe_load(output_of("families", "z-image"))["precision"]
    assert shown["compute"] == "checkpoint"
    assert shown["fp8"]["activation_scale"] == "row"


def test_a_family_says_where_its_headers_come_from(monkeypatch):
    name = "z-image-turbo--comfy-bf16"
    source = recorded(name).source
    assert source
    shown = output_of("families", "z-image")
    assert f"#   {name}: {source}" in shown.splitlines()
    sources = json_of("families", "z-image")["header_sources"]
    assert sources[name] == source
    assert sources.keys() == {example.header for example in load_catalogue()["z-image"].examples}
    monkeypatch.setattr(families_command, "recorded_headers", lambda: None)
    assert json_of("families", "z-image")["header_sources"] == {}
    assert "Where the examples" not in output_of("families", "z-image")


def test_a_family_with_something_that_does_not_work_for_it(folder):
    more = "title: Other\nprecision:\n  fp16: safe\n  fp8: {storage: {unsupported: noise}, compute: supported}\n"
    write_family(folder / "mine", "base-family")
    (folder / "mine" / "own.yaml").write_text(f"id: own\nextends: base-family\n{more}")
    shown = output_of("families", "own", "--set", "families=[mine]")
    (folder / "own.yaml").write_text(shown)
    assert load_family_file(folder / "own.yaml").precision.fp8.storage.reason == "noise"
    assert json_of("families", "own", "--set", "families=[mine]")["precision"]["fp8"]["storage"] == {
        "unsupported": "noise"
    }


def test_a_family_in_full_as_json():
    family = json_of("families", "z-image")
    assert family["id"] == "z-image"
    assert family["precision"]["fp8"] == {"storage": "supported", "compute": "supported", "activation_scale": "row"}
    assert family["keys"]["x_embedder"] == "all_x_embedder.2-1"
    assert family["extends"] is None


def test_an_unknown_family():
    error = json_of("families", "z-imag", exit_code=2)
    assert (error["found"], error["hint"]) == ("no family is called 'z-imag'", "did you mean 'z-image'?")


@pytest.fixture
def stranger(folder):
    tensors = {
        "model.diffusion_model." + name: entry for name, entry in recorded("z-image-turbo--comfy-bf16").tensors.items()
    }
    del tensors["model.diffusion_model.x_pad_token"]
    return write_checkpoint(tensors, folder / "stranger.safetensors", blocks=1)


def test_why_a_family_does_not_match(stranger):
    (component,) = json_of("explain", stranger)["components"]
    assert (component["component"], component["claims"]) == ("", [])
    (answer,) = [answer for answer in component["families"] if answer["family"] == "z-image"]
    assert answer == {
        "family": "z-image",
        "claims": False,
        "prefix": "model.diffusion_model.",
        "layout": "native",
        "found": ["cap_embedder.1.weight", "noise_refiner.0.attention.qkv.weight"],
        "missing": ["x_pad_token"],
        "absent": ["clip_text_pooled_proj", "dec_net"],
    }
    lines = output_of("explain", stranger).splitlines()
    assert lines[:2] == [str(stranger), "  no family claims it"]
    (row,) = [line.split() for line in lines if line.split()[0] == "z-image"]
    assert row == ["z-image", "no", "'model.diffusion_model.'", "native", "2", "of", "3", "x_pad_token"]


def test_why_a_family_matches(folder):
    path = write_checkpoint(recorded("z-image--turbo-diffusers"), folder / "model.safetensors", blocks=1)
    (component,) = json_of("explain", path)["components"]
    assert component["claims"] == ["z-image"]
    assert (component["families"][0]["family"], component["families"][0]["layout"]) == ("z-image", "diffusers")
    assert "claimed by z-image" in output_of("explain", path)


def test_families_that_found_more_come_first(folder, stranger):
    write_family(folder / "mine", "nothing-found")
    more = ["explain", stranger, "--set", "families=[mine]"]
    (component,) = json_of(*more)["components"]
    ids = [answer["family"] for answer in component["families"]]
    assert ids.index("z-image") < ids.index("nothing-found")


def test_a_tie_is_explained_though_it_is_an_error_elsewhere(folder):
    rival = "identify:\n  has: [x_pad_token]\n"
    text = write_family(folder / "mine", "rival").read_text()
    (folder / "mine" / "rival.yaml").write_text(text.replace("identify:\n  has: [proj.weight]\n", rival))
    path = write_checkpoint(recorded("z-image-turbo--comfy-bf16"), folder / "model.safetensors", blocks=1)
    (component,) = json_of("explain", path, "--set", "families=[mine]")["components"]
    assert sorted(component["claims"]) == ["rival", "z-image"]
    result = run("inspect", path, "--set", "families=[mine]")
    assert result.exit_code == 2
    assert "rival and z-image both claim" in result.stderr
