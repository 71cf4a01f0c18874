"""Loads of a full-size checkpoint to a GPU in fp8 storage: two readers, diffusers, safetensors, and the limit.

    python benchmarks/gpu.py load                                # the installed safetensors
    python benchmarks/gpu.py load --safetensors-rc DIR           # prefetch from another safetensors, installed in DIR
    python benchmarks/gpu.py load --sweep prefetch               # other windows and threads, in one warm process

Two files are written first: one in bf16 and one of scaled fp8 codes, after recorded headers and with random values.
Each run is a process of its own, in turn; those of a round wait ready. Its clock starts when everything is imported,
the GPU has been used once and the file lies in the page cache, and stops when the GPU has nothing left to do. What is
planned and identified counts.
Device memory is what the driver says is taken, sampled, above that at the start: all allocators count, and what they
round up. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from load import Device, run_diffusers, run_safetensors, run_slipcast
from measuring import HEADER, MIB, ROOT, Peak, model_class, print_table, read_through

_CODES_HEADER = "z-image-turbo--kijai-fp8-scaled"
_BLOCK = 64 * MIB
_PINNED = 1024 * MIB
_READY, _GO = "ready", "go"
_STORAGE = {"device": "cuda", "dtype": "bfloat16", "fp8": "storage"}
_KEPT = {"device": "cuda", "dtype": "bfloat16", "fp8": "auto"}
_SWEEPS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "prefetch": {"ahead_mib": (384, 512, 640, 768), "windows": (2, 3, 4, 6), "threads": (4, 8, 16), "chunk_mib": (64,)},
    "slabs": {"ahead_mib": (128, 192, 320), "threads": (4, 6, 8, 12), "chunk_mib": (32, 64)},
}

Run = Callable[[Path, dict[str, Any]], dict[str, Any]]


def run_pinned_copy(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Copy as many bytes as the file has from page-locked memory: nothing is faster."""
    device = Device(settings["device"])
    host = torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PINNED, dtype=torch.uint8, device=settings["device"])
    device.wait()
    began = perf_counter()
    left = path.stat().st_size
    while left:
        step = min(left, _PINNED)
        there[:step].copy_(host[:step], non_blocking=True)
        left -= step
    device.wait()
    return {"seconds": perf_counter() - began, "peak": 0, "resident": 0}


CONTENDERS: Mapping[str, tuple[str, Run, Mapping[str, Any]]] = {
    "pinned copy": ("bf16", run_pinned_copy, _STORAGE),
    "diffusers": ("bf16", run_diffusers, _STORAGE),
    "safetensors": ("bf16", run_safetensors, _STORAGE),
    "slabs": ("bf16", run_slipcast, {**_STORAGE, "reader": "slabs"}),
    "prefetch": ("bf16", run_slipcast, {**_STORAGE, "reader": "prefetch"}),
    "codes kept, slabs": ("fp8", run_slipcast, {**_KEPT, "reader": "slabs"}),
    "codes kept, prefetch": ("fp8", run_slipcast, {**_KEPT, "reader": "prefetch"}),
    "to the CPU": ("bf16", run_slipcast, {**_STORAGE, "device": "cpu"}),
    "diffusers to the CPU": ("bf16", run_diffusers, {**_STORAGE, "device": "cpu"}),
}
"""Which file each loads, how, and with which settings."""


def add_options(parser: Any) -> None:
    """The options of this part."""
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files are made (a temporary folder), 19 GB")
    parser.add_argument(
        "--safetensors-rc", type=Path, metavar="DIR", help="a folder with a safetensors that prefetches"
    )
    parser.add_argument("--loads", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--sweep", nargs="*", choices=_SWEEPS, default=[], help="also try settings of these readers")
    parser.add_argument("--blocks", type=int, help="fewer blocks, to try the program out")
    parser.add_argument("--profile", action="store_true", help="also say where Python spends a load by each reader")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write the files, run everybody in turn, then sweep."""
    with _files(options.folder, options.blocks, {CONTENDERS[name][0] for name in options.loads}) as files:
        for path in files.values():
            read_through(path)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.loads if _can_run(name, options)}
        for _ in range(options.repeats):
            waiting = {name: _start(name, files, options, "run") for name in runs}
            for process in waiting.values():
                _expect(process, _READY)
            for name, process in waiting.items():
                runs[name].append(_finish(name, process))
                print(f"{name}: {runs[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
        sweeps = {reader: _in_process(reader, files, options, "sweep") for reader in options.sweep}
        profiled = [name for name in ("slabs", "prefetch") if options.profile and name in runs]
        return {
            "bytes": {name: path.stat().st_size for name, path in files.items()},
            "runs": runs,
            "sweeps": {reader: found["sweep"] for reader, found in sweeps.items()},
            "profiles": {name: _in_process(name, files, options, "profile")["profile"] for name in profiled},
        }


def _can_run(name: str, options: argparse.Namespace) -> bool:
    import safetensors

    return "prefetch" not in name or options.safetensors_rc is not None or hasattr(safetensors.safe_open, "prefetch")


def _in_process(name: str, files: Mapping[str, Path], options: argparse.Namespace, task: str) -> dict[str, Any]:
    return _finish(name, _start(name, files, options, task))


def _start(name: str, files: Mapping[str, Path], options: argparse.Namespace, task: str) -> subprocess.Popen[str]:
    """One contender in a process of its own, which imports everything and then waits for its turn."""
    environment = dict(os.environ)
    if "prefetch" in name and options.safetensors_rc is not None:
        paths = [str(options.safetensors_rc.resolve()), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, task, name, str(files[CONTENDERS[name][0]])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return


def _finish(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let it run, and read its last line, which is JSON."""
    output, _ = process.communicate(_GO + "\n")
    if process.returncode:
        raise SystemExit(f"{name} failed: {process.args}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


@contextmanager
def _files(folder: Path | None, blocks: int | None, wanted: Collection[str]) -> Iterator[dict[str, Path]]:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.recorded import recorded, write_checkpoint

    with tempfile.TemporaryDirectory(dir=folder) as made:
        headers = {"bf16": HEADER, "fp8": _CODES_HEADER}
        files = {name: Path(made) / f"{headers[name]}.safetensors" for name in headers if name in wanted}
        for name, path in files.items():
            _fill(write_checkpoint(recorded(headers[name]), path, fill="zero", blocks=blocks))
        yield files


def _fill(path: Path) -> None:
    """Overwrite the zeros of a checkpoint by random weights, codes without NaN, and scales of 0.001."""
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(_BLOCK // 2).normal_(std=0.02, generator=generator).to(torch.bfloat16)
    codes = torch.randint(0, 0x7F, (_BLOCK,), dtype=torch.uint8, generator=generator)
    blocks = {
        "BF16": values.view(torch.uint8),
        "F8_E4M3": codes | (torch.randint(0, 2, (_BLOCK,), dtype=torch.uint8, generator=generator) << 7),
        "F32": torch.full((_BLOCK // 4,), 1e-3).view(torch.uint8),
    }
    with path.open("r+b", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] not in blocks:
                continue
            first, last = tensor["data_offsets"]
            file.seek(8 + length + first)
            _write(file, blocks[tensor["dtype"]], first // 4 * 4 % (_BLOCK // 2), last - first)


def _write(file: Any, block: torch.Tensor, offset: int, count: int) -> None:
    """Write bytes of a block from an offset on, again and again."""
    view = memoryview(block.numpy())  # type: ignore[arg-type]
    while count:
        part = view[offset : offset + count]
        file.write(part)
        count -= len(part)
        offset = 0


def _device_bytes() -> int:
    """What the driver says is taken of the GPU's memory."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _run(name: str, path: Path) -> dict[str, Any]:
    _, run, settings = CONTENDERS[name]
    import_module("slipcast.engine.loader")
    import_module("slipcast.engine.planner")
    model_class(path)
    Device("cuda")
    print(_READY, flush=True)
    sys.stdin.readline()
    with Peak(_device_bytes) as peak:
        found = run(path, dict(settings))
    return {**found, "device_peak": peak.above, "device_left": peak.left}


def _sweep(reader: str, path: Path) -> dict[str, Any]:
    """Seconds of loads under other settings, in one process that has loaded before."""
    import slipcast
    from slipcast.engine import reading

    def seconds(settings: Mapping[str, int]) -> tuple[float, int | None]:
        chosen = dict(settings)
        reading._PREFETCH_WINDOWS = chosen.pop("windows", reading._PREFETCH_WINDOWS)
        began = perf_counter()
        loaded = slipcast.load(path, **{**_STORAGE, "reader": reader, **chosen})
        torch.cuda.synchronize()
        taken = perf_counter() - began
        peak = loaded.report.device_peak
        return taken, None if peak is None else peak - loaded.report.resident

    grid = _SWEEPS[reader]
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    seconds(combinations[0])
    found = []
    for settings in combinations:
        runs = [seconds(settings) for _ in range(2)]
        found.append({**settings, "seconds": min(run[0] for run in runs), "beside": runs[0][1]})
    return {"sweep": sorted(found, key=lambda each: each["seconds"])}


def _profile(name: str, path: Path) -> dict[str, Any]:
    """Where the caller's thread spends its first load, by function."""
    import cProfile
    import io
    import pstats

    import slipcast
    import slipcast.engine.loader
    import slipcast.engine.planner

    model_class(path)
    Device("cuda")
    profile = cProfile.Profile()
    profile.enable()
    slipcast.load(path, **CONTENDERS[name][2])
    torch.cuda.synchronize()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    pstats.Stats(profile, stream=text).sort_stats("cumtime").print_stats(40)
    return {"profile": text.getvalue()}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    runs: dict[str, list[dict[str, Any]]] = result["runs"]
    medians = {name: median(run["seconds"] for run in done) for name, done in runs.items()}
    rows = [_row(name, done, medians, result["bytes"][CONTENDERS[name][0]]) for name, done in runs.items()]
    columns = ("load", "seconds", "all runs", "GB/s", "diffusers /", "safetensors /")
    memory = ("device peak", "beside resident", "left", "predicted", "host peak", "predicted")
    print_table((*columns, *(f"{name}, MiB" for name in memory)), rows)
    for reader, found in result["sweeps"].items():
        print(f"\n{reader}, in a warm process:\n")
        columns = [name for name in found[0] if name not in ("seconds", "beside")]
        print_table(
            (*columns, "seconds", "device beside resident, MiB"),
            [
                (*(str(each[name]) for name in columns), f"{each['seconds']:.3f}", _mib(each["beside"]))
                for each in found
            ],
        )
    for name, text in result["profiles"].items():
        print(f"\n{name}:\n{text}")


def _row(name: str, done: Sequence[Mapping[str, Any]], medians: Mapping[str, float], nbytes: int) -> tuple[str, ...]:
    most = {key: max((run.get(key) or 0) for run in done) for key in ("device_peak", "peak", "device_left")}
    first, seconds = done[0], medians[name]
    resident = first["resident"] if CONTENDERS[name][2]["device"] != "cpu" else 0
    ratios = [f"{medians[other] / seconds:.2f}" if other in medians else "-" for other in ("diffusers", "safetensors")]
    return (
        name,
        f"{seconds:.2f}",
        " ".join(f"{run['seconds']:.2f}" for run in done),
        f"{nbytes / seconds / 1e9:.1f}",
        *ratios,
        _mib(most["device_peak"]),
        _mib(most["device_peak"] - resident),
        _mib(most["device_left"] - resident),
        _mib(first.get("predicted_device_peak")),
        _mib(most["peak"]),
        _mib(first.get("predicted_host_peak")),
    )


def _mib(count: float | None) -> str:
    return "-" if count is None else f"{count / MIB:,.0f}"


def main() -> None:
    """Be one contender, or measure all."""
    tasks: dict[str, Callable[[str, Path], dict[str, Any]]] = {"run": _run, "sweep": _sweep, "profile": _profile}
    if len(sys.argv) == 4 and sys.argv[1] in tasks:
        print(json.dumps(tasks[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    options = parser.parse_args()
    result = measure(options)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
