"""Measure a full-size load in fp8 storage, against diffusers on the same file.

    python benchmarks/load.py                  # a sparse file of zeros after a recorded header, to the CPU
    python benchmarks/load.py --fill normal    # the same with values: takes its full size on disk
    python benchmarks/load.py --device cuda    # to the GPU, also against safetensors' load_file to it
    python benchmarks/load.py --set fp8=off    # nothing is cast: slipcast, safetensors and diffusers map the file

The contenders are ``slipcast.load`` with ``fp8="storage"`` and, of the same model class, ``from_single_file``, followed
by ``enable_layerwise_casting`` to float8_e4m3fn and, for a GPU, ``to``; both compute in bfloat16. Each run is a process
of its own, in turn, and its clock starts when everything it needs is imported and the GPU has been used once. Before
each run the file is read once, so that it comes from the page cache as far as memory allows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measuring import (
    MIB,
    Clock,
    Peak,
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
    import slipcast.engine.planned_load
    import slipcast.engine.planner
    import slipcast.engine.saved_plan

    model_class(path)
    device = Device(settings["device"])
    with Peak() as peak, Clock() as clock:
        loaded = slipcast.load(path, **settings)
        device.wait()
    return {
        **clock.read,
        "peak": peak.above,
        "device_peak": device.peak,
        "resident": count_bytes(loaded.model),
        "predicted": loaded.report.plan.bytes.resident,
        "predicted_device_peak": loaded.report.plan.bytes.device_peak,
        "predicted_host_peak": loaded.report.plan.bytes.host_peak_anonymous,
        "reader": loaded.report.summary(),
        "differences": list(loaded.report.differences),
    }


class Device:
    """Where a model goes; a GPU's context is made at once, so that no clock counts it."""

    def __init__(self, name: str) -> None:
        import torch

        self._cuda = torch.cuda if name.startswith("cuda") else None
        self.name = name
        if self._cuda is not None:
            torch.zeros(1, device=name)
            self.wait()
            self._cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Wait until everything is done."""
        if self._cuda is not None:
            self._cuda.synchronize()

    @property
    def peak(self) -> int | None:
        """The most bytes of tensors that the GPU held; None on the CPU."""
        return None if self._cuda is None else self._cuda.max_memory_allocated()


def run_safetensors(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Load the file's tensors as they are, and nothing else."""
    from safetensors.torch import load_file

    device = Device(settings["device"])
    with Peak() as peak, Clock() as clock:
        tensors = load_file(path, device=settings["device"])
        device.wait()
    resident = sum(tensor.nbytes for tensor in tensors.values())
    return {**clock.read, "peak": peak.above, "device_peak": device.peak, "resident": resident}


def run_diffusers(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Load with diffusers' own single-file loading, then let it cast the layers; imports first."""
    import torch

    import slipcast

    kind = model_class(path)
    with tempfile.TemporaryDirectory() as folder:
        config = {**slipcast.inspect(path).config, "_class_name": kind.__name__}
        Path(folder, "config.json").write_text(json.dumps(config))
        device = Device(settings["device"])
        with Peak() as peak, Clock() as clock:
            model = kind.from_single_file(path, config=folder, torch_dtype=torch.bfloat16)
            if settings["fp8"] == "storage":
                model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
            model.to(device.name)
            device.wait()
    return {
        **clock.read,
        "peak": peak.above,
        "device_peak": device.peak,
        "resident": count_bytes(model),
    }


CONTENDERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "slipcast": run_slipcast,
    "diffusers": run_diffusers,
    "safetensors": run_safetensors,
}
SETTINGS = {"device": "cpu", "dtype": "bfloat16", "fp8": "storage"}


def count_bytes(model: Any) -> int:
    """Elements x item size over all parameters and buffers."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in _tensors(model)}.values())


def _tensors(model: Any) -> list[Any]:
    return [*model.parameters(), *model.buffers()]


def contenders(settings: dict[str, Any]) -> list[str]:
    """Who takes part: where the CPU casts, safetensors would do nothing, since it maps the file."""
    maps = settings["device"] == "cpu" and settings["fp8"] == "storage"
    return [name for name in CONTENDERS if name != "safetensors" or not maps]


def measure(path: Path, repeats: int, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Run the contenders in turn, each in fresh processes."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders(settings)}
    for _ in range(repeats):
        for name, of_contender in runs.items():
            read_through(path)
            chosen = [f"--set={key}={value}" for key, value in settings.items()]
            of_contender.append(in_fresh_process(__file__, "--file", path, "--contender", name, *chosen))
    return runs


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds and the highest peaks of one contender's runs."""
    peaks = [run["device_peak"] for run in runs if run.get("device_peak") is not None]
    return {
        "seconds": median(run["seconds"] for run in runs),
        "all_seconds": [run["seconds"] for run in runs],
        "user": median(run["user"] for run in runs),
        "system": median(run["system"] for run in runs),
        "peak": max(run["peak"] for run in runs),
        "device_peak": max(peaks) if peaks else None,
        "resident": runs[0]["resident"],
        "predicted": runs[0].get("predicted"),
    }


def print_result(result: dict[str, Any]) -> None:
    """Print the table."""
    names = contenders(result["settings"])
    each = [result[name] for name in names]
    size = f"{result['file_bytes'] / 1e9:.1f} GB"
    device = result["settings"]["device"]
    storage = result["settings"]["fp8"] == "storage"
    precision, casting = ("fp8 storage", " and `enable_layerwise_casting`") if storage else ("its own dtype", "")
    print(f"`slipcast load` of {result['file']} ({size}, {result['fill']}) to {device} in {precision},")
    print(f"against diffusers' `from_single_file`{casting}, and, where it does something, safetensors' `load_file`")
    print(f"({result['repeats']} runs each, file warm):\n")
    rows = [
        ("seconds after imports, median", *(f"{one['seconds']:.2f}" for one in each)),
        ("seconds, all runs", *(" ".join(f"{run:.2f}" for run in one["all_seconds"]) for one in each)),
        ("processor seconds, user and system, median", *(f"{one['user']:.2f} {one['system']:.2f}" for one in each)),
        ("times as long as slipcast", *(f"{one['seconds'] / each[0]['seconds']:.2f}" for one in each)),
        ("anonymous host memory, peak above imports, MiB", *(_mib(one["peak"]) for one in each)),
        ("device memory, peak, MiB", *(_mib(one["device_peak"]) for one in each)),
        ("resident, counted, MiB", *(_mib(one["resident"]) for one in each)),
        ("resident, counted, bytes", *(f"{one['resident']:,}" for one in each)),
        ("resident, predicted, bytes", *(f"{one['predicted']:,}" if one["predicted"] else "-" for one in each)),
    ]
    print_table(("", *names), rows)
    print_circumstances(result["circumstances"])


def _mib(count: float | None) -> str:
    return "-" if count is None else f"{count / MIB:,.1f}"


def main() -> None:
    """Measure and print, or be one contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_file_options(parser)
    parser.add_argument("--device", default=SETTINGS["device"], help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of slipcast's")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = {**SETTINGS, "device": arguments.device, **parse_assignments(arguments.set)}
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
