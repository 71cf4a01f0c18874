"""Which family a checkpoint is of: recorded headers, prefixes, variants, and what is said of strangers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file

import slipcast
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import choose_variant
from slipcast.registry.errors import AccountingError, ConfigError, IdentificationError, SettingsError
from slipcast.registry.evidence import weigh
from slipcast.registry.family import Variant
from slipcast.registry.header import Checkpoint
from slipcast.registry.identify import Match, identify
from slipcast.registry.names import Names
from support.family_files import write_family
from support.isolation import isolate
from support.recorded import recorded, recorded_names, write_checkpoint
from support.tiny_z_image import natively, tiny_tensors, write_folder, write_native

PREFIXES = ["", "model.diffusion_model.", "diffusion_model."]
Z_IMAGE = {
    "z-image-turbo--comfy-bf16": ("native", {"plain"}),
    "z-image-turbo--comfy-int8-convrot": ("native", {"int8_convrot", "plain"}),
    "z-image-turbo--kijai-fp8-scaled": ("native", {"fp8_scaled", "plain"}),
    "z-image--turbo-diffusers": ("diffusers", {"plain"}),
}
CONFIG = {
    "dim": 3840,
    "in_channels": 16,
    "cap_feat_dim": 2560,
    "siglip_feat_dim": None,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _identified(path: Path) -> Match:
    (match,) = identify(read_checkpoint(path), load_catalogue())
    return match


def _written(tmp_path: Path, tensors: Mapping[str, torch.Tensor], name: str = "model") -> Path:
    path = tmp_path / f"{name}.safetensors"
    save_file(dict(tensors), path)
    return path


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", Z_IMAGE)
def test_recorded_headers_of_the_family(tmp_path: Path, name: str, prefix: str) -> None:
    layout, formats = Z_IMAGE[name]
    path = write_checkpoint(recorded(name), tmp_path / f"{name}.safetensors", prefix=prefix)
    inspection = slipcast.inspect(path)
    assert (inspection.main.family, inspection.main.kind) == ("z-image", "denoiser")
    assert (inspection.main.layout, inspection.main.prefix) == (layout, prefix)
    assert set(inspection.formats) == formats
    assert inspection.tensors == len(recorded(name).tensors)
    assert dict(inspection.config) == CONFIG
    assert inspection.problems == ()


@pytest.mark.parametrize("name", [name for name in recorded_names() if name not in Z_IMAGE])
def test_no_other_recorded_header_is_taken_for_it(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(recorded(name), tmp_path / f"{name}.safetensors")
    with pytest.raises(IdentificationError) as caught:
        identify(read_checkpoint(path), load_catalogue(), family="z-image")
    error = caught.value
    assert error.found.startswith("no family claims this checkpoint")
    assert f"{len(_weights(name))} weights; formats " in error.found
    assert "names begin with" in error.found
    adapter = "lora" in name or "ip-adapter" in name
    assert ("it looks like an adapter" in error.found) == adapter
    assert ("the nearest is z-image" in error.expected) == (not adapter)
    assert ("load_lora_weights" if adapter else "slipcast explain PATH") in error.hint
    assert bool(error.items) == (not adapter)
    assert error.candidates == ()


def _weights(name: str) -> list[str]:
    sides = ("scale_weight", "weight_scale", "scale_input", "input_scale", "comfy_quant", "scaled_fp8")
    return [tensor for tensor in recorded(name).tensors if not tensor.endswith(sides)]


def test_a_pixel_space_relative_with_all_of_its_tensors_is_not_taken_for_it(tmp_path: Path) -> None:
    tensors = natively(tiny_tensors()) | {"dec_net.weight": torch.ones(2, 2)}
    with pytest.raises(IdentificationError) as caught:
        _identified(_written(tmp_path, tensors))
    assert caught.value.items == ("dec_net should not be there",)


def test_two_prefixes_mixed_are_refused_with_what_lies_outside(tmp_path: Path) -> None:
    tensors = natively(tiny_tensors())
    mixed = {("" if ".w2." in name else "diffusion_model.") + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(AccountingError) as caught:
        slipcast.plan(_written(tmp_path, mixed), device="cpu")
    count = sum(".w2." in name for name in tensors)
    assert f"{count} missing, {count} left over" in caught.value.found
    assert f"{count} tensors lie outside the prefix 'diffusion_model.'" in caught.value.hint


def test_a_block_under_another_prefix_is_a_gap(tmp_path: Path) -> None:
    tensors = natively(tiny_tensors())
    mixed = {("" if "layers.1." in name else "diffusion_model.") + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=r"blocks of layers that are not numbered from 0 on: 2 of them, without 1"):
        slipcast.plan(_written(tmp_path, mixed), device="cpu")


def test_half_of_the_evidence_under_each_of_two_prefixes_is_no_claim(tmp_path: Path) -> None:
    tensors = natively(tiny_tensors())
    mixed = {("" if "cap_embedder" in name else "diffusion_model.") + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(IdentificationError) as caught:
        identify(read_checkpoint(_written(tmp_path, mixed)), load_catalogue(), family="z-image")
    assert "under the prefix 'diffusion_model.'" in caught.value.expected
    assert caught.value.items == ("cap_embedder.1.weight",)


@pytest.mark.parametrize("part", ["lora_A", "lora_up", "lora_unet_x"])
def test_an_adapter_is_called_one(tmp_path: Path, part: str) -> None:
    tensors = {f"diffusion_model.layers.0.attention.qkv.{part}.weight": torch.ones(4, 64)}
    with pytest.raises(IdentificationError, match="it looks like an adapter, which is loaded onto a model"):
        _identified(_written(tmp_path, tensors))


@pytest.mark.parametrize(
    ("file", "variant", "guessed"),
    [("z_image_turbo_bf16", "turbo", True), ("Z-Image-Base", "base", True), ("model", "base", True)],
)
def test_a_variant_that_no_tensor_shows_is_a_guess(tmp_path: Path, file: str, variant: str, guessed: bool) -> None:
    match = _identified(_written(tmp_path, natively(tiny_tensors()), file))
    assert match.variant == variant
    assert any(variant in guess for guess in match.guesses) is guessed


def test_a_variant_that_tensors_show_is_evidence(tmp_path: Path) -> None:
    shown = {"siglip_embedder.1.weight": torch.ones(64, 16), "siglip_embedder.0.weight": torch.ones(16)}
    match = _identified(_written(tmp_path, natively(tiny_tensors()) | shown, "turbo"))
    assert match.variant == "omni"
    assert match.config["siglip_feat_dim"] == 16
    assert match.guesses == ()
    assert "variant omni: siglip_embedder.1.weight" in match.evidence


VARIANTS = {
    "large-fast": Variant(where=("size(a.weight, 0) == 8",), guess_from_filename=("fast",), default=True),
    "large": Variant(where=("size(a.weight, 0) == 8",)),
    "small": Variant(where=("size(a.weight, 0) == 4",)),
    "fast": Variant(guess_from_filename=("fast",)),
    "other": Variant(hasnt=("b",), default=True),
}


@pytest.mark.parametrize(
    ("rows", "file", "chosen", "guessed"),
    [
        (8, "fast", "large-fast", True),
        (8, "a", "large", False),
        (4, "fast", "small", False),
        (2, "fast", "fast", True),
        (2, "a", None, False),
    ],
)
def test_tensors_and_a_word_together_choose_a_variant(rows: int, file: str, chosen: str | None, guessed: bool) -> None:
    choice = choose_variant(VARIANTS, Names({"a.weight": (rows, 2), "b": (1,)}), Path(file))
    assert (choice.name, choice.guessed) == (chosen, guessed) if choice is not None else chosen is None
    assert choice is None or choice.name != "large-fast" or choice.reason.endswith("and the file name contains 'fast'")


def test_the_companion_that_a_model_needs_tells_its_variant(tmp_path: Path) -> None:
    """Two VAEs of the same tensors scale latents otherwise: the model in the same file says which of them it has."""
    denoiser = "prefixes: [denoiser.]\ncompanions: {vae: coder/wide}\n"
    coder = "prefixes: [coder.]\nvariants:\n  narrow: {default: true}\n"
    coder += "  wide: {guess_from_filename: [wide], config: {scale: 2}}\n"
    write_family(tmp_path / "families", more=denoiser)
    write_family(tmp_path / "families" / "vaes", "coder", kind="vae", more=coder)
    known = load_catalogue([tmp_path / "families"])
    tensors = {"denoiser.proj.weight": torch.ones(2, 2), "coder.proj.weight": torch.ones(2, 2)}
    both = identify(read_checkpoint(_written(tmp_path, tensors)), known)
    assert {match.family.id: match.variant for match in both} == {"some-family": None, "coder": "wide"}
    (coded,) = (match for match in both if match.family.id == "coder")
    assert dict(coded.config) == {"scale": 2}
    assert "variant wide: the some-family in the same file needs it" in coded.evidence
    alone = _written(tmp_path, {"coder.proj.weight": torch.ones(2, 2)})
    assert [match.variant for match in identify(read_checkpoint(alone), known)] == ["narrow"]


def test_a_variant_may_have_other_arguments(tmp_path: Path) -> None:
    text = TWIN + "examples: []\nvariants:\n  wide: {guess_from_filename: [wide], config: {axes_lens: [9, 2, 9]}}\n"
    known = load_catalogue([_catalogue_with(tmp_path, text, "twin")])
    for file, lens in [("wide", [9, 2, 9]), ("narrow", [1536, 512, 512])]:
        path = _written(tmp_path, natively(tiny_tensors()), file)
        (match,) = identify(read_checkpoint(path), known, family="twin")
        assert match.config["axes_lens"] == lens


def test_the_evidence_names_what_was_seen(tmp_path: Path) -> None:
    match = _identified(write_native(tmp_path / "m.safetensors", tiny_tensors(), prefix="diffusion_model."))
    assert "found cap_embedder.1.weight [64, 24]" in match.evidence
    assert "none of clip_text_pooled_proj, dec_net" in match.evidence
    assert "under the prefix diffusion_model." in match.evidence
    folder = _identified(write_folder(tmp_path / "folder", tiny_tensors()))
    assert folder.layout == "diffusers"
    assert "found noise_refiner.0.attention.qkv.weight [192, 64]" in folder.evidence


def _catalogue_with(tmp_path: Path, text: str, id: str) -> Path:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / f"{id}.yaml").write_text(text)
    return folder


TWIN = """
schema: 1
id: twin
title: Twin
kind: denoiser
extends: z-image
model: diffusers.ZImageTransformer2DModel
"""


def test_two_families_that_claim_one_checkpoint_are_an_error_that_names_both(tmp_path: Path) -> None:
    folder = str(_catalogue_with(tmp_path, TWIN, "twin"))
    path = write_native(tmp_path / "m.safetensors", tiny_tensors())
    with pytest.raises(IdentificationError) as caught:
        slipcast.inspect(path, families=[folder])
    assert "twin and z-image both claim this checkpoint" in caught.value.found
    assert set(caught.value.candidates) == {"twin", "z-image"}
    assert "family=ID" in caught.value.hint
    assert slipcast.inspect(path, families=[folder], family="twin").main.family == "twin"


PART = """
schema: 1
id: part
title: Part
kind: vae
model: diffusers.AutoencoderTiny
prefixes: [vae.]
identify: {has: [one.weight]}
precision: {fp16: safe, fp8: {storage: supported, compute: supported}}
"""


def _with_part(tmp_path: Path, prefix: str) -> tuple[Path, str]:
    folder = tmp_path / "families" / "vaes"
    folder.mkdir(parents=True)
    (folder / "part.yaml").write_text(PART)
    tensors = {"diffusion_model." + name: tensor for name, tensor in natively(tiny_tensors()).items()}
    return _written(tmp_path, tensors | {f"{prefix}one.weight": torch.ones(2, 3)}), str(tmp_path / "families")


def test_models_in_one_file_have_names_and_what_is_nobody_s_is_a_problem(tmp_path: Path) -> None:
    path, folder = _with_part(tmp_path, "vae.")
    several = slipcast.inspect(path, families=[folder])
    assert [part.name for part in several.components] == ["diffusion_model", "vae"]
    assert several.problems == ()
    for name in ("part", "vae"):
        assert slipcast.inspect(path, families=[folder], component=name).main.family == "part"
    found = slipcast.inspect(path)
    assert [part.name for part in found.components] == [""]
    assert found.problems == ("no family claims 1 tensor that begins with vae",)


WHOLE_PIPELINES = {
    "sd15--aio": {
        "model.diffusion_model": "sd-1",
        "cond_stage_model.transformer": "clip-l",
        "first_stage_model": "kl-vae",
    },
    "sdxl--base-1.0-aio": {
        "model.diffusion_model": "sdxl",
        "conditioner.embedders.0.transformer": "clip-l",
        "conditioner.embedders.1.model": "clip-g",
        "first_stage_model": "kl-vae",
    },
    "sd3-medium--incl-clips-aio": {
        "model.diffusion_model": "sd3",
        "text_encoders.clip_l.transformer": "clip-l",
        "text_encoders.clip_g.transformer": "clip-g",
        "first_stage_model": "flux-1-vae",
    },
    "sd35-large--aio-dit-vae": {"model.diffusion_model": "sd3", "first_stage_model": "flux-1-vae"},
}


@pytest.mark.parametrize("name", WHOLE_PIPELINES)
def test_every_part_of_a_recorded_pipeline_in_one_file_is_found(tmp_path: Path, name: str) -> None:
    folder = recorded_headers()
    assert folder is not None
    header = Records(folder, tmp_path).header(name)
    matches = identify(Checkpoint(header.path, MappingProxyType({"": header})), load_catalogue())
    assert {match.name: match.family.id for match in matches} == WHOLE_PIPELINES[name]
    assert sum(len(match.bundles) for match in matches) == len(header.tensors)


def test_a_tie_in_one_component_of_a_pipeline_is_an_error_also_behind_a_stranger(tmp_path: Path) -> None:
    folder = str(_catalogue_with(tmp_path, TWIN, "twin"))
    pipeline = tmp_path / "pipeline"
    write_folder(pipeline / "transformer", tiny_tensors())
    (pipeline / "decoder").mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, pipeline / "decoder" / "model.safetensors")
    classes = {"decoder": ["diffusers", "X"], "transformer": ["diffusers", "ZImageTransformer2DModel"]}
    (pipeline / "model_index.json").write_text(json.dumps(classes))
    with pytest.raises(IdentificationError) as caught:
        slipcast.inspect(pipeline, families=[folder])
    assert caught.value.candidates
    alone = slipcast.inspect(pipeline)
    assert [component.name for component in alone.components] == ["transformer"]
    assert alone.problems == ("no family claims the component decoder",)
    assert slipcast.inspect(pipeline, component="transformer").main.name == "transformer"
    with pytest.raises(IdentificationError, match="the component 'vae'"):
        slipcast.inspect(pipeline, component="vae")


def test_a_family_that_is_asked_alone_must_still_find_its_evidence(tmp_path: Path) -> None:
    path = _written(tmp_path, {"a.weight": torch.ones(2, 2)})
    with pytest.raises(IdentificationError, match="no family claims"):
        slipcast.inspect(path, family="z-image")
    with pytest.raises(SettingsError) as caught:
        slipcast.inspect(path, family="z-imag")
    assert "did you mean 'z-image'?" in caught.value.hint


def test_names_answer_for_tensors_and_for_what_lies_below(tmp_path: Path) -> None:
    names = Names({"a.b.c": (1,), "a.bc": (2,), "z": (3,)})
    assert [name for name in ("a", "a.b", "a.bc", "z", "a.b.c", "b", "a.b.c.d", "zz") if names.is_there(name)] == [
        "a", "a.b", "a.bc", "z", "a.b.c",
    ]  # fmt: skip
    assert list(names) == ["a.b.c", "a.bc", "z"]


def test_conditions_on_shapes_count_as_evidence() -> None:
    class Criteria:
        has = ("a",)
        excluded = ("b",)
        where = ("size(a, 0) == 2", "size(a, 1) == 3", "size(gone, 0) == 1")

    evidence = weigh(Criteria(), Names({"a": (2, 4)}))
    assert evidence.held == ("size(a, 0) == 2",)
    assert evidence.missing == ("size(a, 1) == 3", "size(gone, 0) == 1")
    assert evidence.absent == ("b",)
    assert not evidence.complete
    assert evidence.share == 0.5


def test_a_relative_that_the_class_can_not_hold_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "families" / "own.yaml"
    path.parent.mkdir()
    path.write_text(
        "schema: 1\nid: own\ntitle: Own\nkind: denoiser\nmodel: diffusers.ZImageTransformer2DModel\n"
        "identify: {has: [own.weight], relatives: {camera: Own Camera}}\n"
        "precision: {fp16: safe, fp8: {storage: supported, compute: supported}}\n"
    )
    catalogue = load_catalogue([path.parent])
    tensors = {"own.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert identify(read_checkpoint(tmp_path / "m.safetensors"), catalogue)[0].family.id == "own"
    save_file({**tensors, "camera.weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(IdentificationError) as caught:
        identify(read_checkpoint(tmp_path / "m.safetensors"), catalogue)
    assert "(it looks like Own Camera, which the class of own can't hold, for it has camera)" in caught.value.found


ENCODER = """
schema: 1
id: {id}
title: An encoder
kind: text_encoder
model: transformers.T5EncoderModel
prefixes: [{prefixes}]
identify: {{has: [{has}]}}
precision: {{fp16: safe, fp8: {{storage: supported, compute: supported}}}}
"""


def _encoders(folder: Path, contains: str) -> dict[str, list[str]]:
    (folder / "text_encoders").mkdir(parents=True)
    inner = ENCODER.format(id="inner", prefixes="inner., part.inner.", has="shared.weight")
    outer = ENCODER.format(id="outer", prefixes='part., ""', has="only.weight") + contains
    (folder / "text_encoders" / "inner.yaml").write_text(inner)
    (folder / "text_encoders" / "outer.yaml").write_text(outer)
    return {"families": [str(folder)]}


def test_a_file_may_hold_models_under_prefixes_that_differ(tmp_path: Path) -> None:
    families = _encoders(tmp_path / "families", "")
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in natively(tiny_tensors()).items()}
    path = _written(tmp_path, tensors | {"inner.shared.weight": torch.ones(4, 8)})
    inspection = slipcast.inspect(path, **families)
    assert [component.family for component in inspection.components] == ["z-image", "inner"]
    for family in ({}, {"family": "z-image"}, {"component": "denoiser"}):
        plan = slipcast.plan(path, **families, **family)
        fates = {tensor.name: tensor.fate for tensor in plan.tensors}
        assert fates.pop("inner.shared.weight") == "other component"
        assert set(fates.values()) == {"loaded"}
    assert slipcast.inspect(path, component="inner", **families).main.prefix == "inner."


def test_a_model_inside_another_is_another_where_the_outer_one_s_family_says_so(tmp_path: Path) -> None:
    path = _written(tmp_path, {"part.only.weight": torch.ones(2), "part.inner.shared.weight": torch.ones(4, 8)})
    families = _encoders(tmp_path / "said", "contains: {inner.: inner}\n")
    found = slipcast.inspect(path, **families).components
    assert {component.family: component.tensors for component in found} == {"inner": 1, "outer": 1}
    with pytest.raises(IdentificationError) as caught:
        slipcast.inspect(path, **_encoders(tmp_path / "unsaid", ""))
    assert "inner and outer both claim" in caught.value.found
