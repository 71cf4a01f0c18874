"""Products of float8 codes with scales: against float32, against torch's operation, and where values are extreme."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.kernels.operators import quantise_rows
from slipcast.engine.kernels.plain import FLOAT8
from slipcast.engine.scaled_matmul import input_scale_obstacle, scaled_matmul
from support.number_formats import bytes_of, e4m3, relative_l2

INPUTS, OUTPUTS = 256, 48


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(rows: int = 33, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, and a few channels that are far larger than the others."""
    values = random(rows, INPUTS) * torch.logspace(-4, 2, rows)[:, None]
    values[:, ::64] *= 30
    return values.to(dtype)


def weight_parts(granularity: str = "row") -> tuple[Tensor, dict[str, Tensor]]:
    weight = random(OUTPUTS, INPUTS, seed=1) * torch.logspace(-6, 0, OUTPUTS)[:, None]
    return weight, Float8(granularity).encode(weight)


def product(rows: Tensor, granularity: str = "row", input_scale: Tensor | None = None, dtype=torch.float32) -> Tensor:
    _, parts = weight_parts(granularity)
    return scaled_matmul(*quantise_rows(rows, input_scale), parts["codes"], parts.get("scale"), dtype)


def rowwise_error(actual: Tensor, expected: Tensor) -> float:
    """The mean over the rows of each row's relative L2: a few large rows don't hide the others."""
    return sum(relative_l2(a, e) for a, e in zip(actual, expected, strict=True)) / len(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_close_to_float32(dtype: torch.dtype) -> None:
    rows = activations(dtype=dtype)
    weight, _ = weight_parts()
    result = product(rows, dtype=dtype)
    assert result.dtype == dtype
    expected = rows.float() @ weight.t()
    assert rowwise_error(result, expected) < 0.05
    assert relative_l2(result, expected) < 0.06


def test_a_product_is_that_of_the_decoded_factors() -> None:
    """Codes decoded from the description of the format, scales multiplied in, and a product in float64."""
    rows = activations()
    codes, scale = quantise_rows(rows)
    _, parts = weight_parts()
    decoded = torch.from_numpy(e4m3(bytes_of(codes))) * scale
    weight = torch.from_numpy(e4m3(bytes_of(parts["codes"]))) * parts["scale"][:, None]
    assert relative_l2(product(rows), decoded @ weight.t()) < 1e-6


def test_scales_of_rows_serve_rows_of_different_sizes_and_one_scale_does_not() -> None:
    rows = activations()
    weight, _ = weight_parts()
    expected = rows @ weight.t()
    static = rows.abs().amax() / 448
    assert rowwise_error(product(rows), expected) < 0.05
    assert rowwise_error(product(rows, input_scale=static), expected) > 0.1
    assert rowwise_error(product(rows).t(), expected.t()) < 0.08
    assert rowwise_error(product(rows, "tensor").t(), expected.t()) > 0.1


def test_a_static_scale_divides_and_clamps() -> None:
    rows = torch.tensor([[1.0, -2.0, 448.0, 449.0, -1e6, float("inf"), float("-inf"), 0.0]]) / 4
    codes, scale = quantise_rows(rows, torch.tensor(0.25))
    assert scale.shape == ()
    assert codes.float().tolist() == [[1.0, -2.0, 448.0, 448.0, -448.0, 448.0, -448.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_static_scale_is_not_rounded_to_the_dtype_of_the_activations(dtype: torch.dtype) -> None:
    rows, scale = activations(dtype=dtype).clamp(-3, 3), torch.tensor(0.0123456)
    expected = (rows.float() / scale).to(FLOAT8)
    assert torch.equal(quantise_rows(rows, scale)[0].float(), expected.float())


@pytest.mark.parametrize("static", [None, torch.tensor(0.01)], ids=["dynamic", "static"])
def test_rows_of_zeros_stay_zeros(static: Tensor | None) -> None:
    rows = activations(8)
    rows[::2] = 0
    result = product(rows, input_scale=static)
    assert torch.isfinite(result).all()
    assert (result[::2] == 0).all()
    assert result[1::2].abs().amin(1).gt(0).any()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_finite_activations_of_any_size_give_codes_up_to_448(values: list[float], dtype: torch.dtype) -> None:
    rows = torch.tensor([values]).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    codes, scale = quantise_rows(rows)
    assert codes.dtype == FLOAT8
    assert torch.isfinite(codes.float()).all()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    if rows.abs().amax() > 1e-30:
        assert codes.float().abs().amax() == 448
        assert float((codes.float() * scale - rows.float()).abs().amax()) <= float(rows.abs().amax()) / 16


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows(bad: float) -> None:
    rows = activations(3)
    rows[1, 5] = bad
    result = product(rows)
    assert not torch.isfinite(result[1]).any()
    assert torch.equal(result[::2], product(activations(3))[::2])


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17])
def test_any_number_of_rows_is_taken_and_rows_do_not_bear_on_each_other(rows: int) -> None:
    given_rows = activations(17)[:rows]
    result = product(given_rows)
    assert result.shape == (rows, OUTPUTS)
    assert torch.allclose(result, product(activations(17))[:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("granularity", ["row", "tensor", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_emulation_agrees_with_torchs_own_operation(dtype: torch.dtype, granularity: str, static: bool) -> None:
    """On a CPU torch multiplies too, in its own way."""
    rows = activations().clamp(-4, 4)
    _, parts = weight_parts(granularity)
    codes, scale = quantise_rows(rows, torch.tensor(0.01) if static else None)
    ours = scaled_matmul(codes, scale, parts["codes"], parts.get("scale"), dtype)
    of_rows = scale.expand(33, 1).contiguous()
    of_columns = parts.get("scale", torch.tensor(1.0)).expand(OUTPUTS).reshape(1, -1).contiguous()
    try:
        theirs = torch._scaled_mm(codes, parts["codes"].t(), scale_a=of_rows, scale_b=of_columns, out_dtype=dtype)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this torch has none on a CPU: {error}")
    assert relative_l2(ours, theirs) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_autocast_does_not_reach_the_accumulation() -> None:
    expected = product(activations())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(product(activations()), expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1.0, "exactly 1.0, the placeholder"),
        (float("nan"), "nan, not finite"),
        (float("inf"), "inf, not finite"),
        (float("-inf"), "-inf, not finite"),
        (0.0, "0, not positive"),
        (-0.5, "-0.5, not positive"),
    ],
)
def test_a_static_scale_that_is_no_calibration_is_not_used(value: float, reason: str) -> None:
    assert reason in (input_scale_obstacle(value) or "")


@pytest.mark.parametrize("value", [0.0123, 1.0000001, 2.0, 1e-30])
def test_a_static_scale_that_may_be_one_is_used(value: float) -> None:
    assert input_scale_obstacle(value) is None
