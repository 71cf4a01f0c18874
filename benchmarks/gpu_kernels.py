"""The fused kernels over the sizes of their tiles, against plain torch; and what fast accumulation gains.

Times are the GPU's own: calls are recorded as a graph, and the GPU's cache is overwritten before each. GB/s count every
byte that has to be read or written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gpu_machine import graph_ms, relative_l2
from measuring import print_table
from torch import Tensor
from torch.nn import functional

from slipcast.engine.codecs.base import CODES, SCALE
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.kernels import plain
from slipcast.engine.kernels.dequantise_kernel import Tile, launch_dequantise, tile_for
from slipcast.engine.kernels.quantise_kernel import launch_quantise
from slipcast.engine.kernels.targets import reads_float8

_WEIGHTS = ((3840, 3840), (10240, 3840), (3840, 10240))
_ACTIVATIONS = ((4224, 3840), (4224, 10240))
_TILES = tuple(
    Tile(elements // columns, columns, warps)
    for elements, warps in ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (16384, 8))
    for columns in (256, 1024)
)
_WARPS = (1, 2, 4, 8, 16)


def add_options(parser: Any) -> None:
    """No options."""


def measure(options: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001 - the call of every part
    """Measure all kernels."""
    torch.manual_seed(0)
    multiplies = reads_float8(torch.device("cuda", 0))
    return {
        "copy": [_copied(*shape) for shape in _WEIGHTS],
        "dequantise": [line for shape in _WEIGHTS for line in _dequantised(*shape)],
        "quantise": [line for shape in _ACTIVATIONS for line in _quantised(*shape)],
        "multiply": [line for shape in _WEIGHTS if multiplies for line in _multiplied(*shape)],
    }


def _copied(outputs: int, inputs: int) -> dict[str, Any]:
    """What moving as many bytes takes in torch's own copy."""
    source = torch.empty(outputs * inputs * 3 // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _line((outputs, inputs), "copy", lambda: target.copy_(source), 2 * source.numel())


def _dequantised(outputs: int, inputs: int) -> list[dict[str, Any]]:
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    parts = Float8("row").encode(weight)
    codes, scale, moved = parts[CODES], parts[SCALE], 3 * outputs * inputs
    rows = torch.randn(4224, inputs, device="cuda", dtype=torch.bfloat16)
    alone = graph_ms(lambda: functional.linear(rows, weight))
    lines = []

    def measured(name: str, dequantise: Callable[[], Tensor]) -> None:
        line = _line((outputs, inputs), name, dequantise, moved)
        line["added_to_product_us"] = 1e3 * (graph_ms(lambda: functional.linear(rows, dequantise())) - alone)
        lines.append(line)

    measured("plain", lambda: plain.dequantise(codes, scale[:, None], torch.bfloat16))
    measured("cast without scale", lambda: codes.to(torch.bfloat16))
    chosen = tile_for(inputs)
    for tile in dict.fromkeys((chosen, *_TILES)):
        name = f"{tile.rows} x {tile.columns}, {tile.warps} warps{', chosen' if tile == chosen else ''}"
        measured(name, lambda tile=tile: launch_dequantise(codes, scale, torch.bfloat16, tile))  # type: ignore[misc]
    return lines


def _quantised(count: int, columns: int) -> list[dict[str, Any]]:
    rows = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
    shape, moved = (count, columns), 3 * count * columns
    lines = [_line(shape, "plain", lambda: plain.quantise_rows(rows), moved)]
    for warps in (None, *_WARPS):
        name = "chosen" if warps is None else f"{warps} warps"
        lines.append(_line(shape, name, lambda warps=warps: _quantise(rows, warps), moved))  # type: ignore[misc]
    return lines


def _quantise(rows: Tensor, warps: int | None) -> Tensor:
    return launch_quantise(rows, None, 1 / plain.LARGEST, plain.SMALLEST_SCALE, warps)[0]


def _multiplied(outputs: int, inputs: int) -> list[dict[str, Any]]:
    """A product in bf16 and in float8 under scales of rows, with and without fast accumulation."""
    weight = torch.randn(outputs, inputs, device="cuda") * 0.02
    rows = torch.randn(4224, inputs, device="cuda", dtype=torch.bfloat16)
    codes, scale = plain.quantise_rows(rows)
    parts = Float8("row").encode(weight)
    expected = rows.float() @ weight.t()
    small = weight.bfloat16()

    def product(fast: bool) -> Tensor:
        right, of_columns = parts[CODES].t(), parts[SCALE].view(1, -1)
        return torch._scaled_mm(codes, right, scale, of_columns, out_dtype=torch.bfloat16, use_fast_accum=fast)

    contenders: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: functional.linear(rows, small),
        "float8": lambda: product(False),
        "float8, fast accumulation": lambda: product(True),
    }
    lines = []
    for name, work in contenders.items():
        line = _line((outputs, inputs), name, work, 0)
        line["relative_l2"] = relative_l2(work(), expected)
        lines.append(line)
    return lines


def _line(shape: tuple[int, int], name: str, work: Callable[[], Any], moved: int) -> dict[str, Any]:
    milliseconds = graph_ms(work)
    return {"shape": shape, "name": name, "us": 1e3 * milliseconds, "gb_per_s": moved / milliseconds / 1e6}


def show(result: dict[str, Any]) -> None:
    """Print a table of each kernel."""
    for title, lines in result.items():
        if not lines:
            continue
        print(f"{title}:\n")
        further = [key for key in ("added_to_product_us", "relative_l2") if key in lines[0]]
        rows = [
            (
                f"{line['shape'][0]} x {line['shape'][1]}, {line['name']}",
                f"{line['us']:.1f}",
                f"{line['gb_per_s']:,.0f}" if line["gb_per_s"] else "-",
                *(f"{line[key]:.4g}" for key in further),
            )
            for line in lines
        ]
        print_table(("", "us", "GB/s", *further), rows)
        print()
