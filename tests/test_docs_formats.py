"""The tables of formats say what plans say, and the checkpoints that they are made of are what they are called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import safe_open

import slipcast
from slipcast.cli import docs_formats
from slipcast.cli.docs_formats import DEVICES, MODES, Outcome, formats_table
from slipcast.cli.made_up_checkpoints import FORMATS, FileFormat, Outline, outline, write_checkpoint
from slipcast.demo.run import CHECKPOINT
from slipcast.engine.planner import LOADABLE_FORMATS, make_plan
from slipcast.engine.wanted import SCALES
from slipcast.registry.inspection import identify_path
from slipcast.registry.settings import resolve_settings
from support.command_line import json_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
BY_TITLE = {format_.title: format_ for format_ in FORMATS}


def tables() -> list[list[list[str]]]:
    """The tables of the document, as rows of cells without their rulers."""
    blocks = re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()] for block in blocks
    ]


RECOGNITION, DECISIONS = tables()
REASONS = dict(re.findall(r"^(\d+)\. (.*)$", TEXT, re.MULTILINE))


def cell(title: str, column: str) -> tuple[str, str]:
    """What the table, which another test holds to be current, says; and the reason."""
    (row,) = [row for row in DECISIONS[2:] if row[0] == title]
    text = row[DECISIONS[0].index(column)]
    found = re.fullmatch(r"(.*?)(?: \((\d)\))?", text)
    assert found is not None
    return found[1], REASONS[found[2]] if found[2] else ""


def test_columns_are_split_only_where_devices_differ() -> None:
    assert DECISIONS[0] == [
        "file",
        "`auto`",
        "`off`",
        "`storage`",
        "`compute` on cpu, 8.9, 9.0, 10.0",
        "`compute` on 8.6",
    ]
    assert [row[0] for row in DECISIONS[2:]] == list(BY_TITLE)
    assert tuple(MODES) == ("auto", "off", "storage", "compute")


def test_every_loadable_format_has_rows() -> None:
    assert {format_.name for format_ in FORMATS} == LOADABLE_FORMATS


@pytest.mark.parametrize("title", BY_TITLE)
def test_off_takes_every_format_out_of_its_codes(title: str) -> None:
    assert cell(title, "`off`") == ("off: compute dtype", "")


@pytest.mark.parametrize(
    "title", [title for title, format_ in BY_TITLE.items() if format_.name not in ("plain", "fp8_scaled", "fp8_raw")]
)
@pytest.mark.parametrize("column", ["`auto`", "`storage`", *DECISIONS[0][4:]])
def test_other_codes_are_kept_and_never_quantised_again(title: str, column: str) -> None:
    text, reason = cell(title, column)
    codec = BY_TITLE[title].codec
    assert codec is not None
    assert text == f"keep: `{codec.name}`"
    assert reason == "the file's weights are quantised already (*format*) and stay as they are"


@pytest.mark.parametrize("reach", ["one scale for each weight", "a scale for each row"])
def test_scaled_fp8_is_kept_and_multiplied_where_asked(reach: str) -> None:
    title = f"fp8_scaled, e4m3, {reach}"
    codec = BY_TITLE[title].codec
    assert codec is not None
    assert cell(title, "`auto`") == (f"storage: `{codec.name}`", "the file's fp8 weights are kept as they are")
    assert cell(title, "`storage`") == (f"storage: `{codec.name}`", "")
    assert cell(title, DECISIONS[0][4]) == (f"compute: `{codec.name}` × fp8", "")
    text, reason = cell(title, DECISIONS[0][5])
    assert text == f"storage: `{codec.name}`"
    assert "compute capability 8.6, where fp8 needs 8.9" in reason


@pytest.mark.parametrize(
    ("title", "why"),
    [
        ("fp8_scaled, e4m3, scales of blocks in a row", "its scales are of blocks"),
        ("fp8_scaled, e4m3, marked for full precision", "its producer marks it for products in full precision"),
    ],
)
def test_layers_that_can_not_multiply_in_fp8_say_why(title: str, why: str) -> None:
    text, reason = cell(title, DECISIONS[0][4])
    assert text.startswith("storage: ")
    assert "×" not in text
    assert why in reason


@pytest.mark.parametrize("column", ["`auto`", "`storage`", *DECISIONS[0][4:]])
def test_e5m2_is_folded_with_the_reason(column: str) -> None:
    text, reason = cell("fp8_scaled, e5m2", column)
    assert text == "off: compute dtype"
    assert "its codes are e5m2" in reason


def test_a_plain_file_is_quantised_only_on_request() -> None:
    assert cell("plain, bf16", "`auto`") == ("off: compute dtype", "the file holds no fp8 weights")
    assert cell("plain, bf16", "`storage`") == ("storage: `float8_e4m3fn/row`", "")


def test_the_other_table_has_every_format_of_the_contract() -> None:
    contract = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    named = re.search(r"The formats are (.*?)\. The kinds", contract, re.DOTALL)
    assert named is not None
    loads = {name: row[2] for row in RECOGNITION[2:] for name in re.findall(r"`(\w+)`", row[0])}
    assert list(loads) == re.findall(r"`(\w+)`", named[1])
    assert {name for name, text in loads.items() if text != "refused"} == LOADABLE_FORMATS


def test_what_is_written_is_what_convert_takes() -> None:
    written = {name for row in RECOGNITION[2:] if row[4] for name in re.findall(r"`(\w+)`", row[0])}
    assert written - {"plain"} == set(SCALES)


def test_the_types_of_gguf_are_those_that_decode() -> None:
    from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES

    (row,) = [row for row in RECOGNITION[2:] if row[0] == "`gguf`"]
    assert set(row[2].split()) == {"F32", "F16", "BF16", *BLOCK_TYPES}


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    nowhere = tmp_path_factory.mktemp("nowhere")
    call = {"device": "cpu", "fp8": "storage"}
    settings = resolve_settings(call, environ={}, cwd=nowhere, user_folder=nowhere).values
    plain = identify_path(CHECKPOINT, settings).main
    return outline(plain, make_plan(plain, settings))


def test_the_outline_has_one_block_of_each_kind(of: Outline) -> None:
    names = {name.removeprefix("model.diffusion_model.") for name in of.tensors}
    blocks = {
        name.rsplit(".", 1)[0][: name.index(".0.") + 2]
        for name in names
        if re.match(r"(layers|\w+_refiner)\.0\.", name)
    }
    assert blocks == {"layers.0", "noise_refiner.0", "context_refiner.0"}
    assert not any(re.match(r"(layers|\w+_refiner)\.[1-9]", name) for name in names)
    assert "model.diffusion_model.layers.0.attention.qkv.weight" in of.layers
    assert "model.diffusion_model.t_embedder.mlp.0.weight" in of.tensors.keys() - of.layers
    assert {f"layers.0.attention.to_{part}" for part in "qkv"} < set(of.modules)


@pytest.mark.parametrize(
    "format_", [format_ for format_ in FORMATS if format_.name != "gguf"], ids=lambda format_: format_.title
)
def test_made_up_files_are_files_to_others(of: Outline, format_: FileFormat, tmp_path: Path) -> None:
    path = write_checkpoint(of, format_, tmp_path)
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        assert of.tensors.keys() <= names
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in of.tensors.keys() - of.layers}
    assert shapes == {name: of.tensors[name][1] for name in shapes}
    assert format_.codec is None or format_.name == "fp8_raw" or len(names) > len(of.tensors)
    counts = json_of("inspect", path)["formats"]
    assert counts[format_.name] == (len(of.tensors) if format_.codec is None else len(of.layers))


def test_the_made_up_gguf_is_one_to_the_reference_reader(of: Outline, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_checkpoint(of, BY_TITLE["gguf, Q8_0"], tmp_path)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert read.keys() == of.tensors.keys()
    for name, (_, shape) in of.tensors.items():
        assert tuple(reversed(read[name].shape.tolist())) == shape
        assert (read[name].tensor_type.name == "Q8_0") is (name in of.layers)


def test_a_cell_is_what_the_public_plan_says(of: Outline, tmp_path: Path) -> None:
    path = write_checkpoint(of, BY_TITLE["int8_convrot"], tmp_path)
    plan = slipcast.plan(path, device=DEVICES["9.0"], dtype="bfloat16", fp8="compute")
    assert plan.settings["fp8"].engaged == "keep"
    assert {module.codec for module in plan.modules if module.path in of.modules} == {"int8/row/convrot64"}


def test_the_users_own_settings_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docs_formats, "FORMATS", (BY_TITLE["plain, bf16"],))
    monkeypatch.setattr(docs_formats, "DEVICES", {"8.6": DEVICES["8.6"]})
    expected = formats_table()
    (tmp_path / "slipcast.yaml").write_text("family: another\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPCAST_FP8__REMAINDER", "nonsense")
    assert formats_table() == expected


def test_equal_devices_share_a_column_and_equal_reasons_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = (FileFormat("one", "plain", None), FileFormat("two", "plain", None))
    devices = {"a": "cpu", "b": "cpu", "c": "cpu"}
    other = {("two", "storage", "b"): Outcome("y", "second"), ("two", "off", "a"): Outcome("z", "first")}
    outcomes = {
        (format_.title, mode, device): other.get(
            (format_.title, mode, device), Outcome("x", "first" if mode == "off" else "")
        )
        for format_ in formats
        for mode in ("off", "storage")
        for device in devices
    }
    monkeypatch.setattr(docs_formats, "FORMATS", formats)
    monkeypatch.setattr(docs_formats, "DEVICES", devices)
    monkeypatch.setattr(docs_formats, "MODES", ("off", "storage"))
    monkeypatch.setattr(docs_formats, "plan_all", lambda: outcomes)
    assert formats_table().splitlines() == [
        "| file | `off` on a | `off` on b, c | `storage` on a, c | `storage` on b |",
        "| --- | --- | --- | --- | --- |",
        "| one | x (1) | x (1) | x | x |",
        "| two | z (1) | x (1) | x | y (2) |",
        "",
        "1. first",
        "2. second",
    ]
