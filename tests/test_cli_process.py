"""The command line as a process: what it imports, how fast it is, pipes, terminals and signals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slipcast
from support.command_line import run_process, start
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

FULL = Path("/dev/full")
HEAVY = {"torch", "diffusers", "transformers", "numpy", "safetensors", "omegaconf", "rich"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def published(folder):
    """The published file, sparse: 12.3 GB that take no room."""
    return write_checkpoint(recorded("z-image-turbo--comfy-bf16"), folder / "z-image-turbo.safetensors")


@pytest.mark.parametrize("arguments", [["--help"], ["inspect"], ["inspect", "--json"], ["explain", "--json"]])
def test_heavy_libraries_are_not_imported(published, arguments):
    command = [sys.executable, "-X", "importtime", "-m", "slipcast.cli", *arguments]
    result = subprocess.run([*command, str(published)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "click" in imported
    assert imported & HEAVY == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["load", "none.safetensors"], "no such file"),
        (["load", "empty.safetensors"], "the file is empty"),
        (["load", "lora.safetensors"], "no family claims"),
        (["load", "turbo.safetensors", "--set", "device=gpu"], "device is 'gpu'"),
        (["load", "turbo.safetensors", "--set", "family=nobody"], "no family is called 'nobody'"),
        (["load", "turbo.safetensors", "--device", "cuda:8.6,12GiB"], "which is not there"),
        (["load", "turbo.safetensors", "--plan", "empty.safetensors"], "the file is empty"),
        (["plan", "turbo.safetensors", "--set", "dtype=fp8"], "dtype is 'fp8'"),
        (["convert", "empty.safetensors", "out.safetensors"], "the file is empty"),
        (["convert", "lora.safetensors", "out.safetensors"], "no family claims"),
        (["convert", "turbo.safetensors", "out.bin"], "the name ends in .bin"),
        (["bench", "turbo.safetensors"], "Missing option '--prompt'"),
        (["bench", "turbo.safetensors", "--prompt", "x", "--guidance", "nan"], "guidance is nan"),
        (["generate", "turbo.safetensors", "--prompt", "x", "--strength", "0.5"], "without a picture to start from"),
        (["generate", "empty.safetensors", "--prompt", "x", "--out", "x.png"], "the file is empty"),
        (["generate", "lora.safetensors", "--dry-run"], "no family claims"),
        (["generate", "turbo.safetensors", "--prompt", "x", "--out", "x.png"], "text_encoder"),
        (["demo", "--set", "bogus=1"], "unknown field 'bogus'"),
        (["convert", "turbo.safetensors", "turbo.safetensors"], "the input itself"),
        (["convert", "turbo.safetensors", "out.safetensors", "--prefix", "x."], "the prefix 'x.'"),
        (["convert", "turbo.safetensors", "out.safetensors", "--format", "mxfp8", "--scale", "row"], "scales by row"),
    ],
)
def test_what_is_refused_waits_for_no_heavy_library(folder, arguments, said):
    write_checkpoint(recorded("z-image-turbo--comfy-bf16"), folder / "turbo.safetensors")
    write_checkpoint({"layers.0.q.lora_A.weight": ("BF16", (4, 8))}, folder / "lora.safetensors")
    (folder / "empty.safetensors").write_bytes(b"")
    command = [sys.executable, "-X", "importtime", "-m", "slipcast.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert said in result.stderr
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert imported & HEAVY == set()


MEASURE = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def measured(*command):
    """Seconds that a command takes, and the most memory that it has, in kB; not counting that of this process."""
    result = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    seconds, kilobytes = result.stdout.split()
    return float(seconds), int(kilobytes)


@pytest.mark.slow
def test_inspect_answers_in_a_tenth_of_the_time_that_the_model_class_takes_to_import(published):
    runs = [measured(sys.executable, "-m", "slipcast.cli", "inspect", published) for _ in range(3)]
    baseline, _ = measured(sys.executable, "-c", "from diffusers import ZImageTransformer2DModel")
    assert min(seconds for seconds, _ in runs) < baseline / 10
    assert max(kilobytes for _, kilobytes in runs) < 120_000


WITHOUT_TRANSFORMERS = """
import sys
for name in ("transformers", "peft", "accelerate"):
    sys.modules[name] = None
from slipcast.cli import main
main()
"""
DEMO = Path(slipcast.__file__).parent / "demo" / "pipeline"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["generate", str(DEMO), "--prompt", "seven"], "the class 'diffusers.ZImagePipeline'"),
        (["plan", str(DEMO / "text_encoder")], "the model class 'transformers.Qwen3Model'"),
    ],
)
def test_where_transformers_is_missing_the_extra_that_brings_it_is_named(arguments, found):
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert found in result.stderr
    assert "transformers is not installed" in result.stderr
    assert "slipcast[pipelines]" in result.stderr


def test_the_source_folder_alone_says_what_to_do(tmp_path):
    (tmp_path / "slipcast").mkdir()
    source = Path(slipcast.__file__).read_text()
    (tmp_path / "slipcast" / "__init__.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [sys.executable, "-S", "-c", "import slipcast"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: slipcast is imported from its source folder" in result.stderr
    assert "pip install -e ." in result.stderr


READS = """
import sys
from slipcast.cli.application import application
try:
    application.main(["inspect", sys.argv[1]])
finally:
    sys.stderr.write(open("/proc/self/io").read())
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what Linux says was read")
def test_inspecting_reads_no_weight(published):
    result = subprocess.run([sys.executable, "-c", READS, published], capture_output=True, text=True, check=True)
    read = int(dict(line.split(": ") for line in result.stderr.splitlines())["rchar"])
    assert read < 32 << 20  # modules, family files and a header of 49 kB, of a file of 12.3 GB


@pytest.mark.skipif(not FULL.exists(), reason="needs a full device")
@pytest.mark.parametrize("arguments", [["families"], ["families", "--json"], ["--help"]])
def test_a_disk_that_is_full(arguments):
    with FULL.open("w") as full:
        process = start(*arguments, stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams(folder, closed):
    line = f"{sys.executable} -m slipcast.cli families {closed}>&-"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def in_terminal(*arguments, env=None):
    """What a process writes to a terminal as its standard output."""
    leader, follower = pty.openpty()
    process = start(*arguments, stdout=follower, env={"TERM": "xterm", "COLUMNS": "100", **(env or {})})
    os.close(follower)
    text = b""
    try:
        while chunk := os.read(leader, 65536):
            text += chunk
    except OSError:  # Linux says so at the end
        pass
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return text.decode()


def test_colour_is_for_terminals():
    assert "\x1b[1m" in in_terminal("families")
    assert "\x1b" not in in_terminal("families", env={"NO_COLOR": "1"})
    assert "\x1b" not in in_terminal("families", "--json")
    assert "\x1b" not in run_process("families").stdout


def test_without_a_terminal_nothing_but_text_is_written(folder):
    model = write_native(folder / "model.safetensors", tiny_tensors())
    result = run_process("load", model, "--set", "fp8=storage")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout + result.stderr
    assert "\r" not in result.stdout + result.stderr


def test_exit_codes_reach_the_shell(folder):
    assert run_process("inspect", "nowhere").returncode == 2
    assert run_process("nonsense").returncode == 2
    assert run_process("families").returncode == 0


def _heed_interruptions() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="sees in Linux's maps when the load has begun")
def test_ctrl_c_ends_a_load_without_a_traceback(folder, published):
    # A shell that runs the tests in the background lets its children ignore Ctrl-C.
    process = start("load", published, "--set", "fp8=storage", preexec_fn=_heed_interruptions)
    deadline = time.monotonic() + 60
    while published.name not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.strip()) == (130, "", "interrupted")
    assert sorted(path.name for path in folder.iterdir()) == [published.name]
