"""The generated parts of the documents are current, and writing them touches nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipcast.cli import docs_tables
from slipcast.cli.docs_tables import DOCUMENTS, current, families_table, main, outdated, settings_table
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import UnsupportedFileError
from slipcast.registry.settings import resolve_settings, setting_names

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - {"docs/evidence.md"}))  # that one "make check" holds
def test_documents_are_current(document):
    assert current(ROOT / document, DOCUMENTS[document]) == (ROOT / document).read_text(encoding="utf-8")


def test_every_generated_part_has_a_generator():
    marked = {
        (f"docs/{path.name}", name)
        for path in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"<!-- (\w+): written by 'make docs' -->", path.read_text(encoding="utf-8"))
    }
    assert marked == {(document, name) for document, parts in DOCUMENTS.items() for name in parts}


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_every_family_has_a_row():
    header, _, *rows = cells(families_table())
    assert [row[0] for row in rows] == [f"`{family}`" for family in load_catalogue()]
    (z_image,) = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "`z-image`"]
    assert z_image["class"] == "`diffusers.ZImageTransformer2DModel`"
    assert z_image["fp8 storage"] == "supported"
    assert {"fp8_scaled", "int8_convrot", "plain"} <= set(z_image["tested with files in"].split(", "))


def test_every_setting_has_a_row(tmp_path):
    _, _, *rows = cells(settings_table())
    assert [row[0] for row in rows] == [f"`{key}`" for key in setting_names()]
    for key, default, variable, meaning in rows:
        assert meaning
        if variable:  # given, it is read as this setting
            environ = {variable.strip("`"): default.strip("`").replace("null", "")}
            resolved = resolve_settings(environ=environ, cwd=tmp_path, user_folder=tmp_path)
            given = environ[variable.strip("`")] != ""
            assert (resolved.origins[key.strip("`")].layer == "environment") is given


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    for name in ("families.md", "settings.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    parts = {f"docs/{name}.md": DOCUMENTS[f"docs/{name}.md"] for name in ("families", "settings")}
    monkeypatch.setattr(docs_tables, "DOCUMENTS", parts)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(main, arguments, standalone_mode=False)


def test_a_document_that_is_not_current(root):
    document = root / "docs" / "families.md"
    right = document.read_text(encoding="utf-8")
    document.write_text(right.replace("| `z-image` | Z-Image |", "| `z-image` | Another |"), encoding="utf-8")
    wrong = document.read_text(encoding="utf-8")
    assert wrong != right

    checked = call("--check")
    assert checked.return_value == 1
    assert checked.stderr == "docs/families.md is not current: run 'make docs'\n"
    assert document.read_text(encoding="utf-8") == wrong

    written = call()
    assert (written.return_value, written.stdout) == (0, "wrote docs/families.md\n")
    assert document.read_text(encoding="utf-8") == right
    assert sorted(path.name for path in (root / "docs").iterdir()) == ["families.md", "settings.md"]

    again = call("--check")
    assert (again.return_value, again.output) == (0, "")
    assert list(outdated(root)) == []


def test_what_is_written_by_hand_stays(root):
    document = root / "docs" / "settings.md"
    document.write_text("before\n<!-- settings: x -->\nold\n<!-- end of settings -->\nafter, ä\n", encoding="utf-8")
    call()
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- settings: x -->\n\n| setting |")
    assert text.endswith(" |\n\n<!-- end of settings -->\nafter, ä\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "there is no such document"), ("<!-- end of families -->", "lacks the markers of its part 'families'")],
)
def test_a_document_without_its_place(root, text, found):
    document = root / "docs" / "families.md"
    document.unlink() if text is None else document.write_text(text)
    with pytest.raises(UnsupportedFileError) as caught:
        list(outdated(root))
    assert found in caught.value.found
    assert "in the root of the repository" in caught.value.hint


def test_as_a_module_outside_the_repository(tmp_path):
    command = [sys.executable, "-m", "slipcast.cli.docs_tables", "--check"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: docs/families.md: there is no such document")
