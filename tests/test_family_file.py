"""Family files: what they mean, and what their errors say."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slipcast.engine.precision import Rules
from slipcast.registry.catalogue import load_family_file
from slipcast.registry.errors import FamilyFileError
from support.family_files import MINIMAL_LINES, family_text, write_family


def test_a_minimal_file_has_the_defaults_of_the_language(tmp_path: Path) -> None:
    family = load_family_file(write_family(tmp_path))
    assert (family.id, family.kind, family.model) == ("some-family", "denoiser", "diffusers.SomeModel")
    assert family.prefixes == ("",)
    assert family.identify.has == ("proj.weight",)
    assert (family.identify.hasnt, family.identify.where) == ((), ())
    assert family.precision.compute == "checkpoint"
    assert family.precision.compute_default == "bfloat16"
    assert family.precision.fp8.activation_scale == "row"
    assert family.precision.fp8.storage.supported
    assert family.runtime.activation_bytes_per_token is None
    assert dict(family.variants) == dict(family.config) == dict(family.keys) == {}
    assert family.source == str(tmp_path / "some-family.yaml")
    assert [link.files for link in family.key_map.links(["a.weight"])] == [("a.weight",)]


def test_what_the_forward_needs_is_kept(tmp_path: Path) -> None:
    path = write_family(tmp_path)
    kept = "precision:\n  keep: {other: [a.b]}\n  forward_needs: [a.b]\n"
    path.write_text(path.read_text().replace("precision:\n", kept))
    assert load_family_file(path).precision.forward_needs == ("a.b",)
    path.write_text(path.read_text().replace("forward_needs: [a.b]", "forward_needs: [a.bb]"))
    with pytest.raises(FamilyFileError, match=r"forward_needs names 'a\.bb', which keep does not") as caught:
        load_family_file(path)
    assert caught.value.hint == "did you mean 'a.b'?"


def test_how_a_family_is_run_and_sampled(tmp_path: Path) -> None:
    path = write_family(tmp_path)
    path.write_text(
        path.read_text()
        + "runtime: {compile: {unsupported: it has no blocks}}\n"
        + "sampling: {pipeline: SomePipeline, steps: 50, guidance: 5, guidance_argument: guidance_scale}\n"
        + "variants: {fast: {default: true, sampling: {steps: 4}}}\n"
    )
    family = load_family_file(path)
    assert family.runtime.compile is not None
    assert family.sampling is not None
    assert (family.runtime.compile.blocks, family.runtime.compile.unsupported) == ((), "it has no blocks")
    assert (family.sampling.pipeline, family.sampling.steps, family.sampling.guidance) == ("SomePipeline", 50, 5.0)
    assert (family.sampling.latent_channels, family.variants["fast"].sampling.steps) == (None, 4)


def test_what_fp8_can_not_do_has_its_reason(tmp_path: Path) -> None:
    path = write_family(tmp_path)
    text = path.read_text().replace("storage: supported", "storage: {unsupported: it turns to noise}")
    path.write_text(text.replace("compute: supported", "compute: {not_applicable: it is all convolutions}"))
    fp8 = load_family_file(path).precision.fp8
    assert (fp8.storage.supported, fp8.storage.status, fp8.storage.reason) == (
        False,
        "unsupported",
        "it turns to noise",
    )
    assert (fp8.compute.supported, fp8.compute.status) == (False, "not_applicable")


MISTAKES = [
    ("identfy: {has: [x]}\n", 1, "identfy", "unknown field 'identfy'", "did you mean 'identify'?"),
    (
        "runtime:\n  offload: {block: [a]}\n",
        2,
        "runtime.offload.block",
        "unknown field 'block' in runtime.offload",
        "'blocks'",
    ),
    (
        "runtime:\n  compile: {}\n",
        2,
        "runtime.compile",
        "neither blocks nor a reason",
        "name the blocks' classes, or say why they can't be",
    ),
    (
        "runtime:\n  compile: {blocks: [A], unsupported: it breaks}\n",
        2,
        "runtime.compile",
        "blocks and a reason against compiling them",
        "name the blocks' classes",
    ),
    ("sampling: {steps: 0}\n", 1, "sampling.steps", "sampling.steps is 0", "correct it"),
    (
        "variants: {a: {default: true, sampling: {zzz: 8}}}\n",
        1,
        "variants.a.sampling.zzz",
        "unknown field 'zzz'",
        "remove it",
    ),
    ("runtime:\n  zzz: 1\n", 2, "runtime.zzz", "unknown field 'zzz' in runtime", "remove it"),
    ("drop:\n", 1, "drop", "drop is empty", "correct it"),
    ("drop: {a.b: 3}\n", 1, "drop.a.b", "drop.a.b is 3", "correct it"),
    ("variants: {turbo: {}}\n", 1, "variants.turbo", "a variant that nothing chooses", "or remove it"),
    (
        "variants:\n  turbo: {default: yes}\n",
        2,
        "variants.turbo.default",
        "variants.turbo.default is 'yes'",
        "correct it",
    ),
    (
        "variants:\n  a: {default: true}\n  b: {default: true}\n",
        1,
        "variants",
        "2 default variants: a, b",
        "choose one",
    ),
    ("prefixes: model.\n", 1, "prefixes", "prefixes is 'model.'", "correct it"),
    ("prefixes:\n  - a.\n  - 3\n", 3, "prefixes.1", "prefixes.1 is 3", "correct it"),
    ("extends: Some Family\n", 1, "extends", "no family is called 'Some Family'", ""),
    ("companions: {vae: ../../etc}\n", 1, "companions.vae", "companions.vae is '../../etc'", "correct it"),
    (
        "examples:\n  - {header: x, expect: {format: plain, variant: v}}\n",
        -11,
        "",
        "expects a variant 'v'",
        "the variant",
    ),
    ("examples:\n  - {header: ../x, expect: {format: plain}}\n", 2, "examples.0.header", "is '../x'", "correct it"),
    (
        "examples:\n  - {header: x, expect: {format: plain, layout: nativ}}\n",
        -11,
        "",
        "expects the layout 'nativ'",
        "'native'",
    ),
    ("namings:\n  native: {keys: {a: b}}\n", 1, "namings", "a naming called 'native'", "whose names they are"),
    (
        "namings:\n  other:\n    keys:\n      a: b + c\n",
        4,
        "namings.other.keys.a",
        "'a: b + c' in a naming, which is read before the model is known",
        "belong in keys:",
    ),
    (
        "namings:\n  other:\n    keys:\n      a: a\n",
        4,
        "namings.other.keys.a",
        "says what holds without it",
        "see what the message says",
    ),
    ("examples:\n  - {header: x}\n", 2, "examples.0.expect", "the field 'examples.0.expect' is missing", "add it"),
    ("keys:\n  a: [b]\n", 2, "keys.a", "keys.a is a list", "correct it"),
    ("keys:\n  a:\n    b: {c: true}\n", 3, "keys.a.b.c", "keys.a.b.c is true", "correct it"),
    ("keys:\n  a: swap_halvs(b)\n", 2, "keys.a", "the operation 'swap_halvs'", "swap_halves"),
    ("config:\n  dim: size(a.weight\n", 2, "config.dim", "", ""),
    ("config:\n  dim: 3\n  heads: dimm // 2\n", 3, "config.heads", "the name 'dimm'", "correct it"),
    ("let: {a: 1}\nconfig:\n  x: [a, b]\n", 3, "config.x.1", "the name 'b'", ""),
    ("variants:\n  xl: {where: [size(a.weight, 0) == == 3]}\n", 2, "variants.xl.where.0", "", ""),
    ("variants:\n  xl: {default: true, config: {a: b}}\n", 2, "variants.xl.config.a", "", ""),
    ("drop:\n  '{last}.a': why\n", 2, "drop.{last}.a", "arithmetic or {last}", ""),
]


@pytest.mark.parametrize(("more", "line", "field", "found", "hint"), MISTAKES, ids=[row[2] for row in MISTAKES])
def test_a_mistake_is_named_with_file_line_and_field(
    tmp_path: Path, more: str, line: int, field: str, found: str, hint: str
) -> None:
    path = write_family(tmp_path, more=more)
    with pytest.raises(FamilyFileError) as caught:
        load_family_file(path)
    error = caught.value
    assert error.path == f"{path}:{MINIMAL_LINES + line}"
    assert (error.line, error.field) == (MINIMAL_LINES + line, field)
    assert found in error.found
    assert hint in error.hint


@pytest.mark.parametrize(
    ("right", "wrong", "line", "found", "expected"),
    [
        ("kind: denoiser", "kind: denoisr", 4, "kind is 'denoisr'", "one of denoiser, text_encoder, vae, controlnet"),
        ("kind: denoiser\n", "", 1, "the field 'kind' is missing", "What part of a pipeline it is."),
        ("diffusers.SomeModel", "os.system", 5, "model is 'os.system'", "a class: diffusers.Name or transformers.Name"),
        ("id: some-family", "id: ../some-family", 2, "id is '../some-family'", "an id: small letters"),
        ("has: [proj.weight]", "has: []", 7, "identify.has is a list", "at least 1 item"),
        ("  fp16: safe\n", "", 8, "the field 'precision.fp16' is missing", "where activations overflow in float16"),
        ("    storage: supported\n", "", 10, "the field 'precision.fp8.storage' is missing", "kept in float8"),
        (
            "storage: supported",
            "storage: yes",
            11,
            "'yes' in place of a statement about fp8",
            "supported, {not_applicable: why}",
        ),
        (
            "storage: supported",
            "storage: {unsupported: }",
            11,
            "a mapping in place of a statement about fp8",
            "unsupported: why",
        ),
        ("fp16: safe", "fp16: true", 9, "precision.fp16 is true", "one of safe, unsafe"),
        (
            "fp16: safe",
            "fp16: safe\n  keep: {heads: [t]}",
            10,
            "the role 'heads'",
            "one of time_embedding,",
        ),
        ("fp16: safe", "fp16: safe\n  keep: {Time: [t]}", 10, "the key 'Time'", "a word of small letters"),
        ("schema: 1", "schema: 2", 1, "schema 2 is newer than this version of slipcast", "1, which this version reads"),
        ("schema: 1", "schema: one", 1, "schema 'one'", "schema: 1"),
        ("schema: 1\n", "", 1, "the field 'schema' is missing", "1"),
    ],
)
def test_a_wrong_value_says_what_was_expected(
    tmp_path: Path, right: str, wrong: str, line: int, found: str, expected: str
) -> None:
    path = tmp_path / "some-family.yaml"
    assert right in family_text()
    path.write_text(family_text().replace(right, wrong))
    with pytest.raises(FamilyFileError) as caught:
        load_family_file(path)
    assert caught.value.found == found
    assert expected in caught.value.expected
    assert caught.value.line == line


def test_roles_beside_the_known_ones_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "some-family.yaml"
    path.write_text(family_text().replace("fp16: safe", "fp16: safe\n  keep: {router: [gate], norm: [norm]}"))
    assert dict(load_family_file(path).precision.keep) == {"router": ("gate",), "norm": ("norm",)}


def test_kept_modules_may_have_a_reason_each(tmp_path: Path) -> None:
    path = tmp_path / "some-family.yaml"
    keep = "keep: {norm: [norm], other: {gate: it chooses, 'blocks.{i}.gate': it chooses too}}"
    path.write_text(family_text().replace("fp16: safe", f"fp16: safe\n  {keep}\n  forward_needs: [gate, norm]"))
    precision = load_family_file(path).precision
    assert precision.keep["norm"] == ("norm",)
    assert precision.keep["other"] == {"gate": "it chooses", "blocks.{i}.gate": "it chooses too"}
    rules = Rules.of(precision)
    assert rules.stays_plain("gate", ()) == "the family keeps it unquantised: it chooses"
    assert rules.stays_plain("blocks.3.gate.proj", ()) == "the family keeps it unquantised: it chooses too"
    assert (
        rules.stays_plain("norm", ())
        == "the family keeps its norm unquantised: the forward looks at its weight's dtype"
    )
    assert rules.stays_plain("blocks.3", ()) == ""
    path.write_text(path.read_text().replace("it chooses too", "''"))
    with pytest.raises(FamilyFileError, match=r"precision\.keep\.other"):
        load_family_file(path)


def test_the_first_of_several_mistakes_is_raised_with_the_others_as_items(tmp_path: Path) -> None:
    path = write_family(tmp_path, more="zzz: 1\nruntime: {yyy: 2}\n")
    path.write_text(path.read_text().replace("kind: denoiser", "kind: denoisr"))
    with pytest.raises(FamilyFileError) as caught:
        load_family_file(path)
    assert caught.value.field == "kind"
    assert caught.value.items == ("line 13: unknown field 'zzz'", "line 14: unknown field 'yyy' in runtime")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "word\n"])
def test_a_file_without_a_mapping_is_no_family(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some-family.yaml"
    path.write_text(text)
    with pytest.raises(FamilyFileError, match="the file is") as caught:
        load_family_file(path)
    assert "a mapping with schema, id, title" in caught.value.expected


def test_the_id_is_the_file_name(tmp_path: Path) -> None:
    path = write_family(tmp_path).rename(tmp_path / "other.yaml")
    with pytest.raises(FamilyFileError, match=r"the id 'some-family' in a file called other\.yaml") as caught:
        load_family_file(path)
    assert caught.value.line == 2


def test_a_family_can_not_be_changed_but_copied_and_sent_to_other_processes(tmp_path: Path) -> None:
    family = load_family_file(write_family(tmp_path, more="drop: {a: why}\nkeys: {b: flat(c)}\n"))
    frozen: Any = family
    with pytest.raises(ValidationError, match="frozen"):
        frozen.title = "other"
    with pytest.raises(TypeError):
        frozen.drop["b"] = "why"
    for twin in (pickle.loads(pickle.dumps(family)), copy.deepcopy(family)):
        assert twin == family
        assert twin.digest == family.digest
        assert twin.key_map == family.key_map
    assert json.loads(family.model_dump_json())["drop"] == {"a": "why"}


def test_the_digest_is_of_what_the_file_says(tmp_path: Path) -> None:
    path = write_family(tmp_path, more="config: {a: 1, b: a}\n")
    first = load_family_file(path).digest
    assert len(first) == 64
    path.write_text("# a comment\n" + path.read_text().replace("[proj.weight]", "['proj.weight']"))
    assert load_family_file(path).digest == first
    path.write_text(path.read_text().replace("{a: 1, b: a}", "{a: 2, b: a}"))
    changed = load_family_file(path).digest
    path.write_text(path.read_text().replace("{a: 2, b: a}", "{b: 2, a: 2}"))
    reordered = load_family_file(path).digest
    path.write_text(path.read_text().replace("{b: 2, a: 2}", "{a: 2, b: 2}"))
    assert len({first, changed, reordered, load_family_file(path).digest}) == 4


def test_a_family_that_extends_another_joins_four_sections_and_replaces_the_others(tmp_path: Path) -> None:
    write_family(
        tmp_path,
        "base",
        more="let: {h: 1}\nconfig: {a: h, b: 2}\nkeys: {x: y}\ndrop: {p: why}\nvariants: {v: {default: true}}\n",
    )
    child = tmp_path / "child.yaml"
    child.write_text(
        "schema: 1\nid: child\ntitle: Child\nextends: base\nconfig: {b: 3, c: h}\nkeys: {u: w}\ndrop: {q: also}\n"
        "prefixes: [m.]\n"
    )
    family = load_family_file(child)
    assert family.extends == "base"
    assert dict(family.config) == {"a": "h", "b": 3, "c": "h"}
    assert dict(family.let) == {"h": 1}
    assert dict(family.keys) == {"x": "y", "u": "w"}
    assert dict(family.drop) == {"p": "why", "q": "also"}
    assert family.prefixes == ("m.",)
    assert list(family.variants) == ["v"]
    assert {link.terms[0].model: link.files[0] for link in family.key_map.links(["y", "w"])} == {"y": "x", "w": "u"}
    assert load_family_file(tmp_path / "base.yaml").digest != family.digest


def test_mistakes_of_a_family_that_extends_another_are_found_in_the_file_that_makes_them(tmp_path: Path) -> None:
    base = write_family(tmp_path, "base", more="let: {h: 1}\nconfig:\n  a: 1\n  b: h\n")
    child = tmp_path / "child.yaml"
    head = "schema: 1\nid: child\ntitle: Child\nextends: base\n"
    child.write_text(head + "config:\n  a: k\n")
    with pytest.raises(FamilyFileError, match="the name 'k'") as caught:
        load_family_file(child)
    assert caught.value.path == f"{child}:6"
    base.write_text(base.read_text().replace("b: h", "b: hh"))
    child.write_text(head)
    with pytest.raises(FamilyFileError, match="the name 'hh'") as caught:
        load_family_file(child)
    assert caught.value.path == f"{base}:16"


def test_only_one_level_is_extended(tmp_path: Path) -> None:
    write_family(tmp_path, "base")
    for name, base in (("middle", "base"), ("top", "middle")):
        (tmp_path / f"{name}.yaml").write_text(f"schema: 1\nid: {name}\ntitle: T\nextends: {base}\n")
    assert load_family_file(tmp_path / "middle.yaml").model == "diffusers.SomeModel"
    with pytest.raises(FamilyFileError, match="'middle' extends 'base' itself") as caught:
        load_family_file(tmp_path / "top.yaml")
    assert (caught.value.line, caught.value.field) == (4, "extends")


def test_a_family_needs_an_id_of_its_own(tmp_path: Path) -> None:
    write_family(tmp_path, "base")
    (tmp_path / "child.yaml").write_text("schema: 1\ntitle: T\nextends: base\n")
    with pytest.raises(FamilyFileError, match=r"in a file called child\.yaml"):
        load_family_file(tmp_path / "child.yaml")
