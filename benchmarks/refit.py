"""Measure what it costs before each picture to decide whether it fits, on the demonstration's pipeline and the CPU.

A collection of garbage is what the decision needs where free memory is short; here it is measured by itself.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter

from measuring import ROOT, print_table

import slipcast
from slipcast.engine.pipeline.apply_policies import refit_
from slipcast.engine.pipeline.generate import generate
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.policy.sizes import ImageSize

PIPELINE = ROOT / "slipcast" / "demo" / "pipeline"


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median duration of a call."""
    times = []
    for _ in range(repeats):
        began = perf_counter()
        call()
        times.append(1e3 * (perf_counter() - began))
    return median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="of each (%(default)s)")
    repeats = parser.parse_args().repeats
    pipe = slipcast.pipeline(PIPELINE, device="cpu", dtype="float32")
    size, other = ImageSize(64, 64), ImageSize(96, 64)
    request = GenerationRequest("seven", steps=2, width=64, height=64)
    generate(pipe, request)

    def both() -> None:
        refit_(pipe, other)
        refit_(pipe, size)

    rows = [
        ("of the size drawn before", milliseconds(lambda: refit_(pipe, size), repeats)),
        ("of another size", milliseconds(both, repeats) / 2),
        ("a collection of garbage", milliseconds(gc.collect, repeats)),
        ("a picture of two steps", milliseconds(lambda: generate(pipe, request), repeats)),
    ]
    print_table(("", "ms"), [(name, f"{value:.2f}") for name, value in rows])


if __name__ == "__main__":
    main()
