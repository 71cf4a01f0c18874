"""Measure a full-size load to the CPU in fp8 storage, against diffusers on the same file.

    python benchmarks/load.py                  # a sparse file of zeros after a recorded header
    python benchmarks/load.py --fill normal    # the same with values: takes its full size on disk

The contenders are ``slipcast.load`` with ``fp8="storage"`` and, of the same model class, ``from_single_file`` followed
by ``enable_layerwise_casting`` to float8_e4m3fn; both compute in bfloat16. Each run is a process of its own, in turn,
and its clock starts when everything it needs is imported. Before each run the file is read once, so that it comes from
the page cache as far as memory allows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from measuring import (
    MIB,
    AnonymousPeak,
    add_file_options,
    circumstances,
    full_size_file,
    in_fresh_process,
    model_class,
    print_circumstances,
    print_table,
    read_through,
)

from slipcast.registry.settings import parse_assignments


def run_slipcast(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Load with slipcast; imports first."""
    import slipcast
    import slipcast.engine.loader
    import slipcast.engine.planner

    model_class(path)
    with AnonymousPeak() as peak:
        began = perf_counter()
        loaded = slipcast.load(path, **settings)
        seconds = perf_counter() - began
    return {
        "seconds": seconds,
        "peak": peak.above,
        "resident": count_bytes(loaded.model),
        "predicted": loaded.report.plan.bytes.resident,
        "differences": list(loaded.report.differences),
    }


def run_diffusers(path: Path, settings: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - its own are fixed
    """Load with diffusers' own single-file loading, then let it cast the layers; imports first."""
    import torch

    import slipcast

    kind = model_class(path)
    with tempfile.TemporaryDirectory() as folder:
        config = {**slipcast.inspect(path).config, "_class_name": kind.__name__}
        Path(folder, "config.json").write_text(json.dumps(config))
        with AnonymousPeak() as peak:
            began = perf_counter()
            model = kind.from_single_file(path, config=folder, torch_dtype=torch.bfloat16)
            model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
            seconds = perf_counter() - began
    return {"seconds": seconds, "peak": peak.above, "resident": count_bytes(model)}


CONTENDERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "slipcast": run_slipcast,
    "diffusers": run_diffusers,
}
SETTINGS = {"device": "cpu", "dtype": "bfloat16", "fp8": "storage"}


def count_bytes(model: Any) -> int:
    """Elements x item size over all parameters and buffers."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in _tensors(model)}.values())


def _tensors(model: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def measure(path: Path, repeats: int, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Run the contenders in turn, each in fresh processes."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(repeats):
        for name, of_contender in runs.items():
            read_through(path)
            chosen = [f"--set={key}={value}" for key, value in settings.items()]
            of_contender.append(in_fresh_process(__file__, "--file", path, "--contender", name, *chosen))
    return runs


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds and the highest peak of one contender's runs."""
    return {
        "seconds": median(run["seconds"] for run in runs),
        "all_seconds": [run["seconds"] for run in runs],
        "peak": max(run["peak"] for run in runs),
        "resident": runs[0]["resident"],
        "predicted": runs[0].get("predicted"),
    }


def print_result(result: dict[str, Any]) -> None:
    """Print the table."""
    ours, theirs = result["slipcast"], result["diffusers"]
    size = f"{result['file_bytes'] / 1e9:.1f} GB"
    print(f"`slipcast load` of {result['file']} ({size}, {result['fill']}) to the CPU in fp8 storage, against")
    print(f"diffusers' `from_single_file` and `enable_layerwise_casting` ({result['repeats']} runs each, file warm):\n")
    rows = [
        ("seconds after imports, median", *_pair(ours, theirs, "seconds", lambda value: f"{value:.2f}")),
        ("seconds, all runs", *(" ".join(f"{one:.2f}" for one in each["all_seconds"]) for each in (ours, theirs)), ""),
        ("anonymous host memory, peak above imports, MiB", *_pair(ours, theirs, "peak", _mib)),
        ("above the resident bytes, MiB", *(_mib(each["peak"] - each["resident"]) for each in (ours, theirs)), ""),
        ("resident, counted, MiB", *_pair(ours, theirs, "resident", _mib)),
        ("resident, counted, bytes", *(f"{each['resident']:,}" for each in (ours, theirs)), ""),
        ("resident, predicted, bytes", f"{ours['predicted']:,}", "-", ""),
    ]
    print_table(("", "slipcast", "diffusers", "slipcast / diffusers"), rows)
    print_circumstances(result["circumstances"])


def _pair(ours: dict[str, Any], theirs: dict[str, Any], name: str, show: Callable[[float], str]) -> tuple[str, ...]:
    return show(ours[name]), show(theirs[name]), f"{ours[name] / theirs[name]:.2f}"


def _mib(count: float) -> str:
    return f"{count / MIB:,.1f}"


def main() -> None:
    """Measure and print, or be one contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_file_options(parser)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of slipcast's")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = {**SETTINGS, **parse_assignments(arguments.set)}
    if arguments.contender:
        print(json.dumps(CONTENDERS[arguments.contender](arguments.file, settings)))
        return
    before = circumstances()
    with full_size_file(arguments) as path:
        runs = measure(path, arguments.repeats, settings)
        result = {
            "file": path.name,
            "file_bytes": path.stat().st_size,
            "fill": "as it is" if arguments.file else arguments.fill,
            "settings": settings,
            "repeats": arguments.repeats,
            **{name: summarise(of_contender) for name, of_contender in runs.items()},
            "circumstances": before,
        }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result)


if __name__ == "__main__":
    main()
