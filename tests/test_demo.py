"""``slipcast demo``: one checkpoint, unquantised and in fp8 storage, from the same noise."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import slipcast
from slipcast.demo import run as demo
from slipcast.demo.picture import Row, draw_picture, tile_box
from slipcast.demo.recognise import count_recognised, train_recogniser
from slipcast.demo.sampling import draw_noise, load_captions, sample
from slipcast.registry.errors import SettingsError, SlipcastError
from support.command_line import json_of, output_of, run, run_process
from support.isolation import isolate

CPU = {"device": "cpu", "dtype": "float32"}
SAMPLES = 20


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def comparison():
    return demo.compare(CPU, samples=SAMPLES, seed=3)


@pytest.fixture
def ready(monkeypatch, comparison):
    """A command that need not draw: it gets the comparison above, and the calls for it are kept."""
    calls = []

    def compare(settings, **others):
        calls.append((settings, others))
        return comparison

    monkeypatch.setattr(demo, "compare", compare)
    return calls


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_both_models_take_the_bytes_predicted(comparison):
    stored = sum(tensor.nbytes for tensor in load_file(demo.CHECKPOINT).values())
    plain, fp8 = comparison.unquantised, comparison.fp8
    assert plain.report.resident == plain.plan.bytes.resident == 2 * stored
    assert fp8.report.resident == fp8.plan.bytes.resident
    assert fp8.report.resident < 0.36 * plain.report.resident
    assert (plain.storage, fp8.storage) == ("float32", "fp8 storage")
    assert fp8.plan.settings["fp8"].engaged == "storage"
    assert plain.plan.settings["fp8"].engaged == "off"


def test_images_are_those_of_the_loaded_models_and_the_seed(comparison):
    captions = load_captions(demo.CAPTIONS_FILE)
    for fp8, drawn in (("off", comparison.unquantised), ("storage", comparison.fp8)):
        model = slipcast.load(demo.CHECKPOINT, fp8=fp8, **CPU).model
        images = sample(model, captions, comparison.digits, seed=3, steps=8, compute_dtype=torch.float32)
        assert torch.equal(drawn.images, images)
        assert drawn.recognised == count_recognised(train_recogniser(), images, comparison.digits)
    assert comparison.digits == (*range(10), *range(10))
    assert not torch.equal(draw_noise(2, seed=3), draw_noise(2, seed=0))


def test_digits_are_recognised(comparison):
    assert comparison.unquantised.recognised >= 0.95 * SAMPLES
    assert abs(comparison.fp8.recognised - comparison.unquantised.recognised) <= 1
    assert comparison.problems == ()


def test_the_two_differ_by_little(comparison):
    one, other = (drawn.images.double().numpy() for drawn in comparison.both)
    error = ((one - other) ** 2).mean()
    assert comparison.relative_l2 == pytest.approx(math.sqrt(error / (one**2).mean()), rel=1e-4)
    assert comparison.psnr == pytest.approx(10 * math.log10(4 / error), rel=1e-4)
    assert 0.001 < comparison.relative_l2 < 0.05


def test_equal_images_have_no_psnr_in_json(comparison):
    equal = replace(comparison, fp8=comparison.unquantised)
    assert equal.psnr == math.inf
    assert equal.to_dict()["psnr_db"] is None
    assert equal.to_dict()["relative_l2"] == 0


def test_progress_covers_both(comparison):
    seen = []
    demo.compare(CPU, samples=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 4), (4, 4)]


def test_problems_are_said(comparison):
    def recognising(unquantised, fp8):
        return replace(
            comparison,
            unquantised=replace(comparison.unquantised, recognised=unquantised),
            fp8=replace(comparison.fp8, recognised=fp8),
        ).problems

    assert recognising(19, 20) == recognising(20, 19) == recognising(19, 18) == ()
    assert recognising(18, 18) == ("18 of the unquantised model's 20 digits are recognised, not 95%",)
    assert recognising(20, 18) == ("fp8 storage changes by 2 how many of 20 digits are recognised",)
    report = replace(comparison.fp8.report, differences=("7 bytes were predicted, 8 are resident",))
    broken = replace(comparison, fp8=replace(comparison.fp8, report=report))
    assert broken.problems == ("fp8 storage: 7 bytes were predicted, 8 are resident",)


@pytest.mark.parametrize("name", ["fp8", "fp8.mode"])
def test_what_is_compared_can_not_be_set(name):
    with pytest.raises(SettingsError, match=rf"(?s)the setting {name}\n.*other than fp8.*leave it out"):
        demo.compare({name: "off"}, samples=1)


@pytest.mark.parametrize(
    ("gone", "named"),
    [(["sklearn"], "scikit-learn"), (["PIL"], "pillow"), (["sklearn", "PIL"], "scikit-learn and pillow")],
)
def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch, gone, named):
    for module in gone:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SlipcastError) as caught:
        demo.require_extras()
    assert caught.value.found.endswith(f"without {named}")
    assert "pip install 'slipcast[demo]'" in caught.value.hint


def test_nothing_is_missing_here():
    demo.require_extras()


# --- the picture ------------------------------------------------------------------------------------------------------


def seen_in(picture, row, column):
    """The inside of an image read back from the picture, ``[14, 14]`` in [-1, 1]: its edges fade into the paper.

    It is read off the green: 0xFD is paper, 0x2B is ink.
    """
    tile = picture.convert("RGB").crop(tile_box(row, column)).resize((18, 18), Image.Resampling.BOX)
    green = torch.tensor([value[1] for value in tile.get_flattened_data()]).float().view(18, 18)[2:-2, 2:-2]
    return (0xFD - green) / (0xFD - 0x2B) * 2 - 1


def is_seen(picture, row, column, image):
    inside = image[0, 1:-1, 1:-1]
    return ((seen_in(picture, row, column) - inside).norm() / inside.norm()).item() < 0.1


def test_each_image_is_in_its_place():
    blots = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    images = torch.nn.functional.interpolate(blots, size=(16, 16), mode="bilinear").view(2, 3, 1, 16, 16)
    picture = draw_picture([Row("upper", images[0]), Row("lower", images[1])], "abc", "foot")
    assert all(is_seen(picture, row, column, images[row, column]) for row in range(2) for column in range(3))
    assert not is_seen(picture, 1, 0, images[0, 0])
    assert not is_seen(picture, 0, 1, images[0, 0])


def test_words_are_in_the_picture():
    def draw(title="", label="", foot=""):
        return draw_picture([Row(title, torch.zeros(1, 1, 4, 4))], [label], foot).tobytes()

    assert len({draw(), draw(title="bfloat16"), draw(label="7"), draw(foot="the same noise")}) == 4


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_draws_and_compares(monkeypatch, folder):
    monkeypatch.setattr(demo, "SAMPLES", 10)
    answer = json_of("demo", "--device", "cpu", "--set", "dtype=float32", "--seed", "3", "--out", "digits.png")
    assert answer["checkpoint"]["family"] == "z-image"
    assert answer["checkpoint"]["layout"] == "native"
    assert {key: answer[key] for key in ("device", "seed", "steps", "samples", "problems", "picture")} == {
        "device": "cpu",
        "seed": 3,
        "steps": 8,
        "samples": 10,
        "problems": [],
        "picture": "digits.png",
    }
    for name, storage in (("unquantised", "float32"), ("fp8", "fp8 storage")):
        drawn = answer[name]
        assert drawn["storage"] == storage
        assert drawn["compute_dtype"] == "float32"
        assert drawn["predicted_bytes"] == drawn["resident_bytes"]
        assert drawn["recognised"] >= 9
        assert drawn["seconds"] > 0
    assert answer["fp8"]["settings"]["fp8"]["engaged"] == "storage"
    assert 0.001 < answer["relative_l2"] < 0.05
    assert 30 < answer["psnr_db"] < 60
    assert [path.name for path in folder.iterdir()] == ["digits.png"]


def test_the_table(ready, comparison):
    text = output_of("demo", "--set", "dtype=float32", "--device", "cpu", "--seed", "3")
    lines = text.splitlines()
    assert lines[0] == "digits.safetensors: z-image, native names, 7.5 MiB"
    rows = {line.split("  ")[1]: line.split() for line in lines if " of 20 " in line}
    for name, drawn in zip(("float32", "fp8 storage"), comparison.both, strict=True):
        assert rows[name][-6:-4] == [f"{drawn.plan.bytes.resident:,}", f"{drawn.report.resident:,}"]
        assert rows[name][-4:-1] == [str(drawn.recognised), "of", "20"]
    assert f"relative L2 {comparison.relative_l2:.4f}, PSNR {comparison.psnr:.1f} dB" in text
    assert "The picture is slipcast-demo.png." in lines
    ((settings, others),) = ready
    assert settings == {"dtype": "float32", "device": "cpu"}
    assert others["seed"] == 3
    assert others["samples"] == 200


def test_the_picture_has_the_unquantised_row_above_that_of_fp8(monkeypatch, comparison, folder):
    told_apart = replace(comparison, fp8=replace(comparison.fp8, images=-comparison.fp8.images))
    monkeypatch.setattr(demo, "compare", lambda *_, **__: told_apart)
    output_of("demo")
    with Image.open(folder / "slipcast-demo.png") as picture:
        assert picture.format == "PNG"
        for row, drawn in enumerate(told_apart.both):
            assert all(is_seen(picture, row, digit, drawn.images[digit]) for digit in range(10))


def test_a_file_that_is_there_is_kept_unless_told(ready, folder):
    there = folder / "slipcast-demo.png"
    there.write_text("mine")
    result = run("demo")
    assert result.exit_code == 2
    assert "the file is there already" in result.stderr
    assert "--overwrite" in result.stderr
    assert there.read_text() == "mine"
    assert ready == []
    output_of("demo", "--overwrite")
    Image.open(there).verify()


def test_a_comparison_gone_wrong_fails_the_command(monkeypatch, comparison, folder):
    wrong = replace(comparison, fp8=replace(comparison.fp8, recognised=7))
    monkeypatch.setattr(demo, "compare", lambda *_, **__: wrong)
    result = run("demo")
    assert result.exit_code == 1
    assert "not as it should be: fp8 storage changes by 13" in result.stdout
    assert json_of("demo", "--overwrite", exit_code=1)["problems"] == list(wrong.problems)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["--set", "fp8=off"], "SettingsError", "the setting fp8"),
        (["--device", "cuda:8.6,12GiB"], "DeviceError", "a card of 12 GiB, capability 8.6, which is not there"),
        (["--out", "nowhere/digits.png"], "UnsupportedFileError", "there is no such folder"),
        (["--seed", "-1"], "UsageError", "-1 is not in the range"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_is_drawn(monkeypatch, folder, arguments, kind, words):
    monkeypatch.setattr(demo, "sample", None)
    error = json_of("demo", *arguments, exit_code=2)
    assert error["error"] == kind
    assert words in error["found"]
    assert list(folder.iterdir()) == []


def test_the_command_refuses_to_begin_without_its_packages(monkeypatch, ready, folder):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    error = json_of("demo", exit_code=2)
    assert "scikit-learn" in error["found"]
    assert ready == []


def test_a_wrong_option_does_not_wait_for_torch():
    code = """
import sys
from slipcast.cli.application import application
try:
    application.main(["demo", "--out", "nowhere/digits.png"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


@pytest.mark.slow
def test_the_whole_demonstration_in_float32(folder):
    """What a machine without native bfloat16 does; on one thread, since several wait for each other on a busy one."""
    done = run_process("demo", "--json", "--device", "cpu", "--set", "dtype=float32", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["samples"] == 200
    assert answer["unquantised"]["recognised"] >= 190
    assert abs(answer["fp8"]["recognised"] - answer["unquantised"]["recognised"]) <= 1
    for name in ("unquantised", "fp8"):
        assert answer[name]["predicted_bytes"] == answer[name]["resident_bytes"]
    Image.open(folder / answer["picture"]).verify()
