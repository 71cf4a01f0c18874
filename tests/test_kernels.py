"""The operators that quantise and dequantise rows: torch takes them for operators, on a CPU they are plain torch."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.kernels import operators, plain, plain_nvfp4, targets
from slipcast.engine.layers import quantise_module_
from support.number_formats import bytes_of

OPERATORS = torch.ops.slipcast


def activations(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and bytes_of(actual).tobytes() == bytes_of(expected).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (1, 7), (0, 16)], ids=str)
def test_operators_are_sound_and_compute_what_plain_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, scale = activations(*shape).to(dtype), torch.tensor(0.01)
    codes, of_rows = OPERATORS.quantise_rows(rows)
    assert same_bits(codes, plain.quantise_rows(rows)[0])
    assert same_bits(of_rows, plain.quantise_rows(rows)[1])
    assert same_bits(OPERATORS.quantise_under(rows, scale), plain.quantise_under(rows, scale))
    values = OPERATORS.dequantise_rows(codes, of_rows.flatten(), dtype)
    assert same_bits(values, plain.dequantise(codes, of_rows, dtype))
    torch.library.opcheck(OPERATORS.quantise_rows.default, (rows,))
    torch.library.opcheck(OPERATORS.quantise_under.default, (rows, scale))
    integers = torch.ones(shape, dtype=torch.int8)
    torch.library.opcheck(OPERATORS.dequantise_rows.default, (integers, of_rows.flatten(), dtype))
    packed, of_all = torch.ones(shape[0], 8, dtype=torch.uint8), torch.tensor(0.5)
    blocks = torch.ones(shape[0], 1).to(plain.FLOAT8)
    utilities = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # float8 can't be compared
    given = (packed, blocks, of_all, shape[0], 16, False, dtype)
    torch.library.opcheck(OPERATORS.dequantise_nvfp4.default, given, test_utils=utilities)


@pytest.fixture
def as_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Call the operators on the CPU too, where they compute plainly, and say which were called."""
    called: list[str] = []
    monkeypatch.setattr(operators, "_fused", lambda *_, **__: True)
    plainly = [(plain, "quantise_rows"), (plain, "quantise_under"), (plain, "dequantise"), (plain_nvfp4, "dequantise")]
    for module, name in plainly:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, n=name, o=original: called.append(n) or o(*given))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield called
    torch._dynamo.reset()


def layer_of(codec: Codec, compute: bool = False, static: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    layer = quantise_module_(nn.Linear(64, 32).requires_grad_(False), codec, torch.bfloat16)
    if compute:
        enable_compute_(layer, input_scale=None if static is None else torch.tensor(static))
    return layer


LAYERS = {
    "storage": (lambda: layer_of(Float8("row")), "dequantise"),
    "storage under one scale": (lambda: layer_of(Float8("tensor")), "dequantise"),
    "storage under scales of blocks": (lambda: layer_of(Float8("block", block=16)), "dequantise"),
    "int8": (lambda: layer_of(Int8("row")), "dequantise"),
    "nvfp4": (lambda: layer_of(NVFP4("comfy")), "dequantise"),
    "compute": (lambda: layer_of(Float8("row"), compute=True), "quantise_rows"),
    "compute under a static scale": (lambda: layer_of(Float8("row"), True, 0.02), "quantise_under"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_call_them_and_compile_with_them_for_any_number_of_rows(kind: str, as_operators: list[str]) -> None:
    make, expected = LAYERS[kind]
    layer = make()
    given = [activations(rows, 64, seed=rows).bfloat16() for rows in (4, 7, 19)]
    results = [layer(rows) for rows in given]
    assert set(as_operators) == {expected}
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, result in zip(given, results, strict=True):
        assert torch.equal(compiled(rows), result)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_compute_the_same_with_and_without_them(kind: str, as_operators: list[str]) -> None:
    layer, given = LAYERS[kind][0](), activations(5, 64).bfloat16()
    result = layer(given)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(operators, "_fused", lambda *_, **__: False)
        assert torch.equal(layer(given), result)


def test_compiled_code_calls_kernels_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(operators, "runs_kernels", lambda _device: True)
    for reads_float8 in (False, True):
        monkeypatch.setattr(operators, "reads_float8", lambda _device, answer=reads_float8: answer)
        torch._dynamo.reset()
        with FakeTensorMode():
            fake = activations(4, 64)
        torch.compile(operators.quantise_rows, fullgraph=True, backend=keep)(fake)
        called = any("slipcast.quantise_rows" in str(node.target) for node in graphs[-1].graph.nodes)
        assert called is not reads_float8


class Called(TorchDispatchMode):
    """The operators that are called, of which plain torch computes the results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slipcast":
            self.names.append(func._opname)
            return {"quantise_rows": plain.quantise_rows, "dequantise_rows": by_rows}[func._opname](*args)
        return func(*args, **(kwargs or {}))


def by_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return plain.dequantise(codes, scale.view(-1, 1), dtype)


@pytest.mark.parametrize("reads_float8", [False, True])
def test_outside_compiled_code_kernels_are_called_where_they_run(
    reads_float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "reads_float8", lambda _device: reads_float8)
    for runs in (False, True):
        monkeypatch.setattr(operators, "runs_kernels", lambda _device, answer=runs: answer)
        with Called() as called:
            operators.quantise_rows(activations(4, 64))
            operators.quantise_rows(activations(4, 64).double(), torch.tensor(0.1))
            with operators.without_kernels():
                operators.quantise_rows(activations(4, 64))
        assert called.names == (["quantise_rows"] if runs else [])


CODES = torch.arange(24, dtype=torch.int8).view(4, 6)


@pytest.mark.parametrize(
    ("codes", "scale", "dtype", "fused"),
    [
        (CODES, torch.rand(4, 1), torch.float32, True),
        (CODES, torch.rand(1, 1), torch.float32, True),
        (CODES[:1], torch.rand(1, 1), torch.float32, True),
        (CODES.view(4, 2, 3), torch.rand(4, 1, 1), torch.bfloat16, True),
        (CODES.view(4, 2, 3), torch.rand(1, 2, 1), torch.bfloat16, False),
        (CODES.view(4, 2, 3), torch.rand(4, 2, 1), torch.bfloat16, False),
        (CODES.view(2, 2, 6), torch.rand(1, 2, 1), torch.bfloat16, False),
        (CODES.t(), torch.rand(6, 1), torch.float32, False),
        (CODES, torch.rand(4, 1), torch.float64, False),
        (CODES.float(), torch.rand(4, 1), torch.float32, False),
        (CODES.float().to(torch.float8_e5m2), torch.rand(4, 1), torch.float32, False),
    ],
)
def test_a_kernel_dequantises_only_what_it_can(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "runs_kernels", lambda _device: True)
    with Called() as called:
        values = operators.dequantise(codes, scale, dtype)
    assert called.names == (["dequantise_rows"] if fused else [])
    assert torch.equal(values, plain.dequantise(codes, scale, dtype))


@pytest.mark.parametrize(
    ("capability", "runs", "reads", "writes"),
    [
        ((7, 0), False, False, False),
        ((7, 5), True, False, False),
        ((8, 6), True, False, False),
        ((8, 9), True, True, False),
        ((9, 0), True, True, True),
        ((12, 0), True, True, True),
        ("amd", True, False, False),
    ],
)
def test_a_card_gets_the_kernels_that_compile_for_it(
    capability: Any, runs: bool, reads: bool, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(targets, "_is_amd", lambda: capability == "amd")
    monkeypatch.setattr(targets, "_capability", lambda _device: capability)
    monkeypatch.setattr(targets, "_has_triton", lambda: True)
    found = (targets.runs_kernels(card), targets.reads_float8(card), targets.writes_float8(card))
    assert found == (runs, reads, writes)
    monkeypatch.setattr(targets, "_has_triton", lambda: False)
    assert not targets.runs_kernels(card)
    assert not targets.runs_kernels(torch.device("cpu"))


def test_without_triton_and_on_a_cpu_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, torch; from torch import nn; from slipcast.engine.layers import quantise_module_\n"
        "from slipcast.engine.codecs.float8 import Float8\n"
        "layer = quantise_module_(nn.Linear(16, 16).requires_grad_(False), Float8('row'), torch.float32)\n"
        "layer(torch.ones(1, 16)); torch.ops.slipcast.quantise_rows(torch.ones(2, 16))\n"
        "sys.exit(any('_kernel' in name for name in sys.modules if name.startswith('slipcast.engine.kernels.')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_give_the_same_bits_in_tritons_interpreter() -> None:
    """In a process of its own: how Triton runs kernels is settled when they are defined."""
    program = Path(__file__).parent / "support" / "interpreted_kernels.py"
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=interpreted, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared" in done.stdout
