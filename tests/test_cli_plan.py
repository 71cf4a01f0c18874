"""``slipcast plan``: the contract of its JSON, and its text."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from safetensors.torch import save_file

from slipcast import api
from slipcast.registry.errors import HeaderError
from support.command_line import json_of, output_of, run
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import natively, tiny_tensors, write_native

PREFIX = "model.diffusion_model."
KEPT = {"t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def model(folder):
    return write_native(folder / "model.safetensors", tiny_tensors(), prefix=PREFIX)


def rows_of(text, heading):
    """The rows of a table under a heading, by their first cell."""
    section = text.split(f"\n{heading}", 1)[1].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"  +", line.strip()) for line in section]
    return {row[0]: row[1:] for row in cells}


def test_the_contract(model):
    plan = json_of("plan", model, "--set", "fp8=storage", "--set", "dtype=bfloat16", "--device", "cpu")
    for name in ("device", "dtype", "fp8", "fp8.remainder", "mmap"):
        assert set(plan["settings"][name]) == {"requested", "engaged", "reason"}
    assert plan["settings"]["fp8"] == {"requested": "storage", "engaged": "storage", "reason": "as requested"}
    assert {"resident", "device_peak", "host_peak_anonymous"} <= plan["bytes"].keys()
    assert plan["modules"]["layers.0.attention.to_q"] == "fp8"
    assert {path for path in KEPT if plan["modules"][path] == "bfloat16"} == KEPT
    assert (plan["dropped"], plan["folded"], plan["synthesised"]) == ({}, {}, {})


def test_the_prediction_of_the_published_file(folder):
    path = write_checkpoint(recorded("z-image-turbo--comfy-bf16"), folder / "z-image-turbo.safetensors")
    plan = json_of("plan", path, "--set", "fp8=storage", "--set", "dtype=bfloat16")
    assert plan["bytes"]["resident"] / 2**20 == pytest.approx(5880, rel=0.005)


def test_what_people_read(model):
    text = output_of("plan", model, "-s", "fp8=storage", "-s", "dtype=bfloat16", "--device", "cpu")
    plan = json_of("plan", model, "-s", "fp8=storage", "-s", "dtype=bfloat16", "--device", "cpu")
    title = text.splitlines()[0]
    assert title == "z-image, variant base: diffusers.ZImageTransformer2DModel on cpu, computed in bfloat16"
    assert rows_of(text, "Settings")["fp8"] == ["storage", "storage", "as requested"]
    size = plan["bytes"]["resident"]
    assert rows_of(text, "Bytes")["resident"] == [f"{size / 2**20:.1f}", f"{size:,}"]
    assert "device peak" not in rows_of(text, "Bytes")
    modules = rows_of(text, "Modules")
    assert modules["layers.{0…2}.attention.to_q"] == ["3 × fp8", "Linear"]
    assert modules["layers.{0…2}.attention_norm1"] == ["3 × bfloat16", "RMSNorm"]
    assert rows_of(text, "Kept from quantisation")["t_embedder.mlp.{0,2}"] == [
        "2 × bfloat16",
        "the family keeps its time embedding unquantised: the forward looks at its weight's dtype",
    ]
    assert "Verdict" not in text


def test_the_peak_of_a_device_that_has_memory_of_its_own(model):
    assert "device peak" in rows_of(output_of("plan", model, "--device", "cuda:8.6,12GiB"), "Bytes")


@pytest.mark.parametrize(("count", "said"), [(1, "1 side tensor"), (2, "2 side tensors")])
def test_side_tensors_are_counted(folder, count, said):
    codes = {f"layers.{index}.feed_forward.w2" for index in range(count)}
    tensors = natively(tiny_tensors())
    for name in codes:
        tensors |= {
            f"{name}.weight": tensors[f"{name}.weight"].to(torch.float8_e4m3fn),
            f"{name}.scale_weight": torch.ones(1),
        }
    save_file(tensors, folder / "model.safetensors")
    text = output_of("plan", folder / "model.safetensors")
    assert re.search(rf"^  tensors +\d+ loaded, {said}$", text, re.MULTILINE)


def test_every_module_stands_in_the_table(model):
    text = output_of("plan", model, "-s", "fp8=storage")
    counts = [int(cells[0].split(" × ")[0]) for cells in rows_of(text, "Modules").values()]
    assert sum(counts) == len(json_of("plan", model, "-s", "fp8=storage")["modules"])


def test_what_is_dropped_is_named_with_its_reason(folder):
    tensors = tiny_tensors()
    more = {f"odd.{index}.weight": tensors["cap_pad_token"].clone() for index in range(4)}
    norm = {"norm_final.weight": tensors["cap_embedder.0.weight"].clone()}
    path = write_native(folder / "model.safetensors", tensors | more | norm)
    plan = json_of("plan", path, "--set", "unexpected=[odd.*]")
    passed = "left over; the setting unexpected lets it pass"
    dropped = {f"odd.{index}.weight": passed for index in range(4)}
    dropped["norm_final.weight"] = "the norm has no weight in the model class"
    assert plan["dropped"] == dropped
    text = output_of("plan", path, "--set", "unexpected=[odd.*]")
    rows = rows_of(text, "Dropped from the file")
    assert rows["odd.{0…3}.weight"] == ["4", passed]
    assert rows["norm_final.weight"] == ["1", "the norm has no weight in the model class"]


@pytest.mark.parametrize(
    ("device", "fits"), [("cuda:8.6,24GiB", True), ("cuda:8.6,517MiB", True), ("cuda:8.6,513MiB", False)]
)
def test_a_card_that_is_not_there(model, device, fits):
    plan = json_of("plan", model, "--device", device)
    assert plan["verdict"]["fits"] is fits
    text = output_of("plan", model, "--device", device)
    assert f"Verdict: the weights {'fit' if fits else 'do not fit'}" in text
    assert plan["verdict"]["advice"] in text


def test_a_settings_file_of_the_call(folder, model):
    (folder / "mine.yaml").write_text("fp8: storage\n")
    (folder / "slipcast.yaml").write_text("fp8: compute\n")
    assert json_of("plan", model, "--config", "mine.yaml")["settings"]["fp8"]["requested"] == "storage"
    assert json_of("plan", model)["settings"]["fp8"]["requested"] == "compute"


def test_the_call_wins_over_its_settings_file(folder, model):
    (folder / "mine.yaml").write_text("fp8: storage\n")
    plan = json_of("plan", model, "--config", "mine.yaml", "--set", "fp8=off")
    assert plan["settings"]["fp8"]["requested"] == "off"


def test_what_a_kept_layer_costs_and_why_it_is_kept(folder):
    path = write_checkpoint(recorded("te-t5xxl--comfy-fp8-raw"), folder / "t5.safetensors")
    plan = json_of("plan", path)
    why = "the family keeps it unquantised: the forward casts its input to its weight's dtype"
    text = output_of("plan", path)
    assert rows_of(text, "Kept from quantisation")["encoder.block.{0…23}.layer.1.DenseReluDense.wo"][1] == why
    more = plan["bytes"]["resident"] - plan["bytes"]["read"]
    (note,) = plan["notes"]
    assert note.startswith(
        f"{len(plan['folded'])} tensors in the file's codes can't stay in them, and take {more / 2**20:,.0f} MiB"
    )
    assert f"  notes    {note}" in text
    assert json_of("plan", path, "--set", "fp8=off")["notes"] == []


def test_settings_of_pipelines_are_named_as_having_no_bearing_on_a_single_model(model):
    given = ("--set", "memory=low", "--set", "text_encoder=fp8", "--set", "vae.tiling=off", "--set", "speed=off")
    plain = json_of("plan", model, "--set", "fp8=storage")["notes"]
    *others, note = json_of("plan", model, *given, "--set", "fp8=storage")["notes"]
    assert others == plain
    named, _, instead = note.partition("; ")
    assert set(named.partition(": ")[2].split(", ")) == {"memory", "text_encoder", "vae.tiling", "speed"}
    assert "'slipcast generate PATH --dry-run' plans the whole pipeline" in instead
    assert "no bearing on the plan of a single model" in output_of("plan", model, *given)


def test_the_verdict_comes_first_and_says_that_activations_are_not_counted(model):
    wide, narrow = (output_of("plan", model, "--device", f"cuda:8.6,{size}") for size in ("24GiB", "1GiB"))
    assert wide.splitlines()[1] == narrow.splitlines()[1] == "Verdict: the weights fit"
    assert re.search(r"^  so +[\d,]+ MiB are left for activations, which are not counted$", wide, re.MULTILINE)
    assert re.search(r"^  so +\d+ MiB are left for activations, which are not counted: they may", narrow, re.MULTILINE)


def test_scales_that_no_product_takes_are_one_row(folder):
    path = write_checkpoint(recorded("flux1-dev--comfyanonymous-fp8-scaled-test"), folder / "model.safetensors")
    rows = rows_of(output_of("plan", path), "Dropped from the file")
    assert rows["model.diffusion_model.double_blocks.{0…18}.img_mlp.{0,2}.scale_input"][0] == "38"
    assert len(rows) < 25 < len(json_of("plan", path)["dropped"])


@pytest.mark.parametrize("module", ["diffusers.models.embeddings", "mine"])
def test_deprecations_of_model_libraries_are_kept_off_the_terminal(monkeypatch, module):
    def plan(path, **settings):
        warnings.warn_explicit("old", FutureWarning, "x.py", 1, module=module)
        raise HeaderError("odd", expected="even", hint="halve")

    monkeypatch.setattr(api, "plan", plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("plan", "x.safetensors")
    assert [str(warning.message) for warning in caught] == ([] if module.startswith("diffusers") else ["old"])
