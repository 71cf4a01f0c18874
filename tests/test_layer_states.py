"""State dicts of quantised layers: codes come with their scales, float weights are quantised, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import (
    quantise_module_,
)
from slipcast.registry.errors import QuantisationError
from support.layer_cases import (
    KINDS,
    ROW,
    layer_input,
    plain_layer,
    quantised,
    weight_bits,
)
from support.number_formats import relative_l2


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_loading_a_float_weight_quantises_it(kind: str, strict: bool, assign: bool) -> None:
    layer, other = quantised(kind), plain_layer(kind, seed=5)
    result = layer.load_state_dict(other.state_dict(), strict=strict, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert weight_bits(layer) == weight_bits(quantised(kind, seed=5))
    assert relative_l2(layer.dequantised_weight(), other.weight) < 0.04
    assert layer.compute_dtype == torch.bfloat16
    if getattr(layer, "bias", None) is not None:
        assert layer.bias.dtype == torch.bfloat16
        assert relative_l2(layer.bias, other.bias) < 0.01
    layer(layer_input(kind, torch.bfloat16))


def state(kind: str = "linear", codec: Codec = ROW) -> dict[str, Tensor]:
    return {f"0.{name}": tensor for name, tensor in quantised(kind, codec, seed=5).state_dict().items()}


def without(entries: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in entries.items() if name not in names}


FAULTS: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "codes without a scale": (
        lambda: without(state(), "0.weight_scale"),
        r"0: weight in torch.float8_e4m3fn without weight_scale(.|\n)*load the scale with its codes",
    ),
    "a scale without codes": (
        lambda: without(state(), "0.weight"),
        r"0: weight_scale without weight(.|\n)*load both from the same checkpoint",
    ),
    "a float weight with a scale": (
        lambda: {**state(), "0.weight": torch.randn(16, 24)},
        r"0: weight in torch.float32 together with weight_scale(.|\n)*if the scale is already multiplied in, remove it",
    ),
    "a float weight of another shape": (
        lambda: without({**state(), "0.weight": torch.randn(24, 16)}, "0.weight_scale"),
        r"0: weight of shape \[24, 16\](.|\n)*shape \[16, 24\](.|\n)*same architecture",
    ),
    "codes of another shape": (
        lambda: {**state(), "0.weight": torch.zeros(24, 16).to(torch.float8_e4m3fn)},
        r"0: weight in torch.float8_e4m3fn of shape \[24, 16\](.|\n)*of shape \[16, 24\](.|\n)*slipcast\.load",
    ),
    "a scale of another granularity": (
        lambda: state(codec=Float8("tensor")),
        r"0: weight_scale in torch.float32 of shape \[\](.|\n)*of shape \[16\](.|\n)*slipcast\.load",
    ),
    "codes of another dtype": (
        lambda: {**state(), "0.weight": torch.zeros(16, 24).to(torch.float8_e5m2)},
        r"0: weight in torch.float8_e5m2(.|\n)*torch.float8_e4m3fn",
    ),
    "integer codes": (
        lambda: {**state(), "0.weight": torch.zeros(16, 24, dtype=torch.int8)},
        r"0: weight in torch.int8",
    ),
    "another side tensor": (
        lambda: {**state(), "0.weight_scale_2": torch.ones(())},
        r"0: weight_scale_2 beside weight(.|\n)*this layer would ignore it(.|\n)*slipcast\.load",
    ),
    "a weight that is not finite": (
        lambda: {"0.weight": torch.full((16, 24), float("inf")), "0.bias": torch.zeros(16)},
        r"0: a weight with values that are not finite",
    ),
}


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_an_error_and_changes_no_weight(fault: str, strict: bool, assign: bool) -> None:
    make, message = FAULTS[fault]
    model = nn.Sequential(quantised("linear"))
    before = weight_bits(model[0])
    with pytest.raises(RuntimeError, match=message) as caught:
        model.load_state_dict(make(), strict=strict, assign=assign)
    assert "Missing key" not in str(caught.value)
    assert "Unexpected key" not in str(caught.value)
    assert weight_bits(model[0]) == before


def test_keys_that_are_absent_or_foreign_are_reported_as_ever() -> None:
    model = nn.Sequential(quantised("linear"))
    result = model.load_state_dict({"0.bias": torch.zeros(16), "0.foreign": torch.zeros(1)}, strict=False)
    assert set(result.missing_keys) == {"0.weight", "0.weight_scale"}
    assert result.unexpected_keys == ["0.foreign"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict({"0.bias": torch.zeros(16)})


def test_equivalent_scales_are_taken() -> None:
    entries = quantised("linear", Float8("tensor"), seed=5).state_dict()
    for scale in (entries["weight_scale"].reshape(1), entries["weight_scale"].reshape(1, 1), entries["weight_scale"]):
        layer = quantised("linear", Float8("tensor"))
        layer.load_state_dict({**entries, "weight_scale": scale}, assign=True)
        assert layer.weight_scale.shape == ()
    narrow = {**state(), "0.weight_scale": state()["0.weight_scale"].bfloat16()}
    for assign in (False, True):
        model = nn.Sequential(quantised("linear"))
        model.load_state_dict(narrow, assign=assign)
        assert model[0].weight_scale.dtype == torch.float32
        assert torch.equal(model[0].weight_scale, narrow["0.weight_scale"].float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_on_the_meta_device_is_filled_later(kind: str) -> None:
    meta = quantise_module_(plain_layer(kind).to("meta"), ROW, torch.float32)
    layer = quantised(kind, dtype=torch.float32)
    expected = {name: (part.dtype, part.shape) for name, part in meta.expected_tensors().items()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in meta.state_dict().items() if name != "bias"} == expected
    assert all(tensor.is_meta for tensor in meta.state_dict().values())
    tensors = {name: getattr(layer, name).detach() for name in expected}
    meta.set_weight(tensors)
    if getattr(layer, "bias", None) is not None:
        meta.bias = layer.bias
    assert meta.weight.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(meta(layer_input(kind)), layer(layer_input(kind)))


def test_a_meta_layer_takes_an_assigned_state_dict() -> None:
    meta = nn.Sequential(quantise_module_(plain_layer("linear").to("meta"), ROW, torch.float32))
    meta.load_state_dict(state(), assign=True)
    assert weight_bits(meta[0]) == weight_bits(quantised("linear", seed=5))
    assert meta[0].bias.dtype == torch.float32


def test_set_weight_refuses_what_does_not_fit() -> None:
    layer = quantised("linear")
    tensors = {name: getattr(layer, name) for name in layer.expected_tensors()}
    for wrong in (
        {"weight": tensors["weight"]},
        {**tensors, "weight": tensors["weight"].float()},
        {**tensors, "weight_scale": tensors["weight_scale"][:, None]},
        {**tensors, "weight_zero": tensors["weight_scale"]},
    ):
        with pytest.raises(QuantisationError, match=r"give all tensors of float8_e4m3fn/row"):
            layer.set_weight(wrong)
