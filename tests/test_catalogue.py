"""The catalogue: the built-in families, the user's beside them, and how fast they are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipcast.registry import catalogue as catalogue_module
from slipcast.registry.catalogue import load_catalogue, load_family_file
from slipcast.registry.catalogue_index import digest_of, index_text, read_index
from slipcast.registry.errors import FamilyFileError
from slipcast.registry.expression import evaluate_config
from slipcast.registry.keymap.lint import lint
from slipcast.registry.signature import Signature
from support.family_files import family_text, write_family
from support.recorded import recorded, recorded_config, recorded_names

FAMILIES = Path(__file__).parents[1] / "families"


def test_the_built_in_families_are_read_once_by_their_file_names() -> None:
    catalogue = load_catalogue()
    assert set(catalogue) == {path.stem for path in FAMILIES.rglob("*.yaml")}
    assert list(catalogue) == sorted(catalogue)
    assert load_catalogue() is catalogue
    assert catalogue["z-image"].source == "slipcast.families/z-image.yaml"
    frozen: Any = catalogue
    with pytest.raises(TypeError):
        frozen["other"] = catalogue["z-image"]


def test_built_in_files_name_their_schema_and_recorded_examples() -> None:
    for path in FAMILIES.rglob("*.yaml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        depth = len(path.relative_to(FAMILIES).parts)
        assert first == f"# yaml-language-server: $schema={'../' * depth}configs/schema/family.json", path
    for family in load_catalogue().values():
        assert {example.header for example in family.examples} <= set(recorded_names()), family.id


def test_the_key_maps_of_built_in_families_have_no_faults() -> None:
    faults = {family.id: lint(family.key_map) for family in load_catalogue().values()}
    assert {id: found for id, found in faults.items() if found} == {}


def test_the_key_map_of_a_user_s_family_is_linted(tmp_path: Path) -> None:
    path = write_family(tmp_path, more="keys:\n  a: b\n  same: same\n  other: other\n")
    with pytest.raises(FamilyFileError, match="says what holds without it; remove it") as caught:
        load_catalogue([tmp_path])
    assert (caught.value.path, caught.value.field) == (f"{path}:15", "keys.same")
    assert caught.value.items[0].startswith("keys.other: ")


def test_a_user_s_folder_adds_families_that_may_build_on_built_in_ones(tmp_path: Path) -> None:
    write_family(tmp_path, "own")
    write_family(tmp_path / "vaes", "own-vae", kind="vae", more="contains: {part.: z-image}\n")
    (tmp_path / "own-turbo.yaml").write_text("schema: 1\nid: own-turbo\ntitle: T\nextends: z-image\nprefixes: [x.]\n")
    (tmp_path / "README.md").write_text("not a family")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.yaml").write_text("not: a family\n")
    catalogue = load_catalogue([tmp_path])
    assert set(catalogue) - set(load_catalogue()) == {"own", "own-vae", "own-turbo"}
    assert catalogue["own-vae"].source == str(tmp_path / "vaes" / "own-vae.yaml")
    assert catalogue["own-turbo"].keys == catalogue["z-image"].keys
    assert catalogue["z-image"] is load_catalogue()["z-image"]
    assert load_family_file(tmp_path / "own-turbo.yaml").digest == catalogue["own-turbo"].digest


def test_an_id_that_is_taken_is_refused_and_both_files_are_named(tmp_path: Path) -> None:
    path = write_family(tmp_path / "a", "z-image")
    with pytest.raises(
        FamilyFileError, match=r"the id 'z-image' is taken by slipcast\.families/z-image\.yaml"
    ) as caught:
        load_catalogue([tmp_path / "a"])
    assert caught.value.path == f"{path}:2"
    assert "rename the file and its id" in caught.value.hint
    first = write_family(tmp_path / "b", "twin")
    second = write_family(tmp_path / "c" / "vaes", "twin", kind="vae")
    with pytest.raises(FamilyFileError, match="the id 'twin' is taken by") as caught:
        load_catalogue([tmp_path / "b", tmp_path / "c"])
    assert str(first) in caught.value.found
    assert caught.value.path == f"{second}:2"


@pytest.mark.parametrize(
    ("folder", "kind", "found", "hint"),
    [
        ("", "vae", "the kind 'vae' in no subfolder", "move the file to vaes/"),
        ("vaes", "text_encoder", "the kind 'text_encoder' in the folder vaes", "move the file to text_encoders/"),
        (
            "controlnets",
            "denoiser",
            "the kind 'denoiser' in the folder controlnets",
            "move the file to the folder above",
        ),
    ],
)
def test_a_file_lies_in_the_folder_of_its_kind(tmp_path: Path, folder: str, kind: str, found: str, hint: str) -> None:
    path = write_family(tmp_path / folder, kind=kind)
    with pytest.raises(FamilyFileError) as caught:
        load_catalogue([tmp_path])
    assert (caught.value.found, caught.value.hint) == (found, hint)
    assert caught.value.path == f"{path}:4"
    assert load_family_file(path).kind == kind


@pytest.mark.parametrize("name", ["some-family.yml", "vae/some-family.yaml"])
def test_a_file_that_would_be_passed_over_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(family_text())
    with pytest.raises(FamilyFileError, match="would be passed over") as caught:
        load_catalogue([tmp_path])
    assert caught.value.path == str(path)
    assert "text_encoders, vaes, controlnets" in caught.value.expected


@pytest.mark.parametrize(
    ("more", "field"), [("extends: z-imag\n", "extends"), ("contains: {part.: z-imag}\n", "contains.part.")]
)
def test_a_family_that_is_not_there_can_not_be_named(tmp_path: Path, more: str, field: str) -> None:
    path = write_family(tmp_path, more=more)
    with pytest.raises(FamilyFileError, match="no family is called 'z-imag'") as caught:
        load_catalogue([tmp_path])
    assert (caught.value.path, caught.value.field) == (f"{path}:13", field)
    assert caught.value.hint == "did you mean 'z-image'?"


def test_a_companion_s_variant_is_one_that_it_has(tmp_path: Path) -> None:
    path = write_family(tmp_path, more="companions: {text_encoder: z-image/turbo, vae: of-another-catalogue/any}\n")
    assert load_catalogue([tmp_path])["some-family"].companions["text_encoder"] == "z-image/turbo"
    path.write_text(path.read_text().replace("z-image/turbo", "z-image/turbos"))
    with pytest.raises(FamilyFileError, match="z-image has no variant 'turbos'") as caught:
        load_catalogue([tmp_path])
    assert (caught.value.field, caught.value.hint) == ("companions.text_encoder", "did you mean 'turbo'?")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FamilyFileError, match="the folder can't be read") as caught:
        load_catalogue([tmp_path / "none"])
    assert "setting families" in caught.value.hint


def test_built_in_families_are_read_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = catalogue_module.read_family_file
    monkeypatch.setattr(
        catalogue_module, "read_family_file", lambda path, **rest: read.append(path.stem) or original(path, **rest)
    )
    families = catalogue_module._builtin.__wrapped__()
    assert len(families) == len(list(FAMILIES.rglob("*.yaml")))
    assert all(families.signature(id_).native for id_ in families)
    assert read == []
    assert families["z-image"] is families["z-image"]
    assert read == ["z-image"]


def test_built_in_families_name_what_is_there() -> None:
    places = catalogue_module._builtin_places()
    for place in places.values():
        catalogue_module._check_names(place, load_catalogue())


def test_the_index_of_signatures_is_current() -> None:
    path, text = catalogue_module.builtin_index()
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_an_index_of_other_files_is_passed_over(tmp_path: Path, change: str) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("schema: 1\n")
    paths = sorted(tmp_path.glob("*.yaml"))
    signature = Signature(("",), ("x",), (("x", "y"),))
    (tmp_path / "index.json").write_text(index_text({"a": signature}, digest_of(paths, tmp_path)))
    assert read_index(tmp_path, paths) == {"a": signature}
    match change:
        case "edit":
            paths[0].write_text("schema: 2\n")
        case "add":
            (tmp_path / "c.yaml").write_text("schema: 1\n")
        case "remove":
            paths[0].unlink()
        case "rename":
            paths[0].rename(tmp_path / "d.yaml")
    assert read_index(tmp_path, sorted(tmp_path.glob("*.yaml"))) == {}
    (tmp_path / "index.json").unlink()
    assert read_index(tmp_path, paths) == {}


def test_reading_families_imports_nothing_heavy() -> None:
    code = """
import sys
from slipcast.registry.catalogue import load_catalogue
load_catalogue()
print(*{name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "diffusers", "transformers", "omegaconf"})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def _native_shapes(name: str) -> dict[str, tuple[int, ...]]:
    shapes = {key: shape for key, (_, shape) in recorded(name).tensors.items() if shape is not None}
    return load_catalogue()["z-image"].key_map.native_view(shapes) if "diffusers" in name else shapes


@pytest.mark.parametrize("header", ["z-image-turbo--comfy-bf16", "z-image--turbo-diffusers"])
def test_z_image_s_configuration_is_the_published_one_from_either_naming(header: str) -> None:
    family = load_catalogue()["z-image"]
    config = evaluate_config(family.config, family.let, _native_shapes(header))
    published = recorded_config("Tongyi-MAI--Z-Image.transformer")
    assert {key: published[key] for key in config} == config


def test_z_image_s_omni_variant_shows_the_width_of_its_image_encoder() -> None:
    family = load_catalogue()["z-image"]
    shapes: Mapping[str, tuple[int, ...]] = {
        **_native_shapes("z-image-turbo--comfy-bf16"),
        "siglip_embedder.1.weight": (3840, 1152),
    }
    config = evaluate_config(family.config, family.let, shapes)
    published = recorded_config("Tongyi-MAI--Z-Image-Omni-Base.transformer")
    assert {key: published[key] for key in config} == config


@pytest.mark.parametrize("head", [16, 64, 96])
def test_a_smaller_z_image_has_rotary_axes_that_fill_its_heads(head: int) -> None:
    family = load_catalogue()["z-image"]
    shapes = {
        "x_embedder.weight": (2 * head, 64),
        "cap_embedder.1.weight": (2 * head, 32),
        "layers.0.attention.q_norm.weight": (head,),
        "noise_refiner.0.attention.qkv.weight": (6 * head, 2 * head),
    }
    config: dict[str, Any] = evaluate_config(family.config, family.let, shapes)
    assert config["n_heads"] == 2
    assert sum(config["axes_dims"]) == head
    assert config["axes_dims"] == [head // 4, head * 3 // 8, head * 3 // 8]
