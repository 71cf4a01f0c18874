"""Measure ``slipcast inspect`` of a full-size file as a whole process, against the import of its class from diffusers.

    python benchmarks/inspection.py

Both run in turn, warm: each once before the clock counts. Besides, one process inspects the file twice and counts what
the second time reads: no more than the file's header, and small files of settings.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from measuring import (
    MIB,
    add_file_options,
    circumstances,
    full_size_file,
    in_fresh_process,
    model_class_name,
    print_circumstances,
    print_table,
)


def measure(commands: Mapping[str, Sequence[str | Path]], repeats: int) -> dict[str, dict[str, Any]]:
    """Wall seconds and peak resident memory of commands as whole processes, run in turn."""
    for command in commands.values():
        run_whole(command)  # brings files into the page cache
    runs = [{name: run_whole(command) for name, command in commands.items()} for _ in range(repeats)]
    return {
        name: {
            "seconds": median(run[name][0] for run in runs),
            "all_seconds": [run[name][0] for run in runs],
            "peak": max(run[name][1] for run in runs),
        }
        for name in commands
    }


def run_whole(command: Sequence[str | Path]) -> tuple[float, int]:
    """Seconds and peak resident bytes of one process from its start to its end."""
    began = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024


def count_reads(path: Path) -> dict[str, Any]:
    """What a second inspection in this process reads, by any means that leads to the bytes of a file."""
    import slipcast

    slipcast.inspect(path)
    mapped: list[Any] = []
    sys.addaudithook(lambda event, details: mapped.append(details) if event == "mmap.__new__" else None)
    before = bytes_read()
    slipcast.inspect(path)
    return {
        "read": bytes_read() - before,
        "mapped": len(mapped),
        "native_readers": [name for name in ("torch", "safetensors", "numpy") if name in sys.modules],
    }


def bytes_read() -> int:
    """Bytes that this process has had from read calls (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def header_bytes(path: Path) -> int:
    """Bytes before the first weight."""
    with path.open("rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])


def print_result(result: dict[str, Any]) -> None:
    """Print the tables."""
    ours, theirs, reads = result["slipcast"], result["diffusers"], result["reads"]
    print(f"`slipcast inspect` of {result['file']} ({result['file_bytes'] / 1e9:.1f} GB) as a whole process, against")
    print(f"`from diffusers import {result['class']}` ({result['repeats']} runs each, warm):\n")
    rows = [
        (
            "seconds, median",
            f"{ours['seconds']:.3f}",
            f"{theirs['seconds']:.3f}",
            f"{ours['seconds'] / theirs['seconds']:.3f}",
        ),
        ("seconds, all runs", *(" ".join(f"{one:.3f}" for one in each["all_seconds"]) for each in (ours, theirs)), ""),
        ("resident memory, peak, MiB", *(f"{each['peak'] / MIB:.1f}" for each in (ours, theirs)), ""),
    ]
    print_table(("", "slipcast inspect", "the import", "ratio"), rows)
    print(f"\nA second inspection in one process: {reads['read']:,} bytes read, {reads['mapped']} files mapped.")
    print(f"The file's header has {result['header_bytes']:,} bytes, its weights {result['weight_bytes']:,}.")
    print(f"Libraries loaded that could read in other ways: {', '.join(reads['native_readers']) or 'none'}.")
    print_circumstances(result["circumstances"])


def main() -> None:
    """Measure and print, or be the process that counts its reads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_file_options(parser)
    parser.add_argument("--count-reads", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count_reads:
        print(json.dumps(count_reads(arguments.file)))
        return
    before = circumstances()
    with full_size_file(arguments) as path:
        name = model_class_name(path)
        commands = {
            "slipcast": (Path(sys.executable).with_name("slipcast"), "inspect", path),
            "diffusers": (sys.executable, "-c", f"from diffusers import {name}"),
        }
        result = {
            "file": path.name,
            "file_bytes": path.stat().st_size,
            "header_bytes": header_bytes(path),
            "weight_bytes": path.stat().st_size - header_bytes(path),
            "class": name,
            "repeats": arguments.repeats,
            **measure(commands, arguments.repeats),
            "reads": in_fresh_process(__file__, "--count-reads", "--file", path),
            "circumstances": before,
        }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result)


if __name__ == "__main__":
    main()
