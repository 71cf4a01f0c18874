"""Which way of multiplying is fastest, by rows and sizes of the layer: bf16, fp8 storage or fp8 compute.

Each layer is called as a model calls it, many times in a row. Two times are taken: of the calls from Python, in which a
small layer waits for its launches, and of the GPU alone, from a recorded graph with a cold cache.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu_machine import gpu_ms, graph_ms
from measuring import print_table
from torch import Tensor, nn

from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.layers import quantise_module_

_ROWS = (1, 16, 128, 512, 2048, 8192)
_LAYERS = (
    *((256, 256), (512, 512), (1024, 1024), (2048, 2048), (3840, 3840)),
    *((3840, 64), (3840, 256), (3840, 512), (3840, 1024), (3840, 10240)),
    *((64, 3840), (256, 15360), (10240, 3840)),
)
"""Inputs, outputs."""
_CALLS = 30


def add_options(parser: Any) -> None:
    """No options."""


def measure(options: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001 - the call of every part
    """Measure all layers with all numbers of rows."""
    return {"lines": [line for layer in _LAYERS for line in _of_layer(*layer)]}


def _of_layer(inputs: int, outputs: int) -> list[dict[str, Any]]:
    plain = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    storage = quantise_module_(copy.deepcopy(plain), Float8("row"), torch.bfloat16)
    compute = enable_compute_(copy.deepcopy(storage), input_scale=None)  # type: ignore[arg-type]
    layers: dict[str, Callable[[Tensor], Tensor]] = {"bf16": plain, "storage": storage, "compute": compute}
    lines = []
    with torch.no_grad():
        for rows in _ROWS:
            given = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            work = {name: partial(layer, given) for name, layer in layers.items()}
            lines.append(
                {
                    "inputs": inputs,
                    "outputs": outputs,
                    "rows": rows,
                    "gpu_us": {name: 1e3 * graph_ms(each) for name, each in work.items()},
                    "called_us": {name: 1e3 * _called_ms(each) for name, each in work.items()},
                }
            )
    return lines


def _called_ms(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    return median(gpu_ms(work, _CALLS) for _ in range(3))


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows = []
    for line in result["lines"]:
        gpu, called = line["gpu_us"], line["called_us"]
        rows.append(
            (
                f"{line['inputs']} to {line['outputs']}, {line['rows']} rows",
                *(f"{us:.1f}" for us in gpu.values()),
                f"{gpu['bf16'] / gpu['storage']:.2f}",
                f"{gpu['bf16'] / gpu['compute']:.2f}",
                f"{gpu['storage'] / gpu['compute']:.2f}",
                *(f"{us:.1f}" for us in called.values()),
                min(called, key=lambda name: called[name]),
            )
        )
    ways = ("bf16", "storage", "compute")
    ratios = ("bf16 / storage", "bf16 / compute", "storage / compute")
    columns = (*(f"{way}, us on the GPU" for way in ways), *ratios, *(f"{way}, us called" for way in ways))
    print_table(("layer", *columns, "fastest called"), rows)
