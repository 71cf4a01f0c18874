"""What the proofs ask of a family file's own word: a slip that no header shows is found all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from slipcast.engine import build as build_module
from slipcast.engine.check.proof import Proof
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.engine.check.run import lead_proof
from slipcast.engine.check.subject import subject_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import ConfigError
from slipcast.registry.family_file import build_family, read_family_file

FAMILIES = Path(__file__).parents[1] / "families"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = recorded_headers()
    assert folder is not None
    return Records(folder, tmp_path_factory.mktemp("records"))


def _prove(name: str, file: str, tmp_path: Path, records: Records, *edits: tuple[str, str]) -> Proof:
    """A proof of a built-in family file in which texts are replaced."""
    text = (FAMILIES / file).read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / Path(file).name
    path.write_text(text, encoding="utf-8")
    family = build_family(read_family_file(path))
    with subject_of(family, path, load_catalogue().with_family(family), records) as subject:
        return lead_proof(name, subject)


Q = "  layers.{i}.attention.qkv: diffusers splits adapters so"

BROKEN = [
    # the proof, the file, what is replaced by what, the entry that the message names, and what it says
    (
        "names",
        "ideogram-4.yaml",
        (Q, "  layers.{i}.attention.o: diffusers splits adapters so"),
        "layers.{i}.attention.qkv",
        "nothing shows the order of the parts of 'layers.{i}.attention.qkv'",
    ),
    (
        "names",
        "z-image.yaml",
        ('"{x_pad_token|cap_pad_token|', '"{cap_pad_token|'),
        "keys.x_pad_token",
        "nothing shows another shape in the file of 'x_pad_token'",
    ),
    (
        "names",
        "z-image.yaml",
        ("  dec_net: ComfyUI", "  x_embedder: nothing. ComfyUI"),
        "identify.hasnt.1",
        "nothing shows the name 'dec_net'",
    ),
    (
        "names",
        "z-image.yaml",
        ("sources:\n", "sources:\n  x_embedder: a converter shows it\n"),
        "sources.x_embedder",
        "what 'x_embedder' covers is shown",
    ),
    (
        "names",
        "sana.yaml",
        ("if has(pos_embed)", "if has(pos_embeds)"),
        "identify.where.0",
        "nothing shows the name 'pos_embeds'",
    ),
    (
        "names",
        "text_encoders/clip-h.yaml",
        ("    ln_1: ", "    ln_11: "),
        "ln_11",
        "nothing shows the name 'transformer.resblocks.{i}.ln_11'",
    ),
    (
        "names",
        "text_encoders/t5-xxl.yaml",
        ("  enc.output_norm: *gguf", "  enc: *gguf"),
        "keys.enc.output_norm",
        "nothing shows the name 'enc.output_norm'",
    ),
    (
        "patterns",
        "z-image.yaml",
        ("[cap_embedder]", '["{part=cap_embedder|cap_embeder}"]'),
        "precision.keep.text_embedding.0",
        "'cap_embeder' hits nothing",
    ),
    (
        "patterns",
        "z-image.yaml",
        ("  fp16: unsafe", '  keep_fp32: ["{part=t_embedder|t_emb}"]\n  fp16: unsafe'),
        "precision.keep_fp32.0",
        "'t_emb' hits nothing",
    ),
    (
        "values",
        "z-image.yaml",
        ("has: [cap_embedder.1.weight", "has: [cap_embedder.2.weight"),
        "identify",
        "the small model is not recognised",
    ),
    (
        "values",
        "z-image.yaml",
        ("config:\n", "config:\n  t_scale: 999.0\n"),
        "config.t_scale",
        "t_scale of the small model is 1000.0, by the class's default, but inferred 999.0",
    ),
    (
        "values",
        "z-image.yaml",
        ("  fp8_error", "  also: [{config: {axes_lens: [512, 512, 512]}}]\n  fp8_error"),
        "config.axes_lens",
        "axes_lens of tiny.also.0 is [512, 512, 512], but inferred [1536, 512, 512]",
    ),
    (
        "values",
        "z-image.yaml",
        ("  fp8_error", "  also: [{beside: {x_embedder.weight: [4, 4]}}]\n  fp8_error"),
        "tiny.also.0.beside.x_embedder.weight",
        "x_embedder.weight of tiny.also.0 is no tensor that the family drops",
    ),
    (
        "converter",
        "sana.yaml",
        ("t_block.1: time", "t_block.2: time"),
        "keys",
        "diffusers' converter fails on the small model, and at full size: KeyError",
    ),
    (
        "converter",
        "sdxl.yaml",
        ("    time_embedding.cond_proj: ", "    time_embedding.linear_1: "),
        "tiny.converter_differs.time_embedding.linear_1",
        "diffusers' converter puts 'time_embedding.linear_1' where the key map does",
    ),
]


@pytest.mark.parametrize(("proof", "file", "edit", "entry", "says"), BROKEN)
def test_what_only_the_file_says_is_held_against_something(
    tmp_path: Path, records: Records, proof: str, file: str, edit: tuple[str, str], entry: str, says: str
) -> None:
    assert _prove(proof, file, tmp_path, records).status == "ok"
    result = _prove(proof, file, tmp_path, records, edit)
    assert (result.status, says in result.detail) == ("failed", True), result.detail
    assert result.detail.partition(": ")[0].endswith(entry), result.detail


def test_names_without_rules_are_held_against_the_headers_as_well(tmp_path: Path, records: Records) -> None:
    assert "the model's; 1 by the file's sources" in _prove("names", "pixart.yaml", tmp_path, records).detail
    edit = ("hasnt: [caption_norm]", "hasnt: [caption_nrm]")
    result = _prove("names", "pixart.yaml", tmp_path, records, edit)
    assert (result.status, "nothing shows the name 'caption_nrm'" in result.detail) == ("failed", True)


def test_what_a_converter_that_fails_would_show_is_left_to_its_own_proof(tmp_path: Path, records: Records) -> None:
    result = _prove("names", "sana.yaml", tmp_path, records, ("t_block.1: time", "t_block.2: time"))
    assert (result.status, result.detail) == ("skipped", "diffusers' converter fails; see the proof 'converter'")


def test_whatever_a_class_raises_is_the_configurations_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(nn.Module):
        def __init__(self, depth: int = 1) -> None:
            raise IndexError("list index out of range")

    monkeypatch.setattr(build_module, "model_class", lambda _: Picky)
    with pytest.raises(ConfigError, match="refuses its configuration: IndexError: list index out of range"):
        build_module.build_on_meta("diffusers.Picky", {"depth": 2})
