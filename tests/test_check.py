"""Proofs of family files: Z-Image's holds, and a copy that is broken in one place fails where it is broken."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slipcast.engine.check import converter_proof, forward_proofs, value_proofs
from slipcast.engine.check.proof import Proof
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.engine.check.run import PROOFS, check_families, lead_proof
from slipcast.engine.check.small_model import make_inputs, reference_model, run
from slipcast.engine.check.subject import subject_of
from slipcast.engine.convert import convert
from slipcast.registry.catalogue import load_catalogue, load_family_file
from slipcast.registry.claims import Layout
from slipcast.registry.errors import CheckError, FamilyFileError, SettingsError
from slipcast.registry.family_file import build_family, read_family_file
from slipcast.registry.identify import Match

FILE = Path(__file__).parents[1] / "families" / "z-image.yaml"
TEXT = FILE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = recorded_headers()
    assert folder is not None
    return Records(folder, tmp_path_factory.mktemp("records"))


def _edited(path: Path, *edits: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")
    return path


def _prove(name: str, path: Path, records: Records | None, others: Path | None = None, linted: bool = False) -> Proof:
    family = build_family(read_family_file(path), linted=True) if linted else load_family_file(path)
    catalogue = load_catalogue([others] if others else ()).with_family(family)
    with subject_of(family, path, catalogue, records) as subject:
        return lead_proof(name, subject)


def test_every_proof_holds_of_a_built_in_family() -> None:
    """``make check`` proves all of them."""
    (checked,) = check_families(["z-image"])
    assert [(proof.name, proof.status) for proof in checked.proofs] == [(name, "ok") for name in PROOFS]


def test_all_families_are_proven_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipcast.engine.check.run.PROOFS", {})
    assert [family.id for family in check_families(())] == list(load_catalogue())


def test_a_line_that_is_marked_is_named(tmp_path: Path, records: Records) -> None:
    path = _edited(tmp_path / "z-image.yaml", ("fp16: unsafe", "fp16: unsafe  # TODO: try it"))
    result = _prove("filled in", path, records)
    assert (result.status, result.detail) == ("failed", "z-image.yaml: 1 line marked TODO")
    lines = path.read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if "TODO" in line)
    assert result.error is not None
    assert result.error.items[0].startswith(f"line {number}: fp16: unsafe # TODO: try it")


BROKEN = [
    # the proof, what is replaced by what, the field that the message names, and what it says
    ("class", "dim: size(x_embedder.weight, 0)", "dim: size(x_embeder.weight, 0)", "config.dim", "x_embeder.weight"),
    ("class", "n_heads: dim // head_dim", "n_heads: 7", "config", "refuses its configuration: AssertionError"),
    ("class", ".ZImageTransformer2DModel", ".NoSuchModel", "model", "the model class 'diffusers.NoSuchModel'"),
    (
        "class",
        " n_heads: 2",
        " n_heads: 3",
        "tiny.config",
        "the small model: diffusers.ZImageTr",
    ),
    ("bijection", "out: to_out.0", "out: to_out.1", "attention.out", "34 missing, 34 left over"),
    ("bijection", "    q_norm: norm_q\n", "", "keys", "34 missing, 34 left over"),
    ("bijection", "qkv: to_q + to_k + to_v", "qkv: to_q + to_k", "attention.qkv", "34 missing, 34 of another shape"),
    ("bijection", "out: to_out.0", "out: conv1x1(to_out.0)", "attention.out", "34 of another shape"),
    ("config", "axes_lens: [1536, 512, 512] ", "axes_lens: [1024, 512, 512] ", "config.axes_lens", "says [1536, 512"),
    ("patterns", "[cap_embedder]", "[cap_embeder]", "precision.keep.text_embedding.0", "'cap_embeder' hits nothing"),
    ("patterns", "[cap_embedder]", "[cap_embedder, x.y]", "precision.keep.text_embedding.1", "'x.y' hits nothing"),
    (
        "patterns",
        "text_embedding: [cap_embedder]",
        "text_embedding: {cap_embedder: why, x.y: why}",
        "precision.keep.text_embedding.x.y",
        "'x.y' hits nothing",
    ),
    (
        "patterns",
        "  fp16: unsafe",
        "  keep_fp32: [t_emb]\n  fp16: unsafe",
        "precision.keep_fp32.0",
        "'t_emb' hits",
    ),
    ("patterns", "[ZImageTransformerBlock]", "[ZImageBlock]", "runtime.compile.blocks.0", "'ZImageBlock' hits nothing"),
    ("patterns", "[layers, noise", "[layer, noise", "runtime.offload.blocks.0", "'layer' hits nothing"),
    ("patterns", "[layers, noise", "[layers.0, noise", "runtime.offload.blocks.0", "'layers.0' hits nothing"),
    ("patterns", "pipeline: ZImagePipeline", "pipeline: AutoencoderKL", "sampling.pipeline", "nothing in diffusers"),
    ("patterns", "argument: guidance_scale", "argument: guidance", "sampling.guidance_argument", "'guidance' hits"),
    (
        "patterns",
        "sampling: {steps: 9",
        "sampling: {pipeline: ZImagePipline, steps: 9",
        "variants.turbo.sampling.pipeline",
        "'ZImagePipline' hits nothing in diffusers",
    ),
    ("patterns", "ZImageImg2ImgPipeline", "ZImageImg2Img", "sampling.image_to_image", "'ZImageImg2Img' hits nothing"),
    ("patterns", "{shift: 3.0}", "{shft: 3.0}", "variants.turbo.sampling.scheduler.shft", "'shft' hits"),
    (
        "patterns",
        "size_multiple: 16,",
        "size_multiple: 16, denoiser: unet,",
        "sampling.denoiser",
        "'unet' hits",
    ),
    ("patterns", "  vae: flux-1-vae", "  vea: flux-1-vae", "companions.vea", "'vea' hits nothing in its library"),
    (
        "patterns",
        "Qwen2Tokenizer",
        "Qwen2Tokeniser",
        "companions.tokenizer",
        "'transformers.Qwen2Tokeniser' hits nothing",
    ),
    (
        "pipeline",
        "vae: flux-1-vae/flux-1",
        "vae: flux-2-vae",
        "companions.vae",
        "AutoencoderKL as its vae, not Autoenc",
    ),
    ("pipeline", "qwen3/4b", "qwen3/5b", "companions.text_encoder", "text_encoder qwen3/5b: qwen3 has no such variant"),
    ("pipeline", "qwen3/4b", "kl-vae", "companions.text_encoder", "a family of the kind vae, not text_encoder"),
    ("pipeline", "ZImageImg2ImgPipeline", "ZImagePipeline", "sampling.image_to_image", "its call takes no image"),
    (
        "sampling",
        "steps: 50",
        "steps: 60",
        "sampling.steps",
        "num_inference_steps of ZImagePipeline is 50 where none is",
    ),
    (
        "sampling",
        "steps: 9",
        "steps: 7",
        "turbo.sampling.steps",
        "steps 7: num_inference_steps of ZImagePipeline is 50",
    ),
    (
        "sampling",
        "guidance: 5.0",
        "guidance: 6.0",
        "sampling.guidance",
        "guidance_scale of ZImagePipeline is 5.0 where",
    ),
    (
        "sampling",
        "argument: guidance_scale",
        "argument: num_inference_steps",
        "sampling.guidance_argument",
        "that is no strength of guidance of ZImagePipeline",
    ),
    (
        "latents",
        "latent_channels: 16",
        "latent_channels: 4",
        "sampling.latent_channels",
        "flux-1-vae/flux-1 has 16, a rec",
    ),
    ("latents", "latent_scale: 8", "latent_scale: 16", "sampling.latent_scale", "it is 8 of flux-1-vae/flux-1"),
    (
        "latents",
        "size_multiple: 16",
        "size_multiple: 8",
        "sampling.size_multiple",
        "no multiple of 16, which is one token",
    ),
    (
        "latents",
        "{text_encoder: cap_feat_dim",
        "{text_encoder: dim",
        "takes.text_encoder",
        "takes 3840, qwen3/4b gives 2560",
    ),
    (
        "latents",
        "vae: in_channels}",
        "vae: channels}",
        "takes.vae",
        "diffusers.ZImageTransformer2DModel has no such argument",
    ),
    (
        "scheduler",
        "{shift: 3.0}",
        "{shift: fast}",
        "turbo.sampling.scheduler.shift",
        "shift fast: it is 1.0 by default",
    ),
    (
        "scheduler",
        "{shift: 3.0}",
        "{shift: 6.0}",
        "turbo.sampling.scheduler.shift",
        "FlowMatchEulerDiscreteScheduler has 1.0",
    ),
    (
        "blocks",
        "[ZImageTransformerBlock]",
        "[FeedForward]",
        "compile.blocks.0",
        "FeedForward: ZImageTransformerBlock repeats",
    ),
    (
        "blocks",
        "[layers, noise_refiner, ",
        "[noise_refiner, ",
        "runtime.offload.blocks",
        "nothing of layers: it holds blocks of the model too",
    ),
    (
        "blocks",
        "token: 122763",
        "token: 1227630",
        "runtime.activation_bytes_per_token",
        "the widest layer alone takes and",
    ),
    (
        "parts",
        "prefixes: [",
        "prefixes: [modl.diffusion_model., ",
        "prefixes.0",
        "prefix modl.diffusion_model.: nothing shows it",
    ),
    ("dtypes", "storage: supported", "storage: {unsupported: why}", "fp8.storage", "the small model runs in float8"),
    ("dtypes", "storage: supported", "storage: {not_applicable: why}", "fp8.storage", "linear layers hold 100% of its"),
    ("rules", "keys:\n", "keys:\n  a.b: c.d\n", "keys.a.b", "'a.b: c.d' acts on no tensor"),
    ("names", "[clip_text_pooled_proj,", "[clip_text_poled_proj,", "identify.hasnt.0", "nothing shows the name 'clip_"),
    (
        "keep",
        "forward_needs: [t_embedder]",
        "forward_needs: []",
        "precision.forward_needs",
        "with nothing kept but forward_needs",
    ),
    (
        "keep",
        "forward_needs: [t_embedder] ",
        "forward_needs: [t_embedder, cap_embedder] ",
        "precision.forward_needs.1",
        "the forward runs in fp8 storage without 'cap_embedder'",
    ),
    ("recognised", "format: fp8_scaled", "format: fp8_raw", "examples.2.expect.format", "fp8_scaled, not fp8_raw"),
    ("recognised", "layout: diffusers", "layout: native", "examples.1.expect.layout", "diffusers, not native"),
    ("recognised", "filename: [turbo]", "filename: [tubo]", "examples.0.expect.variant", "variant base, not turbo"),
    (
        "recognised",
        "header: z-image-turbo--comfy-bf16",
        "header: z-image--x",
        "examples.0.header",
        "no record z-",
    ),
    ("recognised", "cap_embedder.1.weight, noise", "cap_embedder.9, noise", "examples.0.header", "no family claims"),
    (
        "recognised",
        "header: z-image-turbo--comfy-bf16",
        "header: lora-flux1--kohya",
        "examples.0.header",
        "lora-flux1--kohya: no family",
    ),
    ("layout", ", noise_refiner.0.attention.qkv.weight", "", "identify.has", "every name of the evidence"),
    (
        "others",
        "has: [cap_embedder.1",
        "has: [final_layer.linear.weight]  # [",
        "identify.has",
        "headers that are no",
    ),
    ("values", "n_kv_heads: n_heads", "n_kv_heads: 3", "config.n_kv_heads", "n_kv_heads of the small model is 2"),
    ("values", ", noise_refiner.0.attention.qkv.weight", "", "keys", "can't be written and read back"),
    (
        "converter",
        "qkv: to_q + to_k",
        "qkv: to_k + to_q",
        "attention.qkv",
        "converter puts 10 tensors elsewhere",
    ),
    (
        "forward",
        "[t_embedder]\n    text_embedding: [cap_embedder]\n  forward_needs: [t_embedder]",
        "[all_x_embedder]\n    text_embedding: [cap_embedder]\n  forward_needs: []",
        "precision.fp8.storage",
        "must have the same dtype",
    ),
    ("forward", "fp8_error: 0.1", "fp8_error: 0.001", "tiny.fp8_error", "differ by 0.06"),
    ("forward", "t: uniform 2", "tt: uniform 2", "tiny", "the forward fails: TypeError"),
]


@pytest.mark.parametrize(("proof", "old", "new", "field", "says"), BROKEN)
def test_a_broken_file_fails_where_it_is_broken(
    tmp_path: Path, records: Records, proof: str, old: str, new: str, field: str, says: str
) -> None:
    path = _edited(tmp_path / "z-image.yaml", (old, new))
    result = _prove(proof, path, records)
    assert result.status == "failed"
    assert says in result.detail
    place, _, named = result.detail.partition(": ")[0].partition(", ")
    assert named.endswith(field)
    word = re.sub(r"\.\d+$", "", field).rpartition(".")[2]
    line = path.read_text(encoding="utf-8").splitlines()[int(place.removeprefix("z-image.yaml:")) - 1]
    assert f"{word}:" in line


def test_a_converter_gets_what_the_family_drops_where_it_wants_that(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wants(checkpoint: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        checkpoint.pop("norm_final.weight")
        return {**original(checkpoint=checkpoint), "norm_final.weight": torch.zeros(1)}

    original = converter_proof.converter_of("diffusers.ZImageTransformer2DModel")
    assert original is not None
    monkeypatch.setattr(converter_proof, "converter_of", lambda _: wants)
    assert _prove("converter", FILE, records).status == "ok"
    path = _edited(tmp_path / "z-image.yaml", ("  norm_final.weight: ", "  norm_first.weight: "))
    failed = _prove("converter", path, records)
    assert (failed.status, "converter fails on the small model: KeyError" in failed.detail) == ("failed", True)


def test_where_the_converter_differs_is_said_with_the_reason(tmp_path: Path, records: Records) -> None:
    swapped = ("qkv: to_q + to_k", "qkv: to_k + to_q")
    said = '  converter_differs: {"%s": they swap}\n  fp8_error'
    place = "{stack=layers|noise_refiner|context_refiner|siglip_refiner}.{i}.attention"
    excused = _prove("converter", _edited(tmp_path / "z-image.yaml", swapped, ("  fp8_error", said % place)), records)
    assert (excused.status, "10 differ, for the reasons" in excused.detail) == ("ok", True)
    partly = _prove("converter", _edited(tmp_path / "z-image.yaml", swapped, ("  fp8_error", said % "layers")), records)
    assert (partly.status, "puts 6 tensors elsewhere" in partly.detail) == ("failed", True)
    idle = _prove("converter", _edited(tmp_path / "z-image.yaml", ("  fp8_error", said % "layers.{i}")), records)
    assert (idle.status, "puts 'layers.{i}' where the key map does" in idle.detail) == ("failed", True)


def test_every_proof_is_broken_somewhere() -> None:
    elsewhere = {"filled in", "key map", "way back"}
    assert {entry[0] for entry in BROKEN} | elsewhere == set(PROOFS)


def test_a_key_map_at_odds_with_itself(tmp_path: Path, records: Records) -> None:
    edit = ("keys:\n", 'keys:\n  "{s=layers|others}.{i}.w": "{s}.{i}.attention.to_v"\n')
    path = _edited(tmp_path / "z-image.yaml", edit)
    result = _prove("key map", path, records, linted=True)
    assert result.status == "failed"
    assert "can match the same name in the model" in result.detail
    assert "z-image.yaml:" in result.detail


def test_a_configuration_that_only_native_files_show(tmp_path: Path, records: Records) -> None:
    """A pad token of one axis in the file has two in the model."""
    folder = tmp_path / "headers"
    folder.mkdir()
    record = json.loads((records.folder / "z-image-turbo--comfy-bf16.json").read_text(encoding="utf-8"))
    record["tensors"]["x_pad_token"] = ["BF16", [3840]]
    (folder / "z-image-turbo--comfy-bf16.json").write_text(json.dumps(record))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    edit = ("in_channels: size(x_embedder.weight, 1) // 4", "in_channels: size(x_pad_token, 0)")
    result = _prove("way back", _edited(tmp_path / "z-image.yaml", edit), Records(folder, scratch))
    assert result.status == "failed"
    assert "config.in_channels: z-image-turbo--comfy-bf16: a file in the model's names shows " in result.detail
    assert "in_channels = 1, the native file 3840" in result.detail


def test_another_family_that_claims_an_example(tmp_path: Path, records: Records) -> None:
    rival = TEXT.replace("id: z-image", "id: rival")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "rival.yaml").write_text(rival, encoding="utf-8")
    result = _prove("recognised", FILE, records, tmp_path / "others")
    assert result.status == "failed"
    assert "examples.0.header: z-image-turbo--comfy-bf16: the families rival and z-image both claim" in result.detail


def test_without_headers_their_proofs_are_skipped_and_say_so(tmp_path: Path) -> None:
    skipped = {
        name: _prove(name, FILE, None).detail
        for name in PROOFS
        if _prove(name, FILE, None).status == "skipped" and name not in ("values", "converter", "forward")
    }
    assert skipped.keys() == {"bijection", "way back", "config", "names", "recognised", "others"}
    assert set(skipped.values()) == {"the recorded headers are not here; name their folder with --headers"}


def test_without_a_small_model_its_proofs_are_skipped(tmp_path: Path, records: Records) -> None:
    path = tmp_path / "z-image.yaml"
    path.write_text(TEXT[: TEXT.index("tiny:")], encoding="utf-8")
    for name in ("values", "converter", "forward"):
        result = _prove(name, path, records)
        assert (result.status, result.detail) == ("skipped", "the family file has no section tiny")
    unused = _prove("rules", path, records)  # only the small model has an image encoder
    assert (unused.status, "siglip_pad_token" in unused.detail) == ("failed", True)


def test_a_family_without_fp8_storage_is_not_held_to_it(tmp_path: Path, records: Records) -> None:
    edit = ("storage: supported", "storage: {unsupported: it turns to noise}")
    result = _prove("forward", _edited(tmp_path / "z-image.yaml", edit), records)
    assert (result.status, "it turns to noise" in result.detail) == ("ok", True)


def test_fp8_compute_is_held_to_the_bound_as_well(tmp_path: Path, records: Records) -> None:
    result = _prove("forward", FILE, records)
    assert re.search(r"storage 0\.0\d+, compute 0\.0\d+, within 0\.1", result.detail)
    tight = _prove("forward", _edited(tmp_path / "z-image.yaml", ("fp8_error: 0.1", "fp8_error: 0.07")), records)
    assert (tight.status, "outputs in fp8 compute differ by 0.08" in tight.detail) == ("failed", True)
    edit = ("compute: supported", "compute: {unsupported: it turns to noise}")
    result = _prove("forward", _edited(tmp_path / "z-image.yaml", edit), records)
    assert (result.status, "compute" in result.detail) == ("ok", False)


def test_a_small_model_in_which_no_layer_multiplies_in_float8(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipcast.engine.fp8_products.compute_obstacle", lambda *_: "its sizes are odd")
    result = _prove("forward", FILE, records)
    assert (result.status, "no layer of the small model multiplies in float8" in result.detail) == ("failed", True)


def test_a_family_that_stores_nothing_in_fp8(tmp_path: Path, records: Records) -> None:
    everything = (
        "layers, noise_refiner, context_refiner, siglip_refiner, siglip_embedder, all_x_embedder, all_final_layer"
    )
    edit = ("[cap_embedder]", f"[cap_embedder, {everything}]")
    result = _prove("forward", _edited(tmp_path / "z-image.yaml", edit), records)
    assert (result.status, "no weight of the small model is stored in fp8" in result.detail) == ("failed", True)


def test_an_example_that_is_another_familys(tmp_path: Path, records: Records) -> None:
    path = _edited(tmp_path / "z-image.yaml", ("z-image-turbo--comfy-bf16", "krea2--raw-native"))
    result = _prove("recognised", path, records)
    assert (result.status, "krea2--raw-native is recognised as krea-2" in result.detail) == ("failed", True)


def test_a_class_that_does_not_run_by_itself_is_proven_but_for_its_forward(records: Records) -> None:
    path = FILE.with_name("controlnets") / "z-image-control.yaml"
    led = {name: _prove(name, path, records) for name in ("values", "forward", "keep")}
    assert {name: proof.status for name, proof in led.items()} == {
        "values": "ok", "forward": "skipped", "keep": "skipped"
    }  # fmt: skip
    assert "does not run by itself: its forward uses embedders" in led["forward"].detail


def test_a_converter_that_knows_one_size_is_asked_about_an_example(tmp_path: Path, records: Records) -> None:
    """diffusers' converter of FLUX.1 wants its 3072 columns; what a small model can't show, a row of each does."""
    path = FILE.with_name("flux-1.yaml")
    assert "1160 tensors of one column each" in _prove("converter", path, records).detail
    text = path.read_text(encoding="utf-8")
    for old, new, wrong in [
        ("swap_halves(norm_out.linear)", "norm_out.linear", 2),
        ("linear1: attn.to_q + attn.to_k", "linear1: attn.to_k + attn.to_q", 4 * 38),
    ]:
        broken = tmp_path / "flux-1.yaml"
        broken.write_text(text.replace(old, new), encoding="utf-8")
        result = _prove("converter", broken, records)
        assert (result.status, f"puts {wrong} tensors elsewhere" in result.detail) == ("failed", True)


def test_values_that_come_back_elsewhere(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the engine, not of a file."""

    def turned(match: Match, out: Path, layout: Layout, *, prefix: str) -> None:
        convert(match, out, layout, prefix=prefix)
        tensors = load_file(out)
        save_file({**tensors, "x_pad_token": tensors["x_pad_token"].roll(1, 1)}, out)

    monkeypatch.setattr(value_proofs, "convert", turned)
    result = _prove("values", FILE, records)
    assert (result.status, result.error.items if result.error else ()) == ("failed", ("x_pad_token",))
    assert "keys.x_pad_token: 1 tensors do not come back as they were" in result.detail


def test_a_loaded_model_that_is_another(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the engine, not of a file."""

    def another(match: Match, tensors: dict[str, torch.Tensor]) -> nn.Module:
        return reference_model(match, {name: tensor * 1.01 for name, tensor in tensors.items()})

    monkeypatch.setattr(forward_proofs, "reference_model", another)
    result = _prove("forward", FILE, records)
    assert (result.status, "is not the one that was written" in result.detail) == ("failed", True)


@pytest.mark.parametrize(
    ("given", "found"), [(torch.tensor([math.nan]), "not finite"), (torch.tensor([1]), "no floats"), ({}, "no floats")]
)
def test_outputs_that_prove_nothing(given: object, found: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return given

    with pytest.raises(CheckError, match=found):
        run(Model(), {"x": "normal 2"})


def test_inputs_are_made_as_they_are_described() -> None:
    made = make_inputs({"a": ["normal 2x3", {"b": "integers 5 < 3"}], "c": "true 2", "d": 3, "e": "uniform 9 < 50"})
    assert made["a"][0].shape == (2, 3)
    assert made["a"][1]["b"].dtype == torch.int64
    assert set(made["a"][1]["b"].tolist()) <= {0, 1, 2}
    assert made["c"].tolist() == [True, True]
    assert made["d"] == 3
    assert 1 < float(made["e"].max()) < 50
    assert torch.equal(
        made["e"], make_inputs({"a": ["normal 2x3", {"b": "integers 5 < 3"}], "e": "uniform 9 < 50"})["e"]
    )


def test_a_file_that_can_not_be_read_is_refuted_by_that(tmp_path: Path) -> None:
    path = _edited(tmp_path / "z-image.yaml", ("identify:", "identfy:"))
    (checked,) = check_families([str(path)])
    (proof,) = checked.failed
    assert (proof.name, isinstance(proof.error, FamilyFileError)) == ("reads", True)
    assert "'identify'" in str(proof.error)


def test_an_unknown_id_and_an_unknown_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no family is called 'z-imag'(.|\n)*did you mean 'z-image'\?"):
        list(check_families(["z-imag"]))
    with pytest.raises(SettingsError, match="the folder of headers"):
        list(check_families(["z-image"], headers=tmp_path / "nowhere"))


def test_a_file_is_laid_over_the_family_of_its_id(tmp_path: Path) -> None:
    path = tmp_path / "z-image.yaml"
    renamed = TEXT.replace("variant: turbo", "variant: quick").replace("  turbo:  ", "  quick:  ")
    path.write_text(renamed, encoding="utf-8")
    (checked,) = check_families([str(path)])
    assert [proof.status for proof in checked.proofs] == ["ok"] * len(PROOFS)
    assert checked.source == str(tmp_path / "z-image.yaml")


def test_a_converter_may_want_names_with_their_prefix() -> None:
    """diffusers' converter of UNets reads nothing else, and gives an empty answer to other names."""
    full, bare = {"model.a": torch.ones(1)}, {"a": torch.ones(1)}
    built: Any = SimpleNamespace(model=SimpleNamespace(config={}))

    def picky(checkpoint: dict[str, torch.Tensor], config: object) -> dict[str, torch.Tensor]:
        return {name[6:]: tensor for name, tensor in checkpoint.items() if name.startswith("model.")}

    def strict(checkpoint: dict[str, torch.Tensor], config: object) -> dict[str, torch.Tensor]:
        return {"a": checkpoint["model.a"]}

    for converter in (picky, strict):
        assert converter_proof._convert_named(converter, full, bare, built).keys() == {"a"}


def test_a_converter_may_look_for_names_that_it_has_taken() -> None:
    """diffusers' converter of Cosmos empties a dict, and then asks it which of two layouts it held."""
    built: Any = SimpleNamespace(model=SimpleNamespace(config={}))

    def forgetful(checkpoint: dict[str, torch.Tensor], config: object) -> dict[str, torch.Tensor]:
        taken = {name: checkpoint.pop(name) for name in list(checkpoint)}
        return {"new" if "old" in checkpoint else "other": taken["old"]}

    native = {"old": torch.ones(1)}
    assert converter_proof._convert(forgetful, native, built).keys() == {"other"}
    assert converter_proof._convert_kept(forgetful, native, built).keys() == {"new"}
    assert converter_proof._convert_kept(forgetful, {}, built) == {}
