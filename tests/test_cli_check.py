"""``slipcast check`` as users and programs meet it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipcast.engine.check.run import PROOFS
from slipcast.registry.catalogue import load_catalogue
from support.command_line import json_of, run

FILE = Path(__file__).parents[1] / "families" / "z-image.yaml"


def test_a_family_that_holds(tmp_path: Path) -> None:
    result = run("check", "z-image")
    assert result.exit_code == 0
    assert "z-image (" in result.stdout
    lines = [line.split()[:2] for line in result.stdout.splitlines() if line.startswith("  ok")]
    assert ["ok", "bijection"] in lines
    assert f"{len(PROOFS)} proofs hold, 0 failed, 0 skipped" in result.stdout


def test_a_file_that_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "z-image.yaml"
    path.write_text(FILE.read_text(encoding="utf-8").replace("[cap_embedder]", "[cap_embeder]"), encoding="utf-8")
    result = run("check", path)
    assert result.exit_code == 1
    (failed,) = (line for line in result.stdout.splitlines() if line.startswith("  failed"))
    assert "patterns" in failed
    assert "z-image.yaml:" in failed
    assert "precision.keep.text_embedding.0: 'cap_embeder' hits nothing" in failed
    assert "to do:" in result.stdout


def test_as_json(tmp_path: Path) -> None:
    path = tmp_path / "z-image.yaml"
    path.write_text("schema: 1\n", encoding="utf-8")
    checked = json_of("check", path, exit_code=1)
    (family,) = checked["families"]
    assert (checked["ok"], checked["failed"], checked["skipped"]) == (0, 1, 0)
    assert (family["id"], family["source"]) == ("z-image", str(path))
    (proof,) = family["proofs"]
    assert (proof["name"], proof["status"], proof["error"]["error"]) == ("reads", "failed", "FamilyFileError")


def test_a_folder_of_headers_that_is_not_there(tmp_path: Path) -> None:
    error = json_of("check", "--headers", tmp_path / "nowhere", exit_code=2)
    assert (error["error"], error["field"]) == ("SettingsError", "headers")


def test_families_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "schema: 1\nid: mine\ntitle: Mine\nkind: denoiser\nmodel: diffusers.NoSuchModel\nidentify: {has: [a]}\n"
        "precision: {fp16: safe, fp8: {storage: supported, compute: supported}}\n",
        encoding="utf-8",
    )
    checked = json_of("check", "mine", "--set", f"families=[{tmp_path}]", exit_code=1)
    statuses = {proof["name"]: proof["status"] for proof in checked["families"][0]["proofs"]}
    assert statuses["class"] == "failed"
    assert (statuses["others"], statuses["key map"]) == ("ok", "ok")


def test_all_of_them_or_some() -> None:
    result = run("check", "--all", "z-image")
    assert result.exit_code == 2
    assert "--all and names exclude one another" in result.stderr


def test_all_is_what_naming_none_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipcast.engine.check.run.PROOFS", {})
    assert [family["id"] for family in json_of("check", "--all")["families"]] == list(load_catalogue())
