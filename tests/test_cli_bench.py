"""``slipcast bench``: what is measured, what is saved, and what a comparison with it comes to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.cli import bench_command
from slipcast.demo.prompted import PIPELINE, draw
from slipcast.engine.devices import resolve_device
from slipcast.engine.pipeline import measurement, pipeline_plan
from slipcast.engine.pipeline.comparison import Bounds, compare, pictures_psnr
from slipcast.engine.pipeline.measurement import Measurement, machine_name
from slipcast.engine.pipeline.reference import Reference, load_reference
from slipcast.engine.policy.sizes import AskedSize
from support.command_line import json_of, output_of, run
from support.isolation import isolate

DRAWN = ("--prompt", "seven", "--size", "64x64", "--steps", "2", "--guidance", "0")
FEW = ("--device", "cpu", "--iterations", "2", "--warmup", "0")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The two files of a reference."""
    folder = tmp_path_factory.mktemp("reference")
    json_of("bench", PIPELINE, *DRAWN, *FEW, "--seed", "3", "--save", folder / "reference.json")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def reference(saved: dict[str, bytes], folder: Path) -> Path:
    for name, content in saved.items():
        (folder / name).write_bytes(content)
    return folder / "reference.json"


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "measure", None)


def changed(reference: Path, **fields: Any) -> Path:
    content = {**json.loads(reference.read_text()), **fields}
    reference.write_text(json.dumps(content))
    return reference


# --- what is measured -------------------------------------------------------------------------------------------------


def test_what_is_measured_is_what_the_pipeline_draws(reference: Path, saved: dict[str, bytes]) -> None:
    assert saved.keys() == {"reference.json", "reference.safetensors"}
    pictures = load_file(reference.with_suffix(".safetensors"))["pictures"]
    pipe = slipcast.pipeline(PIPELINE, device="cpu")
    call: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 0.0, "width": 64, "height": 64}
    (expected,) = pipe("seven", generator=torch.Generator().manual_seed(3), **call).images
    assert np.array_equal(pictures[0].numpy(), np.asarray(expected))
    assert not torch.equal(draw(pipe, ["seven"], seed=3, steps=2), draw(pipe, ["seven"], seed=0, steps=2))
    read = load_reference(reference)
    assert (read.family, read.pipeline, read.request.prompt, read.request.seed) == (
        "z-image",
        "ZImagePipeline",
        "seven",
        3,
    )
    assert read.machine == machine_name(resolve_device("cpu")[0])
    assert read.versions["torch"] == torch.__version__
    assert read.settings["fp8"] == "off"
    assert (len(read.seconds), read.median_seconds) == (2, pytest.approx(sum(read.seconds) / 2))


def test_warm_ups_are_drawn_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    seconds = iter([9.0, 9.0, 3.0, 1.0, 2.0])
    own = measurement.generate

    def generate(pipe: Any, request: Any) -> Any:
        drawn.append(request)
        return dataclasses.replace(own(pipe, request), seconds=next(seconds))

    monkeypatch.setattr(measurement, "generate", generate)
    asked = ("--device", "cpu", "--iterations", "3", "--warmup", "2")
    facts = json_of("bench", PIPELINE, *DRAWN[:4], "--steps", "1", *asked)
    assert len(drawn) == 5
    assert all(request == drawn[0] for request in drawn)
    assert (facts["seconds"], facts["median_seconds"], facts["warmup"]) == ([3.0, 1.0, 2.0], 2.0, 2)
    assert facts["saved"] is facts["against"] is None


def test_memory_on_a_cpu_is_counted_from_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(measurement.Peaks):
        def __exit__(self, *ended: Any) -> None:
            super().__exit__(*ended)
            self.host_anonymous = 700

    found = iter([1000, 5000])
    monkeypatch.setattr(measurement, "anonymous_bytes", lambda: next(found))
    monkeypatch.setattr(measurement, "Peaks", Watched)
    facts = json_of("bench", PIPELINE, *DRAWN, *FEW)
    assert (facts["peak_bytes"], facts["peak_of"]) == (4700, "host_anonymous")


def test_it_is_said_where_the_system_does_not_tell_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "anonymous_bytes", lambda: None)
    assert "peak memory  not known" in output_of("bench", PIPELINE, *DRAWN, *FEW)


# --- against a reference ----------------------------------------------------------------------------------------------


def test_the_same_settings_draw_the_same_pictures(reference: Path) -> None:
    facts = json_of("bench", PIPELINE, *FEW, "--against", reference, "--min-psnr", "200")
    assert (facts["prompt"], facts["seed"], facts["arguments"]["num_inference_steps"]) == ("seven", 3, 2)
    against = facts["against"]
    assert (against["psnr_db"], against["identical"], facts["regressions"]) == (None, True, [])
    assert against["latency_ratio"] == pytest.approx(facts["median_seconds"] / against["median_seconds"])
    if against["peak_bytes"]:
        assert against["memory_ratio"] == pytest.approx(facts["peak_bytes"] / against["peak_bytes"])
    else:  # a process that has drawn before may take nothing anew
        assert against["memory_ratio"] is None


def test_other_settings_pass_a_bound_of_the_psnr(reference: Path, folder: Path) -> None:
    asked = ("--set", "fp8=storage", "--against", reference, "--save", folder / "fp8.json")
    facts = json_of("bench", PIPELINE, *FEW, *asked, "--min-psnr", "20")
    pictures = [load_file(folder / name)["pictures"].numpy() for name in ("reference.safetensors", "fp8.safetensors")]
    one, other = (picture.astype(np.float64) for picture in pictures)
    expected = 10 * np.log10(255**2 / np.mean((one - other) ** 2))
    assert facts["against"]["psnr_db"] == pytest.approx(expected, rel=1e-9)
    assert 20 < expected < 60
    assert facts["status"]["fp8"]["engaged"] == "storage"
    assert facts["saved"] == str(folder / "fp8.json")
    result = run("bench", PIPELINE, *FEW, *asked, "--overwrite", "--min-psnr", "70")
    assert result.exit_code == 1
    assert f"regression: the PSNR is {expected:.1f} dB, less than 70 dB" in result.stdout


def test_a_slower_and_larger_pipeline_passes_its_bounds(reference: Path) -> None:
    changed(reference, seconds=[1e-4], peak_bytes=1000)
    bounds = ("--max-latency-regression", "5", "--max-memory-regression", "5")
    facts = json_of("bench", PIPELINE, *FEW, "--against", reference, *bounds, exit_code=1)
    # A process that has drawn before may take no more memory: what is said of memory is another test's.
    assert facts["regressions"][0].startswith("latency grew by")
    assert json_of("bench", PIPELINE, *FEW, "--against", reference)["regressions"] == []
    changed(reference, seconds=[1e4], peak_bytes=2**40)
    assert json_of("bench", PIPELINE, *FEW, "--against", reference, *bounds)["regressions"] == []


def test_bounds_are_passed_only_beyond_them(reference: Path) -> None:
    before = load_reference(reference).model_copy(update={"seconds": (2.0, 4.0, 3.0), "peak_bytes": 1000})
    expected = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)

    def regressions(seconds: float, peak: int | None, difference: int, bounds: Bounds) -> tuple[str, ...]:
        now = Measurement("m", {}, (seconds,), peak, "host_anonymous", expected + difference, {})
        return compare(before, expected, now, bounds).regressions

    assert regressions(3.3, 1100, 1, Bounds(10.01, 10.01, 48.13)) == ()
    assert regressions(3.31, 1101, 2, Bounds()) == ()
    assert regressions(3.31, 0, 0, Bounds(10)) == ("latency grew by 10.3 %, more than 10 %",)
    assert regressions(1, 1101, 0, Bounds(10, 10, 90)) == ("peak memory grew by 10.1 %, more than 10 %",)
    assert regressions(1, 0, 2, Bounds(psnr=43)) == ("the PSNR is 42.1 dB, less than 43 dB",)
    assert regressions(1, None, 0, Bounds(memory=10)) == ("the growth of the peak memory is not known",)


def test_the_psnr_of_pictures() -> None:
    black = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    assert pictures_psnr(black, black) == math.inf
    assert pictures_psnr(black + 255, black) == pytest.approx(0)
    assert pictures_psnr(black, black + 1) == pytest.approx(20 * math.log10(255))


# --- what is refused, before anything is drawn ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--seed", "4"], "a reference that was drawn with other values of seed"),
        (["--prompt", "six", "--steps", "3"], "a reference that was drawn with other values of prompt, steps"),
        (["--size", "128x64"], "a reference that was drawn with other values of width"),
    ],
)
def test_a_reference_of_another_request(nothing_drawn: None, reference: Path, options: list[str], found: str) -> None:
    error = json_of("bench", PIPELINE, *FEW, "--against", reference, *options, exit_code=2)
    assert (error["error"], error["found"]) == ("SettingsError", found)
    assert "leave these options out" in error["hint"]


def test_a_reference_of_another_machine(nothing_drawn: None, reference: Path) -> None:
    error = json_of("bench", PIPELINE, *FEW, "--against", changed(reference, machine="a card"), exit_code=2)
    assert (error["error"], error["found"]) == ("DeviceError", "a reference of a card")


def test_a_reference_of_another_pipeline(nothing_drawn: None, reference: Path) -> None:
    changed(reference, family="wan", pipeline="WanPipeline")
    error = json_of("bench", PIPELINE, *FEW, "--against", reference, exit_code=2)
    assert (error["error"], error["found"]) == ("UnsupportedFileError", "a reference of wan with WanPipeline")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"more": 1}, "more"),
        ({"seconds": []}, "seconds"),
        ({"seconds": [0.0]}, "seconds.0"),
        ({"shape": [1, 64, 64]}, "shape"),
        ({"request": {"prompt": 7}}, "request.prompt"),
        ({"request": {"prompt": "seven", "steps": -5}}, "request.steps"),
        ({"request": {"prompt": "seven", "steps": 10**9}}, "request.steps"),
        ({"request": {"prompt": "seven", "guidance": -1.0}}, "request.guidance"),
        ({"request": {"prompt": "seven", "seed": -1}}, "request.seed"),
        ({"request": {"prompt": "seven", "width": -64}}, "request.width"),
        ({"request": {"prompt": "seven", "frames": 0}}, "request.frames"),
    ],
)
def test_what_is_no_reference(nothing_drawn: None, reference: Path, fields: dict[str, Any], found: str) -> None:
    error = json_of("bench", PIPELINE, *FEW, "--against", changed(reference, **fields), exit_code=2)
    assert error["error"] == "UnsupportedFileError"
    assert error["found"].startswith(f"no reference of slipcast bench: {found}")


def test_a_reference_that_is_missing_or_no_json(nothing_drawn: None, folder: Path) -> None:
    (folder / "text.json").write_text("text")
    for name in ("none.json", "text.json"):
        error = json_of("bench", PIPELINE, *FEW, "--against", name, exit_code=2)
        assert (error["error"], error["expected"]) == ("HeaderError", "a file that 'slipcast bench --save' wrote")
        assert "check the path that --against names" in error["hint"]


@pytest.mark.parametrize("bound", ["--min-psnr", "--max-latency-regression", "--max-memory-regression"])
def test_a_bound_that_is_no_number(nothing_drawn: None, reference: Path, bound: str) -> None:
    error = json_of("bench", PIPELINE, *FEW, "--against", reference, bound, "nan", exit_code=2)
    assert (error["error"], error["expected"]) == (
        "SettingsError",
        "a number, which a measurement can be compared with",
    )


def test_what_is_measured_is_planned_at_its_size(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    planned: list[Any] = []

    def plan(path: Path, settings: Any, size: Any = None) -> Any:
        planned.append(size)
        raise slipcast.SlipcastError("enough", expected="", hint="")

    monkeypatch.setattr(pipeline_plan, "make_pipeline_plan", plan)
    json_of("bench", PIPELINE, *DRAWN, *FEW, "--size", "64x0", exit_code=2)
    assert planned == [AskedSize(64, None)]


def test_pictures_that_are_a_pipe_are_not_waited_for(nothing_drawn: None, reference: Path) -> None:
    file = reference.with_suffix(".safetensors")
    file.unlink()
    os.mkfifo(file)
    error = json_of("bench", PIPELINE, *FEW, "--against", reference, exit_code=2)
    assert (error["error"], error["path"]) == ("UnsupportedFileError", str(file))


@pytest.mark.parametrize("broken", ["missing", "cut", "other shape", "other dtype", "other name", "other pixels"])
def test_pictures_that_are_not_the_references(nothing_drawn: None, reference: Path, broken: str) -> None:
    file = reference.with_suffix(".safetensors")
    pictures = load_file(file)["pictures"]
    match broken:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "other shape":
            save_file({"pictures": pictures.view(1, 32, 128, 3)}, file)
        case "other dtype":
            save_file({"pictures": pictures.view(torch.int8)}, file)
        case "other name":
            save_file({"picture": pictures}, file)
        case "other pixels":
            save_file({"pictures": pictures.flip(1).contiguous()}, file)
    error = json_of("bench", PIPELINE, *FEW, "--against", reference, exit_code=2)
    assert error["error"] == "UnsupportedFileError"
    assert error["path"] == str(file)
    assert error["found"].startswith(
        "other pictures" if broken.startswith("other") and broken != "other name" else "the pictures of the reference"
    )


def test_pictures_of_another_size_or_memory_of_another_kind(reference: Path) -> None:
    before = load_reference(reference)
    pictures = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    for shape, kind in (((1, 2, 3, 3), "host_anonymous"), ((1, 2, 2, 3), "device")):
        now = Measurement("m", {}, (1.0,), 1, kind, torch.zeros(shape, dtype=torch.uint8), {})  # type: ignore[arg-type]
        with pytest.raises(slipcast.SlipcastError, match="measure and save the reference again"):
            compare(before, pictures, now, Bounds())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DRAWN[2:], "Missing option '--prompt'"),
        ((*DRAWN, "--min-psnr", "30"), "A bound needs '--against'"),
        ((*DRAWN, "--max-memory-regression", "-1"), "-1"),
        ((*DRAWN, "--guidance", "nan"), "guidance is nan"),
        ((*DRAWN, "--save", "reference.txt"), "the name ends in .txt"),
        ((*DRAWN, "--save", "nowhere/reference.json"), "there is no such folder"),
        ((*DRAWN, "--size", "60x64"), "a width of 60 pixels"),
        ((*DRAWN, "--set", "device=cuda:8.6,12GiB"), "which is not there"),
    ],
)
def test_command_lines_that_are_refused(nothing_drawn: None, options: tuple[str, ...], words: str) -> None:
    error = json_of("bench", PIPELINE, "--iterations", "1", *options, exit_code=2)
    assert words in error["found"]


@pytest.mark.parametrize("name", ["reference.json", "reference.safetensors"])
def test_a_reference_that_is_there_is_kept_unless_told(nothing_drawn: None, reference: Path, name: str) -> None:
    for other in {"reference.json", "reference.safetensors"} - {name}:
        (reference.parent / other).unlink()
    before = (reference.parent / name).read_bytes()
    error = json_of("bench", PIPELINE, *DRAWN, *FEW, "--save", reference, exit_code=2)
    assert (error["found"], error["path"]) == ("the file is there already", str(reference.parent / name))
    assert (reference.parent / name).read_bytes() == before


def test_references_are_frozen_and_say_all_that_they_were_of(reference: Path) -> None:
    read = load_reference(reference)
    assert Reference.model_validate_json(read.model_dump_json()) == read
    with pytest.raises(ValueError, match="frozen"):
        read.family = "other"  # type: ignore[misc]


def test_the_text_says_what_was_measured(reference: Path) -> None:
    lines = output_of("bench", PIPELINE, *FEW, "--against", reference).splitlines()
    assert lines[0].startswith("ZImagePipeline of z-image on ")
    assert "'seven', seed 3, num_inference_steps 2" in lines[1]
    assert "the median of 2 (" in lines[2]
    assert "bytes of the process" in lines[3]
    assert lines[4] == "against the reference:"
    assert lines[-1] == "  PSNR         infinite: the same pictures"


def test_the_bar_counts_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar(label: str, *, in_bytes: bool) -> Any:
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(bench_command, "progress_bar", bar)
    json_of("bench", PIPELINE, *DRAWN, "--device", "cpu", "--iterations", "2", "--warmup", "1")
    assert seen == [(1, 3), (2, 3), (3, 3)]
