"""``slipcast new`` as users and programs meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import json_of, output_of, run
from support.recorded import recorded, write_checkpoint

STRANGE = {
    "net.strange_head.weight": ("BF16", (8, 4)),
    "net.time_in.weight": ("BF16", (8, 8)),
    "net.blocks.0.qkv.weight": ("BF16", (24, 8)),
}
"""Of no model that there is."""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(STRANGE, tmp_path / "model.safetensors")


def test_the_drafted_family_recognises_the_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    assert json_of("inspect", checkpoint, exit_code=2)["error"] == "IdentificationError"
    drafted = json_of("new", checkpoint, "--id", "mine")
    assert (drafted["file"], drafted["prefixes"]) == ("mine.yaml", ["net.", ""])
    assert drafted["evidence"] == ["strange_head.weight"]
    assert drafted["inseparable"] == []
    assert json_of("inspect", checkpoint, "--set", "families=[.]")["family"] == "mine"


def test_a_record_that_has_all_of_its_names_is_named(tmp_path: Path, checkpoint: Path) -> None:
    record = {"metadata": {}, "tensors": {name: [dtype, list(shape)] for name, (dtype, shape) in STRANGE.items()}}
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "strange.json").write_text(json.dumps(record))
    assert json_of("new", checkpoint, "--id", "mine", "--headers", "headers")["inseparable"] == ["header strange"]


def test_a_kind_with_a_folder_of_its_own(tmp_path: Path, checkpoint: Path) -> None:
    shown = output_of("new", checkpoint, "--id", "mine", "--kind", "vae", "--model", "diffusers.AutoencoderKL")
    assert (tmp_path / "vaes" / "mine.yaml").is_file()
    assert "diffusers.AutoencoderKL" in shown
    assert json_of("inspect", checkpoint, "--set", "families=[.]")["components"][0]["kind"] == "vae"


def test_nothing_is_replaced(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    assert json_of("new", checkpoint, "--id", "mine", exit_code=2)["error"] == "UnsupportedFileError"
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_the_file_is_called_as_the_id_is(tmp_path: Path, checkpoint: Path) -> None:
    error = json_of("new", checkpoint, "--id", "mine", "--out", tmp_path / "other.yaml", exit_code=2)
    assert (error["error"], "mine.yaml" in error["hint"]) == ("SettingsError", True)
    json_of("new", checkpoint, "--id", "mine", "--out", tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").is_file()


def test_of_a_pipeline_the_component_that_nobody_claims(tmp_path: Path, checkpoint: Path) -> None:
    pipeline = tmp_path / "pipeline"
    for name, record in (("transformer", recorded("z-image--turbo-diffusers")), ("vae", STRANGE), ("other", STRANGE)):
        (pipeline / name).mkdir(parents=True)
        write_checkpoint(record, pipeline / name / "model.safetensors", blocks=1)
    classes = '{"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"], "other": ["diffusers", "C"]}'
    (pipeline / "model_index.json").write_text(classes)
    error = json_of("new", pipeline, "--id", "mine", exit_code=2)
    assert error["items"] == ["other", "vae"]
    assert json_of("new", pipeline, "--id", "mine", "--set", "component=vae")["evidence"] == ["strange_head.weight"]


def test_drafting_needs_no_torch(checkpoint: Path) -> None:
    program = (
        "import sys\nfrom slipcast.cli.application import application\n"
        f"try:\n    application.main(['new', {str(checkpoint)!r}, '--id', 'mine', '--json'])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("diffusers.ZImageTransformer2DModl", "did you mean diffusers.ZImageTransformer2DModel?"),
        ("transformers.ZImageTransformer2DModel", "correct --model, install the version of transformers that has it"),
        ("diffusers.FluxPipeline", "leave it out to fill it in later"),
    ],
)
def test_a_class_that_the_library_has_not_is_refused(checkpoint: Path, model: str, hint: str) -> None:
    shown = run("new", checkpoint, "--id", "mine", "--model", model)
    assert shown.exit_code == 2
    message = " ".join(shown.stderr.split())
    assert f"the model class '{model}', which the installed {model.partition('.')[0]} does not have" in message
    assert hint in message
    assert not Path("mine.yaml").exists()


def test_a_draft_that_nobody_filled_in_fails_the_check(checkpoint: Path) -> None:
    output_of("new", checkpoint, "--id", "mine")
    checked = json_of("check", "mine.yaml", exit_code=1)
    (family,) = checked["families"]
    proofs = {proof["name"]: proof for proof in family["proofs"]}
    assert {name for name, proof in proofs.items() if proof["status"] == "failed"} == {"filled in", "class"}
    assert {name for name, proof in proofs.items() if proof["status"] == "ok"} == {
        "key map",
        "names",
        "others",
        "parts",
    }
    lines = Path("mine.yaml").read_text(encoding="utf-8").splitlines()
    marked = [f"line {number}: {' '.join(line.split())}" for number, line in enumerate(lines, 1) if "TODO" in line]
    assert proofs["filled in"]["error"]["items"] == marked
    assert any("model: diffusers.TODO" in line for line in marked)
    assert f"{len(marked)} lines marked TODO" in proofs["filled in"]["detail"]
    assert "model: the model class 'diffusers.TODO'" in proofs["class"]["detail"]
    assert "line 4: title: mine" in run("check", "mine.yaml").stdout


def test_a_file_without_examples_is_told_what_would_prove_it(checkpoint: Path) -> None:
    output_of("new", checkpoint, "--id", "mine", "--model", "diffusers.ZImageTransformer2DModel")
    text = Path("mine.yaml").read_text(encoding="utf-8").replace("TODO", "")
    Path("mine.yaml").write_text(text, encoding="utf-8")
    (family,) = json_of("check", "mine.yaml")["families"]
    details = {proof["name"]: proof["detail"] for proof in family["proofs"] if proof["status"] == "skipped"}
    neither = "the family file has neither examples nor a section tiny, which needs no recorded header"
    assert {name for name, detail in details.items() if detail == neither} == {
        "class",
        "patterns",
        "rules",
        "layout",
        "blocks",
        "dtypes",
    }
    assert "they come once a header is recorded" in details["recognised"]
