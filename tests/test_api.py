"""The package as a program meets it: its names, what importing it costs, and the functions beside inspect and load."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from safetensors.torch import load_file

import slipcast
from slipcast.cli.application import application
from slipcast.registry.errors import SettingsError, UnsupportedFileError
from support.isolation import isolate
from support.tiny_z_image import tiny_tensors, write_native


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return write_native(tmp_path / "model.safetensors", tiny_tensors(), prefix="diffusion_model.")


def test_the_package_lists_its_public_names_and_has_each() -> None:
    assert dir(slipcast) == sorted(slipcast.__all__)
    for name in dir(slipcast):
        assert inspect.getdoc(getattr(slipcast, name)), name
    with pytest.raises(AttributeError, match="no attribute 'Checkpoint'"):
        slipcast.Checkpoint  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_and_its_functions_imports_no_torch() -> None:
    program = "import sys, slipcast; slipcast.convert; slipcast.check; slipcast.load; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(("name", "function"), [("convert", slipcast.convert), ("check", slipcast.check)])
def test_a_function_has_the_options_of_its_command(name: str, function: Callable[..., Any]) -> None:
    command = application.get_command(click.Context(application), name)
    assert command is not None
    options = {(option.name or "").rstrip("_") for option in command.params}
    parameters = set(inspect.signature(function).parameters) - {"progress", "cancelled", "settings"}
    options -= {"all"}  # what naming no family means
    assert options - {"assignments", "config", "as_json", "verbose"} == parameters


def test_there_and_back(tmp_path: Path, native: Path) -> None:
    seen: list[tuple[int, int]] = []
    converted = slipcast.convert(
        native, tmp_path / "transformer", layout="diffusers", progress=lambda *done: seen.append(done)
    )
    assert isinstance(converted, slipcast.Converted)
    assert {file.name for file in converted.files} == {"diffusion_pytorch_model.safetensors", "config.json"}
    assert seen[-1][0] == seen[-1][1] > 0
    back = tmp_path / "back.safetensors"
    slipcast.convert(str(tmp_path / "transformer"), str(back), layout="native", prefix="diffusion_model.")
    again, before = load_file(back), load_file(native)
    assert again.keys() == before.keys()
    assert all(again[name].equal(before[name]) for name in before)


def test_another_format(tmp_path: Path, native: Path) -> None:
    small = tmp_path / "small.safetensors"
    converted = slipcast.convert(native, small, format="fp8_scaled", spelling="legacy", scale="row")
    assert converted.conversion.formats["fp8_scaled"] > 10
    assert slipcast.inspect(small).formats["fp8_scaled"] == converted.conversion.formats["fp8_scaled"]
    with pytest.raises(UnsupportedFileError, match="the file is there already"):
        slipcast.convert(native, small)
    slipcast.convert(native, small, overwrite=True)
    assert set(slipcast.inspect(small).formats) == {"plain"}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"layout": "comfy"}, "the layout 'comfy'"),
        ({"format": "fp4"}, "the format 'fp4' to write"),
        ({"spelling": "kijai"}, "the spelling 'kijai'"),
        ({"format": "int8", "scale": "block"}, "the scale 'block'"),
        ({"families": 3}, "families is 3"),
    ],
)
def test_options_that_there_are_not(tmp_path: Path, native: Path, options: dict[str, Any], found: str) -> None:
    with pytest.raises(SettingsError) as caught:
        slipcast.convert(native, tmp_path / "out.safetensors", **options)
    assert caught.value.found.startswith(found)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_conversion_that_is_cancelled(tmp_path: Path, native: Path) -> None:
    with pytest.raises(slipcast.SlipcastError, match="cancelled"):
        slipcast.convert(native, tmp_path / "out.safetensors", format="fp8_scaled", cancelled=lambda: True)
    assert not (tmp_path / "out.safetensors").exists()


def test_families_are_proven_as_they_are_asked_for(tmp_path: Path) -> None:
    text = "schema: 1\nid: mine\ntitle: M\nkind: denoiser\nmodel: diffusers.No\nidentify: {has: [a]}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(f"{text}precision: {{fp16: safe, fp8: {{storage: supported, compute: supported}}}}\n")
    checked = slipcast.check(file, "z-image")
    first = next(checked)
    assert isinstance(first, slipcast.CheckedFamily)
    assert (first.id, [proof.name for proof in first.failed]) == ("mine", ["class"])
    (by_id,) = slipcast.check("mine", families=[tmp_path])
    assert by_id.failed[0].detail == first.failed[0].detail


def test_what_can_not_be_proven_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no family is called 'nobody'"):
        slipcast.check("nobody")
    with pytest.raises(SettingsError, match="the folder of headers"):
        slipcast.check("z-image", headers=tmp_path / "none")


def test_a_loaded_model_is_shown_in_one_line(native: Path) -> None:
    loaded = slipcast.load(native, device="cpu", dtype="bfloat16", fp8="storage")
    shown = repr(loaded)
    assert shown.startswith("<Loaded ZImageTransformer2DModel: z-image, ")
    assert shown.endswith(f" bfloat16, {loaded.report.resident:,} bytes on cpu>")
    assert f"{loaded.report.plan.precisions['fp8']} fp8" in shown
    assert len(shown) < 120
