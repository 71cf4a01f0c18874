"""fp8 compute on a real GPU against its emulation on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.devices import resolve_device
from slipcast.engine.fp8_compute import Float8ComputeLinear, enable_compute_
from slipcast.engine.fp8_probe import probe_fp8
from slipcast.engine.layers import quantise_module_
from support.number_formats import relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

INPUTS, OUTPUTS = 256, 96


@pytest.fixture(autouse=True)
def multiplies_float8() -> None:
    probe = probe_fp8(resolve_device("cuda")[0])
    if not probe.ok:
        pytest.skip(probe.reason)


def compute_layer(
    granularity: str, dtype: torch.dtype, static: float | None = None, bias: bool = True
) -> Float8ComputeLinear:
    """A layer on the CPU, of outputs of very different sizes."""
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False)
    plain.weight.mul_(torch.logspace(-2, 1, OUTPUTS)[:, None])
    scale = None if static is None else torch.tensor(static)
    return enable_compute_(quantise_module_(plain, Float8(granularity), dtype), input_scale=scale)


def activations(rows: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes with large channels."""
    values = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-2, 1, rows)[:, None]
    values[:, ::64] *= 20
    return values.to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("static", [None, 0.05], ids=["dynamic", "static"])
@pytest.mark.parametrize("granularity", ["row", "tensor", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_computes_what_the_emulation_computes(
    dtype: torch.dtype, granularity: str, static: float | None, rows: int
) -> None:
    layer, given = compute_layer(granularity, dtype, static), activations(rows, dtype)
    expected = layer(given)
    result = layer.cuda()(given.cuda())
    assert result.dtype == dtype
    assert relative_l2(result, expected) <= 0.003


def test_no_rows_and_rows_of_zeros_are_taken() -> None:
    layer = compute_layer("row", torch.bfloat16, bias=False).cuda()
    assert layer(torch.empty(0, INPUTS, dtype=torch.bfloat16, device="cuda")).shape == (0, OUTPUTS)
    given = activations(40, torch.bfloat16).cuda()
    given[::2] = 0
    result = layer(given)
    assert bool((result[::2] == 0).all())
    assert bool(torch.isfinite(result).all())


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    layer, given = compute_layer("row", torch.bfloat16).cuda(), activations(32, torch.bfloat16).cuda()
    expected = layer(given)
    given[5, 7] = float("nan")
    given[9, 7] = float("inf")
    result = layer(given)
    assert not bool(torch.isfinite(result[[5, 9]]).any())
    others = [row for row in range(32) if row not in (5, 9)]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("static", [None, 0.05], ids=["dynamic", "static"])
def test_a_layer_streamed_from_host_memory_computes_the_same_bits(static: float | None) -> None:
    resident = compute_layer("row", torch.bfloat16, static)
    streamed = copy.deepcopy(resident)
    resident.cuda()
    given = activations(100, torch.bfloat16).cuda()
    expected = resident(given)
    for _ in range(3):
        streamed.cuda()
        assert torch.equal(streamed(given), expected)
        streamed.cpu()


@pytest.mark.parametrize("rows", [17, 64])
@pytest.mark.parametrize("static", [None, 0.05], ids=["dynamic", "static"])
def test_it_compiles_without_a_graph_break_and_computes_the_same(static: float | None, rows: int) -> None:
    layer, given = compute_layer("row", torch.bfloat16, static).cuda(), activations(rows, torch.bfloat16).cuda()
    torch._dynamo.reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compiled(given)
    assert relative_l2(result, layer(given)) <= 0.003


def test_under_autocast_the_result_has_autocasts_dtype() -> None:
    layer, given = compute_layer("row", torch.float32).cuda(), activations(16, torch.float32).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = layer(given)
    assert result.dtype == torch.bfloat16
    assert relative_l2(result, layer(given)) < 0.005


def test_the_probe_finds_a_device_that_multiplies_float8() -> None:
    probe = probe_fp8(resolve_device("cuda")[0])
    assert probe.ok
    assert probe.definite
    assert "tried: relative error 0.0" in probe.reason


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("static", [None, 0.05], ids=["dynamic", "static"])
def test_an_input_in_any_layout_is_taken(static: float | None, compiled: bool) -> None:
    layer = compute_layer("row", torch.bfloat16, static).cuda()
    given = activations(32, torch.bfloat16).cuda()
    transposed, strided = given.t().contiguous().t(), given.repeat(1, 2)[:, :INPUTS]
    torch._dynamo.reset()
    forward = torch.compile(layer, fullgraph=True) if compiled else layer
    for other in (transposed, strided):
        assert not other.is_contiguous()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert relative_l2(forward(other), layer(given)) <= 0.003


def test_a_gradient_reaches_the_input() -> None:
    layer = compute_layer("row", torch.bfloat16).cuda()
    given = activations(16, torch.bfloat16).cuda().requires_grad_()
    gradient = torch.randn(16, OUTPUTS, device="cuda").bfloat16()
    layer(given).backward(gradient)
    expected = gradient.float() @ layer.dequantised_weight().float()
    assert relative_l2(given.grad, expected) < 0.01
