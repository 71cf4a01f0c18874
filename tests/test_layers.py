"""Quantised layers: they compute what the dequantised layer computes, and nothing changes a bit of their weight."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import (
    QUANTISED_CLASSES,
    layer_codec,
    quantisation_obstacle,
    quantise_module_,
    weight_shape,
)
from slipcast.registry.errors import QuantisationError
from support.layer_cases import (
    CASTS,
    COPIES,
    KINDS,
    ROW,
    dequantised,
    layer_input,
    plain_layer,
    quantised,
    weight_bits,
)
from support.number_formats import relative_l2

gpu = pytest.mark.gpu
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_that_of_the_dequantised_layer(kind: str, dtype: torch.dtype) -> None:
    layer = quantised(kind, dtype=dtype)
    before = weight_bits(layer)
    given_input = layer_input(kind, dtype)
    result = layer(given_input)
    assert result.dtype == dtype
    assert torch.equal(result, dequantised(layer)(given_input))
    assert weight_bits(layer) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_close_to_that_of_the_plain_layer(kind: str) -> None:
    layer = quantised(kind, dtype=torch.float32)
    assert relative_l2(layer(layer_input(kind)), plain_layer(kind)(layer_input(kind))) < 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_of_small_weights_is_as_exact_as_one_of_large_weights(kind: str) -> None:
    """Square and transposed weights too: a scale along the wrong axis would show here."""
    plain = plain_layer(kind)
    axis = 1 if getattr(plain, "transposed", False) else 0
    with torch.no_grad():
        sizes = [plain.weight.shape[axis] if place == axis else 1 for place in range(plain.weight.ndim)]
        plain.weight.div_(plain.weight.abs().amax()).mul_(torch.logspace(-4, 4, plain.weight.shape[axis]).view(sizes))
    layer = quantise_module_(copy.deepcopy(plain), ROW, torch.float32)
    decoded = layer.dequantised_weight()
    for got, expected in zip(decoded.unbind(axis), plain.weight.unbind(axis), strict=True):
        assert relative_l2(got, expected) < 0.04


def test_a_transposed_convolution_honours_output_size() -> None:
    plain = plain_layer("conv transpose 1d")
    layer = quantise_module_(copy.deepcopy(plain), ROW, torch.float32)
    given_input = layer_input("conv transpose 1d")
    for length in (15, 16):
        assert layer(given_input, output_size=[length]).shape == plain(given_input, output_size=[length]).shape


def test_an_embedding_decodes_only_the_rows_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantised("embedding")
    decoded: list[tuple[int, ...]] = []
    original = Float8.decode

    def spy(self: Float8, parts: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        decoded.append(shape)
        return original(self, parts, shape, dtype)

    monkeypatch.setattr(Float8, "decode", spy)
    assert layer(torch.tensor([[1, 1, 19]])).shape == (1, 3, 16)
    assert decoded == [(3, 16)]
    for outside in (20, -1):
        with pytest.raises(IndexError):
            layer(torch.tensor([outside]))
    assert layer(torch.empty(0, 2, dtype=torch.long)).shape == (0, 2, 16)


def test_it_is_the_same_object_of_a_subclass() -> None:
    for kind in KINDS:
        plain = plain_layer(kind)
        plain.tag = "mine"
        handle = plain.register_forward_hook(lambda _module, _arguments, output: output + 1)
        names = dict(plain.named_parameters()).keys()
        origin = type(plain)
        layer = quantise_module_(plain, ROW, torch.float32)
        assert layer is plain
        assert isinstance(layer, origin)
        assert type(layer) is QUANTISED_CLASSES[origin]
        assert layer.tag == "mine"
        assert not layer.training
        assert dict(layer.named_parameters()).keys() == names
        hooked = layer(layer_input(kind))
        handle.remove()
        assert torch.equal(hooked, layer(layer_input(kind)) + 1)
        assert not layer.weight.requires_grad
        assert "weight_scale" in dict(layer.named_buffers())
        assert "codec=float8_e4m3fn/row" in repr(layer)
        assert "compute_dtype=float32" in repr(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_twice_changes_nothing(kind: str) -> None:
    layer = quantised(kind)
    before, weight = weight_bits(layer), layer.weight
    assert quantise_module_(layer, ROW, torch.bfloat16) is layer
    assert quantisation_obstacle(layer, ROW) is None
    assert weight_bits(layer) == before
    assert layer.weight is weight
    with pytest.raises(QuantisationError, match=r"it is stored as float8_e4m3fn/row"):
        quantise_module_(layer, Float8("tensor"), torch.bfloat16)


class OwnLinear(nn.Linear):
    """A layer that does more than its base."""


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (OwnLinear(8, 8), r"its class is OwnLinear"),
        (nn.LayerNorm(8), r"its class is LayerNorm"),
        (nn.Embedding(8, 8, max_norm=1.0), r"max_norm"),
        (nn.Embedding(8, 8, sparse=True), r"sparse"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), r"its class is ParametrizedLinear"),
        (nn.Linear(8, 8).to(torch.float8_e4m3fn), r"not a float parameter"),
        (nn.Linear(8, 8, dtype=torch.complex64), r"not a float parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_layers_are_refused_with_the_reason(layer: nn.Module, reason: str) -> None:
    kind = type(layer)
    with pytest.raises(QuantisationError, match=reason + r"(.|\n)*keep this layer in the compute dtype"):
        quantise_module_(layer, ROW, torch.bfloat16)
    assert type(layer) is kind
    assert quantisation_obstacle(layer, ROW) is not None


def test_a_layer_is_left_as_it_was_where_it_can_not_be_quantised() -> None:
    plain = plain_layer("linear")
    forward = plain.forward
    plain.forward = lambda given_input: forward(given_input)
    with pytest.raises(QuantisationError, match=r"a hook has replaced its forward; quantise before offloading"):
        quantise_module_(plain, ROW, torch.bfloat16)
    del plain.forward
    plain.weight.data = torch.randn(16, 8)
    with pytest.raises(QuantisationError, match=r"shape \[16, 8\] where its attributes say \[16, 24\]"):
        quantise_module_(plain, ROW, torch.bfloat16)
    plain.weight.data = torch.full((16, 24), float("nan"))
    with pytest.raises(QuantisationError, match="not finite"):
        quantise_module_(plain, ROW, torch.bfloat16)
    assert type(plain) is nn.Linear
    assert plain.bias.dtype == torch.float32


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", KINDS)
def test_casts_move_the_compute_dtype_and_leave_the_weight(kind: str, cast: str) -> None:
    layer = quantised(kind)
    apply, dtype = CASTS[cast]
    before, weight = weight_bits(layer), layer.weight
    holder = nn.Sequential(layer)
    assert apply(holder) is holder
    assert weight_bits(layer) == before
    assert layer.weight is weight
    assert layer.compute_dtype == dtype
    if getattr(layer, "bias", None) is not None:
        assert layer.bias.dtype == dtype
    assert layer(layer_input(kind, dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("apply", [nn.Module.to, nn.Module.type], ids=["to", "type"])
def test_a_cast_to_a_storage_dtype_changes_nothing(dtype: torch.dtype, apply: Callable[..., nn.Module]) -> None:
    """Layer-wise casting of other libraries does this to every layer around each forward."""
    if apply is nn.Module.to and not dtype.is_floating_point:
        pytest.skip("torch refuses it")
    layer = quantised("linear")
    before, bias = weight_bits(layer), layer.bias.detach().clone()
    apply(layer, dtype)
    assert weight_bits(layer) == before
    assert layer.compute_dtype == torch.bfloat16
    assert torch.equal(layer.bias, bias)


def test_what_is_applied_to_a_module_never_sees_codes_or_scales_as_floats() -> None:
    """So that a cast to another dtype doesn't even make a temporary of each weight, in vain."""
    seen: list[torch.dtype] = []
    layer = quantised("linear")
    layer._apply(lambda tensor: seen.append(tensor.dtype) or tensor)
    assert sorted(map(str, seen)) == ["torch.bfloat16", "torch.bfloat16", "torch.int32", "torch.uint8"]


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.lists(st.sampled_from([*CASTS, "deepcopy", "pickle", "state dict"]), max_size=5))
def test_no_sequence_of_casts_and_copies_changes_a_bit(kind: str, steps: list[str]) -> None:
    layer: nn.Module = quantised(kind)
    before, dtype = weight_bits(layer), torch.bfloat16
    for step in steps:
        if step in CASTS:
            layer, dtype = CASTS[step][0](layer), CASTS[step][1]
        else:
            layer = COPIES[step](layer)
        assert weight_bits(layer) == before
    assert layer.compute_dtype == dtype


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_weight_and_computes_the_same(kind: str, way: str) -> None:
    layer = quantised(kind, dtype=torch.float32)
    before = weight_bits(layer)
    other = COPIES[way](layer)
    assert type(other) is type(layer)
    assert weight_bits(other) == before
    assert weight_bits(layer) == before
    assert other.codec == layer.codec
    assert other.compute_dtype == torch.float32
    assert isinstance(other.weight, nn.Parameter)
    assert not other.weight.requires_grad
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in layer.named_parameters()]
    assert torch.equal(other(layer_input(kind)), layer(layer_input(kind)))


def test_a_deep_copy_follows_references_in_a_circle() -> None:
    layer = quantised("linear")
    layer.known_to = [layer]
    copied = copy.deepcopy(layer)
    assert copied.known_to[0] is copied


def test_a_deep_copy_shares_nothing_but_ties() -> None:
    first = quantised("linear without bias")
    second = quantised("linear without bias")
    second._parameters["weight"] = first.weight
    copied = copy.deepcopy(nn.ModuleList([first, second]))
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.data_ptr() != first.weight.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_memory_keeps_the_weight(kind: str) -> None:
    layer = quantised(kind)
    before = weight_bits(layer)
    layer.share_memory()
    assert weight_bits(layer) == before
    assert all(tensor.is_shared() for tensor in layer.state_dict().values())


@pytest.mark.parametrize("flag", ["swap_module_params", "overwrite_module_params"])
@pytest.mark.parametrize("kind", ["linear", "conv transpose 2d", "embedding"])
def test_torchs_future_ways_of_conversion_keep_the_weight(kind: str, flag: str) -> None:
    setter = getattr(torch.__future__, f"set_{flag}_on_conversion")
    layer = quantised(kind)
    before, state = weight_bits(layer), layer.state_dict()
    setter(True)
    try:
        layer.half().to(torch.float32).type(torch.bfloat16)
        layer.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        moved = copy.deepcopy(layer).to("meta")
    finally:
        setter(False)
    assert weight_bits(layer) == before
    assert layer.compute_dtype == torch.bfloat16
    assert moved.weight.is_meta
    assert moved.weight.dtype == torch.float8_e4m3fn


def test_channels_last_keeps_the_weight() -> None:
    layer = quantised("conv2d", dtype=torch.float32)
    given_input, decoded = layer_input("conv2d"), layer.dequantised_weight()
    before = layer(given_input)
    layer.to(memory_format=torch.channels_last)
    assert torch.equal(layer.dequantised_weight(), decoded)
    assert relative_l2(layer(given_input), before) < 1e-6


def test_requires_grad_leaves_the_codes_constant() -> None:
    layer = quantised("linear", dtype=torch.float32)
    before = weight_bits(layer)
    layer.requires_grad_(True)
    given_input = layer_input("linear").requires_grad_()
    layer(given_input).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    expected = layer.dequantised_weight().sum(0).expand_as(given_input)
    assert torch.allclose(given_input.grad, expected, rtol=1e-5)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert weight_bits(layer) == before


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_the_codec_predicts(kind: str) -> None:
    layer = quantised(kind)
    predicted = sum(part.nbytes for part in layer_codec(layer, ROW).parts(weight_shape(layer)).values())
    held = sum(tensor.nbytes for name, tensor in layer.state_dict().items() if name != "bias")
    assert held == predicted


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_quantised_model_compiles_without_a_graph_break(backend: str) -> None:
    model = nn.Sequential(quantised("linear", dtype=torch.float32), nn.GELU(), nn.Linear(16, 8))
    given_input = layer_input("linear")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = compiled(given_input)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no compiler: {error}")
    assert relative_l2(result, model(given_input)) < 1e-5


@gpu
@cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_moves_to_a_gpu_and_back_keep_the_weight(kind: str) -> None:
    layer = quantised(kind, dtype=torch.float32)
    before = weight_bits(layer)
    for move in (lambda m: m.cuda(), lambda m: m.to("cpu"), lambda m: m.type(torch.cuda.HalfTensor), lambda m: m.cpu()):
        move(layer)
        assert weight_bits(layer) == before
        assert len({tensor.device for tensor in layer.state_dict().values()}) == 1
    assert layer.compute_dtype == torch.float16
    here = layer.float()(layer_input(kind))
    layer.to("cuda", torch.float32, non_blocking=True)
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert relative_l2(layer(layer_input(kind).cuda()), here) < 1e-5
    assert weight_bits(layer) == before
    for dtype in (torch.bfloat16, torch.float16):
        layer.to(dtype)
        expected = layer.codec.decode(layer.parts(), weight_shape(layer), torch.float32).to(dtype)
        assert torch.equal(layer.dequantised_weight(), expected)
    pinned = {name: tensor.cpu().pin_memory() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(pinned)
    assert weight_bits(pickle.loads(pickle.dumps(layer))) == before
