"""Measure how fast rows become float8 codes on one core: by torch, by the compiled loops, by a cast without scales.

    python benchmarks/encode.py

Each dtype's weight is as large as a chunk of a load, so that it stays in a core's cache. The compiled loops need numba,
which is imported and compiles in a process of its own: once with an empty cache, once with what the first has left.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch
from measuring import circumstances, in_fresh_process, print_circumstances, print_table

from slipcast.engine.codecs import native
from slipcast.engine.codecs.base import CODES, SCALE
from slipcast.engine.codecs.float8 import Float8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COLUMNS = 400, 3840


def nanoseconds(work: Callable[[], object], repeats: int) -> float:
    """The least time for an element of some work on the whole weight."""
    least = float("inf")
    for _ in range(repeats + 1):
        began = perf_counter()
        work()
        least = min(least, perf_counter() - began)
    return least / (ROWS * COLUMNS) * 1e9


def measure(dtype: torch.dtype, repeats: int) -> dict[str, float | None]:
    """Nanoseconds for an element, of each way."""
    rows = (torch.randn(ROWS, COLUMNS) * 0.02).to(dtype)
    codec, scratch = Float8("row"), torch.empty(rows.numel())
    parts = {name: part.empty("cpu") for name, part in codec.parts((ROWS, COLUMNS)).items()}
    by_torch = nanoseconds(lambda: codec.encode_rows_into(rows, parts, scratch), repeats)
    compiled = None
    if native.prepare(dtype):
        compiled = nanoseconds(lambda: native.encode_rows(rows, parts[CODES], parts[SCALE]), repeats)
    return {
        "torch": by_torch,
        "compiled": compiled,
        "cast": nanoseconds(lambda: parts[CODES].copy_(rows), repeats),
    }


def preparing() -> list[float]:
    """Seconds until rows of bfloat16 can be encoded: the first time, and with a filled cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        return [in_fresh_process(__file__, "--prepare")["seconds"] for _ in range(2)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50, help="of each way; the fastest counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prepare:
        began = perf_counter()
        native.prepare(torch.bfloat16)
        print(json.dumps({"seconds": perf_counter() - began}))
        return
    torch.set_num_threads(1)
    before = circumstances()
    each = {str(dtype).removeprefix("torch."): measure(dtype, arguments.repeats) for dtype in DTYPES}
    first, again = preparing()
    if arguments.json:
        print(json.dumps({**each, "prepare": {"first": first, "again": again}, "circumstances": before}, indent=2))
        return
    print("Nanoseconds for an element, on one core:\n")
    print_table(
        ("to float8_e4m3fn with a scale for each row", "torch", "compiled", "torch's cast without scales"),
        [(name, *("-" if one is None else f"{one:.3f}" for one in figures.values())) for name, figures in each.items()],
    )
    print(f"\nTo import numba and compile: {first:.2f} s the first time, {again:.2f} s from its cache.")
    print_circumstances(before)


if __name__ == "__main__":
    main()
