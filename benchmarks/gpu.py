"""Measure on a GPU: one program for all, as a machine without anything else is rented for it.

    python benchmarks/gpu.py load                      # loads of a full-size checkpoint, against others
    python benchmarks/gpu.py step                      # a forward of a full-size denoiser, in every precision
    python benchmarks/gpu.py kernels                   # the fused kernels, over the sizes of their tiles
    python benchmarks/gpu.py crossover                 # which precision multiplies fastest, by rows and layer sizes
    python benchmarks/gpu.py activations               # what activations take for each token and pixel, by family
    python benchmarks/gpu.py memory                    # a pipeline in each memory tier: peaks and the time of a step
    python benchmarks/gpu.py all --json OUT

Each prints tables; ``--json`` writes the same as data, after each part anew, so that what was measured is kept should a
later part fail.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_machine import machine, print_machine

PARTS = {
    "load": "gpu_load",
    "step": "gpu_step",
    "kernels": "gpu_kernels",
    "crossover": "gpu_crossover",
    "activations": "gpu_activations",
    "memory": "gpu_memory",
}
"""Each module has ``add_options(parser)``, ``measure(options)`` and ``show(result)``."""


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name in (*PARTS, "all"):
        options = parts.add_parser(name, help="all of them" if name == "all" else _description(PARTS[name]))
        options.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
        for chosen in _chosen(name):
            group = options.add_argument_group(chosen)
            import_module(PARTS[chosen]).add_options(group)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    print_machine(result["machine"])
    for name in _chosen(options.part):
        module = import_module(PARTS[name])
        result[name] = module.measure(options)
        print()
        module.show(result[name])
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")


def _chosen(part: str) -> list[str]:
    return list(PARTS) if part == "all" else [part]


def _description(module: str) -> str:
    return (import_module(module).__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
