"""Quantised layers: they compute what the dequantised layer computes, and nothing changes a bit of their weight."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.layers import (
    QUANTISED_CLASSES,
    QuantisedModule,
    layer_codec,
    quantisation_obstacle,
    quantise_module_,
    weight_shape,
)
from slipcast.registry.errors import QuantisationError
from support.layer_cases import LAYERS, layer_input, plain_layer
from support.number_formats import bytes_of, relative_l2

ROW = Float8("row")
KINDS = list(LAYERS)

gpu = pytest.mark.gpu
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def quantised(kind: str, codec: Codec = ROW, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantisedModule:
    return quantise_module_(plain_layer(kind, seed), codec, dtype)


def weight_bits(layer: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    assert isinstance(layer, QuantisedModule)
    tensors = {name: getattr(layer, name) for name in layer.expected_tensors()}
    assert "weight_scale" in tensors
    return {name: (tensor.dtype, tuple(tensor.shape), bytes_of(tensor).tobytes()) for name, tensor in tensors.items()}


def dequantised(layer: QuantisedModule) -> nn.Module:
    """The plain layer that holds the decoded weight: what a quantised one must compute."""
    bases = {new: old for old, new in QUANTISED_CLASSES.items()}
    plain = copy.deepcopy(layer)
    weight = layer.codec.decode(layer.parts(), weight_shape(layer), torch.float32).to(layer.compute_dtype)
    plain.__class__ = bases[type(layer)]
    for name in layer.expected_tensors():
        plain._buffers.pop(name, None)
    plain._parameters["weight"] = nn.Parameter(weight)
    return plain


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


CASTS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float16), torch.float16),
    "to device and dtype": (lambda m: m.to("cpu", torch.float32), torch.float32),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "type by name": (lambda m: m.type("torch.DoubleTensor"), torch.float64),
}


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


def through_torch_save(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_state_dict(layer: nn.Module, assign: bool = False, strict: bool = True) -> nn.Module:
    other = copy.deepcopy(layer)
    for name in other.expected_tensors():
        bits = getattr(other, name).data.view(torch.uint8)
        bits.copy_(bits + 1)
    assert weight_bits(other) != weight_bits(layer)
    result = other.load_state_dict(layer.state_dict(), strict=strict, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    return other


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "old pickle": lambda layer: pickle.loads(pickle.dumps(layer, protocol=2)),
    "torch.save": through_torch_save,
    "state dict": through_state_dict,
    "state dict, assigned": lambda layer: through_state_dict(layer, assign=True),
    "state dict, not strict": lambda layer: through_state_dict(layer, strict=False),
    "within a model": lambda layer: copy.deepcopy(nn.ModuleDict({"a": layer}))["a"],
    "pickled within a model": lambda layer: pickle.loads(pickle.dumps(nn.ModuleDict({"a": layer})))["a"],
    "to the meta device and back": lambda layer: through_meta(layer),
}


def through_meta(layer: nn.Module) -> nn.Module:
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    moved = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    assert {n: t.dtype for n, t in moved.state_dict().items()} == {n: t.dtype for n, t in state.items()}
    moved.load_state_dict(state)
    return moved


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


CODECS = [
    ROW,
    Float8("tensor"),
    Float8("none"),
    Float8("block", block=4),
    Int8(),
    Int8("tensor"),
    Int8(rotation=16),
    MXFP8(),
    NVFP4("comfy"),
    NVFP4("linear"),
]


def bits_of(layer: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor).tobytes() for name, tensor in layer.state_dict().items() if name != "bias"}


def filled_with_gguf_blocks(kind: str) -> QuantisedModule:
    """A layer as the loader makes one: GGUF is never encoded."""
    layer = quantise_module_(plain_layer(kind).to("meta"), GGUF("Q8_0"), torch.float32)
    blocks = torch.randint(0, 256, (8, 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[:, :2] = torch.full((8, 1), 0.01, dtype=torch.float16).view(torch.uint8)
    layer.set_weight({"weight": blocks.reshape(layer.expected_tensors()["weight"].shape)})
    return layer


@pytest.mark.parametrize("codec", [*CODECS, GGUF("Q8_0")], ids=lambda codec: codec.name)
def test_every_codec_works_in_a_layer(codec: Codec) -> None:
    kind = "linear without bias"
    layer = filled_with_gguf_blocks(kind) if codec == GGUF("Q8_0") else quantised(kind, codec, torch.float32)
    given_input, before = layer_input(kind), bits_of(layer)
    result = layer(given_input)
    assert torch.equal(result, dequantised(layer)(given_input))
    copies = [way(layer) for way in (copy.deepcopy, COPIES["pickle"], COPIES["torch.save"])]
    casts = [cast(copy.deepcopy(layer)).float() for cast, _ in CASTS.values()]
    loaded = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    loaded.load_state_dict(layer.state_dict())
    for other in (*copies, *casts, loaded):
        assert bits_of(other) == before
        assert torch.equal(other(given_input), result)
    float_weight = plain_layer(kind, seed=3).state_dict()
    if codec.encodes:
        layer.load_state_dict(float_weight)
        assert bits_of(layer) == bits_of(quantised(kind, codec, seed=3))
    else:
        with pytest.raises(RuntimeError, match="can only be read"):
            layer.load_state_dict(float_weight)
        assert bits_of(layer) == before


@pytest.mark.parametrize("codec", [*CODECS, GGUF("Q8_0")], ids=lambda codec: codec.name)
def test_only_codecs_of_single_rows_store_embeddings(codec: Codec) -> None:
    plain = nn.Embedding(16, 32)
    if codec.name.startswith(("float8", "int8")):
        expected = codec.decode(codec.encode(plain.weight), (16, 32), torch.float32)
        layer = quantise_module_(plain, codec, torch.float32)
        assert torch.equal(layer(torch.tensor([3, 15])), expected[[3, 15]])
    else:
        with pytest.raises(QuantisationError, match=rf"rows of {codec.name} can't be decoded by themselves"):
            quantise_module_(plain, codec, torch.float32)


@pytest.mark.parametrize(
    "codec", [Int8(rotation=16), MXFP8(), NVFP4("comfy"), GGUF("Q8_0")], ids=lambda codec: codec.name
)
def test_layers_of_every_codec_compile_without_a_graph_break(codec: Codec) -> None:
    kind = "linear without bias"
    layer = filled_with_gguf_blocks(kind) if codec == GGUF("Q8_0") else quantised(kind, codec, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(layer_input(kind)), layer(layer_input(kind)))
    assert torch.equal(layer(layer_input(kind)), dequantised(layer)(layer_input(kind)))


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
