"""Drafts of family files: they parse, claim the checkpoint that they are made of, and nothing else that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipcast.registry.catalogue import Catalogue, load_catalogue, load_family_file
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import ask
from slipcast.registry.distinguish import distinguishing_names
from slipcast.registry.draft import PLACEHOLDER, Draft, draft_family, guess_kind, guess_prefix
from slipcast.registry.errors import IdentificationError, SettingsError
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.quantisation import assemble
from slipcast.registry.strangers import kind_of_stranger
from slipcast.registry.templates import block_lists, templates
from support.recorded import recorded, recorded_names, write_checkpoint

KNOWN = {name: list(recorded(name).tensors) for name in recorded_names()}
KREA = "krea2--raw-native"
FAMILIES = Catalogue({"z-image": load_catalogue()["z-image"]})
"""As if the models that drafts are made of were not known."""


def _header(names: dict[str, tuple[int, ...]], config: dict | None = None) -> Header:
    tensors, stop = {}, 0
    for name, shape in names.items():
        tensors[name] = TensorInfo(name, "BF16", shape, 0, stop, stop := stop + 2)
    return Header(Path("model.safetensors"), "safetensors", (Path("model.safetensors"),), tensors, config=config)


def _draft(folder: Path, record: str, prefix: str = "", **options: str) -> Draft:
    path = write_checkpoint(recorded(record), folder / "model.safetensors", prefix=prefix)
    header = read_checkpoint(path).headers[""]
    return draft_family(header, "mine", FAMILIES, known=KNOWN, **options)


@pytest.mark.parametrize(
    ("record", "file"),
    [
        (KREA, "mine.yaml"),
        ("flux1-dev--bfl-native", "mine.yaml"),
        ("wan2.1-vace-1.3b--native", "mine.yaml"),
        ("sd15--aio", "mine.yaml"),
        ("vae-wan2.1--native", "vaes/mine.yaml"),
        ("te-qwen3-4b--comfy-bf16", "text_encoders/mine.yaml"),
        ("flux1-controlnet--xlabs", "controlnets/mine.yaml"),
    ],
)
def test_a_draft_loads_and_claims_only_what_has_all_of_its_names(tmp_path: Path, record: str, file: str) -> None:
    draft = _draft(tmp_path, record)
    assert draft.file == file
    (tmp_path / "mine.yaml").write_text(draft.text, encoding="utf-8")
    family = load_family_file(tmp_path / "mine.yaml")
    claimed = set()
    for name in recorded_names():
        header = _header({tensor: shape or () for tensor, (_, shape) in recorded(name).tensors.items()})
        (answer,) = ask(assemble(header).weights, {family.id: family})
        if answer.evidence.complete:
            claimed.add(f"header {name}")
    assert f"header {record}" in claimed
    assert claimed <= set(draft.inseparable)


def test_one_name_is_enough_where_nobody_else_has_it(tmp_path: Path) -> None:
    assert _draft(tmp_path, KREA).family.identify.has == ("first.weight",)


def test_evidence_is_the_smallest_set() -> None:
    known = {"a": {"y.weight", "w.weight"}, "b": {"y.weight", "z.weight"}, "c": {"x.weight", "w.weight"}}
    names = ["w.weight", "x.weight", "y.weight", "z.weight"]
    chosen, inseparable = distinguishing_names(names, {name: there.__contains__ for name, there in known.items()})
    assert len(chosen) == 2
    assert inseparable == ()
    assert all(not set(chosen) <= there for there in known.values())


def test_more_names_where_a_few_are_not_enough() -> None:
    names = [f"{letter}.weight" for letter in "abcde"]
    known = {name: (set(names) - {name}).__contains__ for name in names}
    assert set(distinguishing_names(names, known)[0]) == set(names)


@settings(deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcdefg")), max_size=8), st.sets(st.sampled_from("abcdefg"), min_size=1))
def test_every_known_thing_lacks_a_name_or_has_all(worlds: list[set[str]], names: set[str]) -> None:
    known = {str(number): world.__contains__ for number, world in enumerate(worlds)}
    chosen, inseparable = distinguishing_names(sorted(names), known)
    assert chosen
    assert set(chosen) <= names
    assert inseparable == tuple(str(number) for number, world in enumerate(worlds) if names <= world)
    for number, world in enumerate(worlds):
        assert (set(chosen) <= world) is (str(number) in inseparable)


def test_what_the_draft_shows_of_the_header(tmp_path: Path) -> None:
    text = _draft(tmp_path, KREA, prefix="model.diffusion_model.").text
    assert "prefixes: [model.diffusion_model., " in text
    assert "#   blocks.{i}.attn.wq: weight [6144, 6144] x 28" in text
    assert "ARGUMENT: count(blocks)" in text
    assert "ARGUMENT: size(first.weight, 1)" in text
    assert f"model: {PLACEHOLDER}" in text
    assert text.count("TODO: not tried") == 2


def test_a_fused_tensor_is_pointed_out() -> None:
    header = _header(
        {"blocks.0.attn.qkv.weight": (96, 32), "blocks.1.attn.qkv.weight": (96, 32), "first.weight": (32, 8)}
    )
    assert "TODO: qkv: to_q + to_k + to_v?" in draft_family(header, "mine", FAMILIES).text


def test_a_folder_names_its_class_and_its_arguments() -> None:
    names = {"proj.weight": (4, 4), "other.weight": (4, 4)}
    header = _header(names, {"_class_name": "SomeModel", "dim": 4, "kind": "x\ny: z"})
    draft = draft_family(header, "mine", FAMILIES)
    assert draft.family.model == "diffusers.SomeModel"
    assert "#   dim: 4" in draft.text
    hostile = draft_family(_header(names, {"_class_name": "os.system"}), "mine", FAMILIES)
    assert hostile.family.model == PLACEHOLDER
    encoder = draft_family(_header(names, {"architectures": ["SomeEncoder"]}), "mine", FAMILIES)
    assert encoder.family.model == "transformers.SomeEncoder"


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6, unique=True))
def test_no_name_of_a_file_breaks_the_text(names: list[str]) -> None:
    assume(not kind_of_stranger(names))
    header = _header({**dict.fromkeys(names, (2, 2)), "fine.weight": (2, 2)}, {"x": names})
    draft = draft_family(header, "mine", FAMILIES)
    assert draft.family.keys == draft.family.config == {}
    assert set(draft.family.identify.has) <= {*names, "fine.weight"}


def test_what_a_file_says_stays_in_its_comment() -> None:
    names = [f"model.diffusion_model.{letter}.weight" for letter in "abc"] + ["out\nkeys: {b: c}.weight"]
    header = _header(dict.fromkeys(names, (2, 2)), {"evil\nconfig: {b: 1}": 1, "fine": "\x85\u2028x"})
    draft = draft_family(header, "mine", FAMILIES)
    assert "begin with: out\\nkeys" in draft.text
    assert "#   evil\\nconfig: {b: 1}: 1" in draft.text
    assert draft.text.isascii()
    assert (dict(draft.family.keys), dict(draft.family.config)) == ({}, {})


@pytest.mark.parametrize("id_", ["123", "1e3", "null", "true", "a.b-2"])
def test_ids_that_yaml_would_read_otherwise(id_: str) -> None:
    assert draft_family(_header({"a.weight": (2, 2)}), id_, FAMILIES).family.id == id_


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["net.a.w", "net.b.w", "net.c.w"], "net."),
        (["model.diffusion_model.a.w", "model.diffusion_model.b.w", "vae.c"], "model.diffusion_model."),
        (["a.w", "b.w", "c.w"], ""),
        (["blocks.0.w", "blocks.1.w"], ""),
        (["network.w", "net.w", "nets.w"], ""),
    ],
)
def test_prefixes(names: list[str], prefix: str) -> None:
    assert guess_prefix(names, ["model.diffusion_model.", "diffusion_model.", ""]) == prefix


def test_kinds() -> None:
    assert guess_kind(["decoder.conv.weight"]) == "vae"
    assert guess_kind(["layers.0.self_attn.q.weight", "embed_tokens.weight"]) == "text_encoder"
    assert guess_kind(["controlnet_blocks.0.weight", "decoder.weight"]) == "controlnet"
    assert guess_kind(["blocks.0.weight"]) == "denoiser"


def test_templates() -> None:
    shapes = {"a.0.b.weight": (2, 3), "a.1.b.weight": (2, 3), "a.1.b.bias": (2,), "token": (1,), "a.0.1.weight": (4,)}
    found = {template.place: (dict(template.leaves), template.count) for template in templates(shapes)}
    assert found == {
        "a.{i}.b": ({"weight": (2, 3), "bias": (2,)}, 2),
        "token": ({"": (1,)}, 1),
        "a.{i}.{j}": ({"weight": (4,)}, 1),
    }
    assert block_lists({**shapes, "gap.1.w": (1,), "gap.3.w": (1,)}) == {"a": 2}


def test_a_known_checkpoint_needs_no_draft(tmp_path: Path) -> None:
    with pytest.raises(IdentificationError, match=r"of the known family z-image(.|\n)*extends: z-image") as error:
        _draft(tmp_path, "z-image-turbo--comfy-bf16")
    assert error.value.candidates == ("z-image",)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(IdentificationError, match="looks like an adapter"):
        _draft(tmp_path, "lora-flux1--kohya")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"id_": "My Model"}, "the id 'My Model'"),
        ({"id_": "z-image"}, r"the id 'z-image', which is taken by slipcast.families/z-image.yaml"),
        ({"id_": "mine", "model": "os.system"}, "the model class 'os.system'"),
    ],
)
def test_what_can_not_be_drafted(options: dict[str, str], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        draft_family(_header({"a.weight": (2, 2)}), options.pop("id_"), FAMILIES, **options)


def test_names_that_can_not_be_evidence() -> None:
    with pytest.raises(IdentificationError, match="no tensor whose name could stand in a family file"):
        draft_family(_header({"a b": (2, 2)}), "mine", FAMILIES)
