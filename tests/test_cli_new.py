"""``slipcast new`` as users and programs meet it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import json_of, output_of
from support.recorded import recorded, write_checkpoint

KREA = "krea2--raw-native"


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(recorded(KREA), tmp_path / "model.safetensors", blocks=1)


def test_the_drafted_family_recognises_the_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    assert json_of("inspect", checkpoint, exit_code=2)["error"] == "IdentificationError"
    drafted = json_of("new", checkpoint, "--id", "mine")
    assert drafted["file"] == "mine.yaml"
    assert drafted["evidence"] == ["first.weight"]
    assert f"header {KREA}" in drafted["inseparable"]
    assert json_of("inspect", checkpoint, "--set", "families=[.]")["family"] == "mine"


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
    for name, record in (("transformer", "z-image--turbo-diffusers"), ("vae", KREA), ("other", KREA)):
        (pipeline / name).mkdir(parents=True)
        write_checkpoint(recorded(record), pipeline / name / "model.safetensors", blocks=1)
    classes = '{"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"], "other": ["diffusers", "C"]}'
    (pipeline / "model_index.json").write_text(classes)
    error = json_of("new", pipeline, "--id", "mine", exit_code=2)
    assert error["items"] == ["other", "vae"]
    assert json_of("new", pipeline, "--id", "mine", "--set", "component=vae")["evidence"] == ["first.weight"]


def test_drafting_needs_no_torch(checkpoint: Path) -> None:
    program = (
        "import sys\nfrom slipcast.cli.application import application\n"
        f"try:\n    application.main(['new', {str(checkpoint)!r}, '--id', 'mine', '--json'])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"
