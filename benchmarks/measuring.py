"""What the benchmarks share: full-size files after recorded headers, fresh processes, memory, and the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADER = "z-image-turbo--comfy-bf16"
MIB = 2**20

_PACKAGES = ("slipcast", "torch", "diffusers", "safetensors", "accelerate")
_BLOCK = 16 * MIB
_INTERVAL = 0.002


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose the file, and how often it is measured."""
    parser.add_argument("--header", default=HEADER, metavar="NAME", help="of tests/data/headers (%(default)s)")
    parser.add_argument(
        "--fill",
        choices=["sparse", "normal"],
        default="sparse",
        help="sparse: all zeros, no room taken on disk; normal: normally distributed weights (%(default)s)",
    )
    parser.add_argument("--folder", type=Path, help="where the file is made (a temporary folder)")
    parser.add_argument("--file", type=Path, help="take this file and make none")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contender, in turn (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


@contextmanager
def full_size_file(arguments: argparse.Namespace) -> Iterator[Path]:
    """The file that the options choose; one that is made for this goes again."""
    if arguments.file is not None:
        yield arguments.file
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from support.recorded import recorded, write_checkpoint

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        fill = "zero" if arguments.fill == "sparse" else "normal"
        yield write_checkpoint(recorded(arguments.header), Path(folder) / f"{arguments.header}.safetensors", fill=fill)


def model_class_name(path: Path) -> str:
    """The name in diffusers of the class that a checkpoint's family builds."""
    import slipcast
    from slipcast.registry.catalogue import load_catalogue

    package, _, name = load_catalogue()[slipcast.inspect(path).main.family].model.rpartition(".")
    if package != "diffusers":
        raise SystemExit(f"{path.name} is of a class of {package}, and the comparison is with diffusers")
    return name


def model_class(path: Path) -> Any:
    """The class that a checkpoint's family builds."""
    return getattr(import_module("diffusers"), model_class_name(path))


def read_through(path: Path) -> None:
    """Read a file once, so that as much of it as fits lies in the page cache."""
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def in_fresh_process(*arguments: str | Path) -> dict[str, Any]:
    """Run Python with these arguments; what it prints is JSON."""
    done = subprocess.run([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class Clock:
    """A context that takes the time of what runs in it.

    Attributes:
        read: ``seconds`` on the wall, and the ``user`` and ``system`` seconds of all threads of this process, which
            other programs on the machine change less.
    """

    def __enter__(self) -> Clock:
        self._began, self._spent = perf_counter(), os.times()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, spent = perf_counter() - self._began, os.times()
        self.read = {
            "seconds": seconds,
            "user": spent.user - self._spent.user,
            "system": spent.system - self._spent.system,
        }


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (Linux: RssAnon)."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")) * 1024


class Peak:
    """A context that samples how much of something is taken.

    Args:
        taken: says how much, in bytes.

    Attributes:
        above: the most, in bytes above what there was at the start.
        left: what is taken in the end beyond the start, in bytes.
    """

    def __init__(self, taken: Callable[[], int] = anonymous_bytes) -> None:
        self._taken = taken

    def __enter__(self) -> Peak:
        self.above = self.left = 0
        self._start = self._taken()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        self.left = self._taken() - self._start
        self.above = max(self.above, self.left)


def circumstances() -> dict[str, Any]:
    """Versions, processor and load of this machine."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        **versions,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in (columns, rules, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print(f"| {' | '.join(cells)} |")


def print_circumstances(before: dict[str, Any]) -> None:
    """Print on what was measured, and how busy the machine was before and after."""
    packages = ", ".join(f"{name} {before[name]}" for name in ("python", *_PACKAGES))
    after = " ".join(f"{load:.2f}" for load in os.getloadavg())
    print(f"\n{before['processor']}, {before['cores']} cores, {before['memory_gib']} GiB; {packages}.")
    print(f"Load average before: {' '.join(f'{load:.2f}' for load in before['load_average'])}; after: {after}.")
