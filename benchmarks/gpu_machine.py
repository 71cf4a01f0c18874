"""What the measurements on a GPU share: the machine, and the clock."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from statistics import median
from typing import Any

import torch
from torch import Tensor

_PACKAGES = ("torch", "triton", "diffusers", "safetensors")


def machine() -> dict[str, Any]:
    """The GPU, and the versions of what computes on it."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU: torch.cuda.is_available() is False")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "python": platform.python_version(),
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def print_machine(found: Mapping[str, Any]) -> None:
    """Print on what is measured."""
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "cuda", *_PACKAGES))
    print(f"{found['gpu']}, compute capability {found['capability']}, {found['memory_gib']} GiB; {versions}")


def gpu_ms(work: Callable[[], Any], times: int) -> float:
    """Milliseconds of one call, of several in a row between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def alternating_ms(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, times: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round; all take their turn in every round."""
    for work in contenders.values():
        for _ in range(warm_up):
            work()
    torch.cuda.synchronize()
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            measured[name].append(gpu_ms(work, times))
    return measured


def graph_ms(work: Callable[[], Any], times: int = 20, rounds: int = 3) -> float:
    """Milliseconds of one call on the GPU alone: it is recorded as a graph, so that no launch from Python counts.

    Between calls a buffer larger than the GPU's cache is overwritten, and what that takes is subtracted, so that inputs
    come from memory as they do in a model.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    with_work, without = _graph(lambda: (flush.zero_(), work()), times), _graph(flush.zero_, times)
    return median((gpu_ms(with_work.replay, 1) - gpu_ms(without.replay, 1)) / times for _ in range(rounds))


def _graph(work: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float32."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
