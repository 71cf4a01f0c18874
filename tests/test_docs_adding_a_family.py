"""The way to a new family file, step by step as the document shows it, in a catalogue that lacks the family."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import record_header
import yaml
from click.testing import CliRunner

import slipcast
from slipcast.registry import catalogue
from slipcast.registry.errors import UnsupportedFileError
from slipcast.registry.family import Family
from support.command_line import output_of, run
from support.documents import Shown, blocks, shown_commands, text_of
from support.recorded import DATA, recorded, write_checkpoint

DOCUMENT = "adding-a-family.md"
HEADER = "ideogram4--bf16-native"
EXCERPT, FINISHED = blocks(DOCUMENT, "yaml")
FILE = Path("my-families/my-model.yaml")


def the(beginning: str) -> Shown:
    """The one command line that is shown and begins so."""
    (shown,) = (shown for shown in shown_commands(DOCUMENT) if shown.command.startswith(beginning))
    return shown


NEW, CHECK, INSPECT = the("slipcast new"), the("slipcast check"), the("slipcast inspect")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(recorded(HEADER), tmp_path_factory.mktemp("checkpoint") / "model.safetensors")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the checkpoint, where the family of the example is not known."""
    model = yaml.safe_load(FINISHED)["model"]
    families = catalogue.load_catalogue()
    known = families.without({id_ for id_, family in families.items() if family.model == model})
    monkeypatch.setattr(catalogue, "_builtin", lambda: known)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("model.safetensors").symlink_to(checkpoint)
    FILE.parent.mkdir()
    return tmp_path


@pytest.fixture
def finished(folder: Path) -> Path:
    FILE.write_text(FINISHED, encoding="utf-8")
    return FILE


def steady(text: str) -> str:
    """A text without what new records and other processors change."""
    text = re.sub(r"\d+ other headers", "N other headers", text)
    return re.sub(r"(storage|compute) 0\.\d+", r"\1 0.N", text)


def printed(shown: Shown) -> str:
    return output_of(*shown.arguments).strip()


def test_the_draft_is_what_is_shown(folder: Path) -> None:
    assert printed(NEW) == NEW.output
    draft = iter(FILE.read_text(encoding="utf-8").splitlines())
    for line in EXCERPT.splitlines():
        assert line in draft, line  # takes lines up to it: they are there in this order


def test_the_names_of_the_class_are_printed() -> None:
    code = shlex.split(the("python -c").command)[-1]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})  # the document's own line
    assert "layers.0.attention.to_out.0.weight" in out.getvalue().splitlines()


def test_the_finished_file_is_proven_as_is_shown(finished: Path) -> None:
    assert steady(printed(CHECK)) == steady(CHECK.output)


def test_a_mistake_is_found_as_is_shown(finished: Path) -> None:
    (failure,) = (block for block in blocks(DOCUMENT, "console") if block.startswith("  failed"))
    finished.write_text(FINISHED.replace("[t_embedding]", "[t_embedder]"), encoding="utf-8")
    result = run(*CHECK.arguments)
    assert result.exit_code == 1
    assert failure in result.stdout


def test_the_family_is_used_as_is_shown(finished: Path) -> None:
    assert printed(INSPECT) == INSPECT.output
    plan = slipcast.plan("model.safetensors", families=["my-families"], device="cpu", fp8="storage")
    assert plan.origin.family == "my-model"
    assert plan.precisions["fp8"] > 200
    suggested = re.search(r"^  (slipcast inspect .*)$", NEW.output, re.MULTILINE)
    assert suggested is not None
    assert output_of(*shlex.split(suggested[1])[1:]).strip() == INSPECT.output


def test_the_header_is_recorded_as_it_is(folder: Path) -> None:
    program, script, *arguments = shlex.split(the("python tests/").command)
    assert (program, script) == ("python", "tests/record_header.py")
    result = CliRunner().invoke(record_header.main, [*arguments, "--out", "."], standalone_mode=False)
    assert result.exception is None
    written = json.loads(Path("my-model--bf16.json").read_text(encoding="utf-8"))
    original = json.loads((DATA / "headers" / f"{HEADER}.json").read_text(encoding="utf-8"))
    assert written["source"] == "PUBLISHER/REPOSITORY model.safetensors"
    assert {key: written[key] for key in ("metadata", "sha256", "tensors")} == {
        key: original[key] for key in ("metadata", "sha256", "tensors")
    }
    again = CliRunner().invoke(record_header.main, [*arguments, "--out", "."], standalone_mode=False)
    assert isinstance(again.exception, UnsupportedFileError)
    assert again.exception.found == "the file is there already"


def test_a_pipeline_is_not_one_header(folder: Path) -> None:
    for name in ("transformer", "vae"):
        Path("pipeline", name).mkdir(parents=True)
        write_checkpoint({"a.weight": ("F32", (2, 2))}, Path("pipeline", name, "model.safetensors"))
    Path("pipeline/model_index.json").write_text('{"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}')
    arguments = ["pipeline", "name", "--source", "somewhere", "--out", "."]
    result = CliRunner().invoke(record_header.main, arguments, standalone_mode=False)
    assert isinstance(result.exception, UnsupportedFileError)
    assert "2 models" in result.exception.found
    assert "one model" in result.exception.expected
    assert "folder of one" in result.exception.hint
    assert not Path("name.json").exists()


def test_every_section_of_a_family_file_is_explained() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| \S.*\|$", text_of(DOCUMENT), re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    sections = [field.alias or name for name, field in Family.model_fields.items()]
    assert sorted(explained) == sorted(set(sections) - {"schema"})
    assert list(yaml.safe_load(FINISHED)) == [name for name in sections if name in yaml.safe_load(FINISHED)]
