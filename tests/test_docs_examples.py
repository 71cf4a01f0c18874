"""What the documents show can be done: every command line runs, and every example in Python prints what it says."""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
from pathlib import Path

import pytest

from slipcast.demo.run import CHECKPOINT
from slipcast.registry.catalogue import load_catalogue
from support.command_line import output_of
from support.documents import DOCS, command_lines

DOCUMENTS = sorted(path.name for path in DOCS.glob("*.md"))
PLACEHOLDERS = {
    "PATH": "model.safetensors",
    "ID": next(iter(load_catalogue())),
    "KEY": "fp8.mode",
    "slipcast explain FILE": "slipcast explain model.safetensors",
    "--plan FILE": "--plan plan.json",
    "~/families": "families",
}
NOT_RUN_HERE = {
    "slipcast": "the name of the program",
    "slipcast inspect": "a command's name in a sentence",
    "slipcast plan": "a command's name in a sentence",
    "slipcast check": "proves every family: the gate runs it by itself",
    "slipcast check --all": "proves every family: the gate runs it by itself",
    "slipcast demo": "draws pictures: test_demo.py",
    "slipcast demo --device cpu --set dtype=float32 --out digits.png": "draws pictures: test_demo.py",
    "slipcast check families/my-family.yaml --headers tests/data/headers": "test_docs_adding_a_family.py",
    "slipcast new model.safetensors --id my-model": "test_docs_adding_a_family.py",
}
WALK = "adding-a-family.md"
"""Its commands run one after another, on another checkpoint, in a test of their own."""

NEEDS_A_PIPELINE = ("slipcast generate", "slipcast bench")
"""What needs text encoders and a VAE besides: test_cli_generate.py, test_cli_bench.py."""

SHOWN = {line for name in DOCUMENTS if name != WALK for line in command_lines(name)}
LINES = sorted(line for line in SHOWN - NOT_RUN_HERE.keys() if not line.startswith(NEEDS_A_PIPELINE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the things that the documents' command lines name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shutil.copy(CHECKPOINT, "model.safetensors")
    (tmp_path / "families").mkdir()
    return tmp_path


def prepare(line: str) -> None:
    """Make what a command line reads besides the checkpoint."""
    if "plan.json" in line and ">" not in line:
        Path("plan.json").write_text(output_of("plan", "model.safetensors", "--json"), encoding="utf-8")
    if "convert small.safetensors" in line:
        output_of("convert", "model.safetensors", "small.safetensors", "--format", "fp8_scaled")
    if "transformer model.safetensors" in line or "pipeline/" in line:
        output_of("convert", "model.safetensors", "transformer", "--layout", "diffusers")
        Path("model.safetensors").unlink()
    if "pipeline/" in line:
        Path("pipeline").mkdir()
        Path("transformer").rename("pipeline/transformer")
        Path("pipeline/model_index.json").write_text('{"transformer": ["diffusers", "Any"]}')
    if "ComfyUI/models/" in line:
        Path("ComfyUI/models/diffusion_models").mkdir(parents=True)
        Path("model.safetensors").rename("ComfyUI/models/diffusion_models/model.safetensors")


def filled(line: str) -> str:
    """A command line with its placeholders replaced."""
    for placeholder, value in PLACEHOLDERS.items():
        line = re.sub(rf"(?<![\w./]){re.escape(placeholder)}(?!\w)", value, line)
    return line


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_runs(folder: Path, line: str) -> None:
    line = filled(line)
    prepare(line)
    command, _, target = line.partition(" > ")
    output = output_of(*shlex.split(command)[1:])
    assert output
    if target:
        Path(target).write_text(output, encoding="utf-8")
        assert output_of("load", "model.safetensors", "--plan", target).endswith("The outcome is what was planned.\n")


def test_command_lines_are_found_and_the_exceptions_still_stand() -> None:
    assert len(LINES) > 15
    everywhere = {line for name in [*DOCUMENTS] for line in command_lines(name)}
    assert NOT_RUN_HERE.keys() - {"slipcast"} <= everywhere
    assert not [line for line in map(filled, LINES) if re.search(r"\b[A-Z]{2,}\b", line.replace("ComfyUI", ""))]


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if ">>>" in (DOCS / name).read_text(encoding="utf-8")])
def test_examples_in_python_print_what_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    result = doctest.testfile(str(DOCS / name), module_relative=False, encoding="utf-8")
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", (DOCS / name).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
