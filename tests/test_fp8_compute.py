"""Linears that multiply in float8: what they compute, what they keep through casts and copies, and who may be one."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine import fp8_probe
from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.devices import Device, resolve_device
from slipcast.engine.fp8_compute import Float8ComputeLinear, compute_obstacle, enable_compute_
from slipcast.engine.fp8_probe import Probe, probe_fp8
from slipcast.engine.layers import QuantisedLinear, QuantisedModule, quantise_module_
from slipcast.registry.errors import QuantisationError
from support.number_formats import bytes_of, relative_l2

INPUTS, OUTPUTS = 64, 32
ROW = Float8("row")


def plain_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-2, 1, OUTPUTS)[:, None])
    return layer


def storage_layer(codec: Codec = ROW, dtype: torch.dtype = torch.float32, bias: bool = True) -> QuantisedLinear:
    return quantise_module_(plain_layer(bias), codec, dtype)


def compute_layer(
    codec: Codec = ROW, dtype: torch.dtype = torch.float32, static: float | None = None, bias: bool = True
) -> Float8ComputeLinear:
    scale = None if static is None else torch.tensor(static)
    return enable_compute_(storage_layer(codec, dtype, bias), input_scale=scale)


def given_input(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)


def bits_of(layer: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors = {name: tensor for name, tensor in layer.state_dict().items() if name != "bias"}
    return {name: (tensor.dtype, bytes_of(tensor).tobytes()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("static", [None, 0.01], ids=["dynamic", "static"])
@pytest.mark.parametrize("granularity", ["row", "tensor", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_forward_is_close_to_that_of_the_layer_in_storage(
    dtype: torch.dtype, granularity: str, static: float | None
) -> None:
    given = given_input(3, 5, dtype=dtype)
    storage = storage_layer(Float8(granularity), dtype)
    compute = compute_layer(Float8(granularity), dtype, static)
    before = bits_of(compute)
    result = compute(given)
    assert result.dtype == dtype
    assert result.shape == (3, 5, OUTPUTS)
    expected = storage(given)
    assert 0.001 < relative_l2(result, expected) < 0.045
    assert bits_of(compute) == before


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 1, 3)], ids=str)
def test_an_input_of_any_rank_is_taken(shape: tuple[int, ...]) -> None:
    layer = compute_layer()
    result = layer(given_input(*shape))
    assert result.shape == (*shape, OUTPUTS)
    assert torch.equal(result.reshape(-1, OUTPUTS), layer(given_input(*shape).reshape(-1, INPUTS)))


def test_rows_are_computed_by_themselves() -> None:
    layer, given = compute_layer(), given_input(9)
    together = layer(given)
    for row in range(9):
        assert relative_l2(layer(given[row]), together[row]) < 1e-6


def test_the_bias_is_added_to_the_result() -> None:
    """After the scales: it has none."""
    layer, given = compute_layer(), given_input(4)
    assert torch.equal(layer(given), compute_layer(bias=False)(given) + layer.bias)
    assert torch.equal(layer(torch.zeros(2, INPUTS)), layer.bias.expand(2, OUTPUTS))


def test_a_static_scale_takes_part() -> None:
    given = given_input(4)
    assert torch.equal(compute_layer(static=0.02)(given), compute_layer(static=0.02)(given))
    assert not torch.equal(compute_layer(static=0.02)(given), compute_layer()(given))
    layer = compute_layer(static=0.001, bias=False)
    expected = (0.448 * given.sign()) @ layer.dequantised_weight().t()
    assert relative_l2(layer(given * 1e5), expected) < 1e-5


def test_it_is_the_same_object_with_the_same_tensors() -> None:
    layer = storage_layer()
    before, weight, names = bits_of(layer), layer.weight, list(layer.state_dict())
    handle = layer.register_forward_hook(lambda _module, _arguments, output: output + 1)
    enabled = enable_compute_(layer, input_scale=None)
    assert enabled is layer
    assert isinstance(enabled, QuantisedLinear)
    assert enabled.weight is weight
    assert bits_of(enabled) == before
    assert list(enabled.state_dict()) == names
    given = given_input(2)
    hooked = enabled(given)
    handle.remove()
    assert torch.equal(hooked, enabled(given) + 1)
    assert "fp8 compute, activation scale of each row" in repr(enabled)
    assert "activation scale static" in repr(compute_layer(static=0.1))


def test_the_scale_is_given_anew_by_enabling_again() -> None:
    layer = compute_layer(static=0.1)
    assert enable_compute_(layer, input_scale=torch.tensor([0.2])).input_scale.item() == pytest.approx(0.2)
    assert enable_compute_(layer, input_scale=None).input_scale is None
    assert "input_scale" not in layer.state_dict()


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "state dict": lambda layer: filled(copy.deepcopy(layer), layer.state_dict()),
    "state dict, assigned": lambda layer: filled(copy.deepcopy(layer).to("meta"), layer.state_dict(), assign=True),
    "meta": lambda layer: filled(copy.deepcopy(layer).to("meta").to_empty(device="cpu"), layer.state_dict()),
}


def filled(layer: nn.Module, state: dict[str, Tensor], assign: bool = False) -> nn.Module:
    layer.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=assign)
    return layer


@pytest.mark.parametrize("static", [None, 0.0123456], ids=["dynamic", "static"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_the_same(way: str, static: float | None) -> None:
    layer = compute_layer(static=static)
    before = bits_of(layer)
    other = COPIES[way](layer)
    assert type(other) is Float8ComputeLinear
    assert bits_of(other) == before
    assert ("input_scale" in before) == (static is not None)
    given = given_input(3)
    assert torch.equal(other(given), layer(given))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_casts_leave_codes_and_scales(cast: str) -> None:
    layer = compute_layer(static=0.0123456)
    before = bits_of(layer)
    getattr(layer, cast)()
    assert bits_of(layer) == before
    assert layer.input_scale.dtype == torch.float32
    given = given_input(2).to(layer.compute_dtype)
    assert layer(given).dtype == layer.compute_dtype
    layer.type(torch.float16)
    assert bits_of(layer) == before


def test_a_static_scale_of_another_form_is_read_from_a_state_dict() -> None:
    state = compute_layer(static=0.25).state_dict()
    for scale in (torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.bfloat16), torch.tensor([[0.25]])):
        for assign in (False, True):
            layer = compute_layer(static=0.5)
            layer.load_state_dict({**state, "input_scale": scale}, assign=assign)
            assert layer.input_scale.dtype == torch.float32
            assert layer.input_scale.shape == ()
            assert layer.input_scale.item() == 0.25


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.tensor(1.0), "exactly 1.0, the placeholder"),
        (torch.tensor(float("nan")), "not finite"),
        (torch.tensor(0.0), "not positive"),
        (torch.tensor([0.1, 0.2]), r"shape \[2\], not one element"),
    ],
    ids=str,
)
def test_a_static_scale_that_can_not_be_used_is_refused(scale: Tensor, reason: str) -> None:
    storage = storage_layer()
    with pytest.raises(QuantisationError, match=reason + r"(.|\n)*each row of activations then gets its own scale"):
        enable_compute_(storage, input_scale=scale)
    assert type(storage) is QuantisedLinear
    model = nn.Sequential(compute_layer(static=0.5))
    before = bits_of(model)
    state = {**model.state_dict(), "0.input_scale": scale}
    with pytest.raises(RuntimeError, match=rf"0: a static scale of activations that can't be used: .*{reason}"):
        model.load_state_dict(state)
    assert bits_of(model) == before


def test_a_static_scale_that_the_layer_has_no_place_for_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*input_scale"):
        compute_layer().load_state_dict(compute_layer(static=0.5).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*input_scale"):
        compute_layer(static=0.5).load_state_dict(compute_layer().state_dict())


def test_a_layer_on_the_meta_device_is_filled_later() -> None:
    meta = enable_compute_(
        quantise_module_(plain_layer().to("meta"), ROW, torch.float32), input_scale=torch.empty(1, device="meta")
    )
    layer = compute_layer(static=0.25)
    assert {name: (t.dtype, t.shape) for name, t in meta.state_dict().items()} == {
        name: (t.dtype, t.shape) for name, t in layer.state_dict().items()
    }
    meta.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(meta(given_input(2)), layer(given_input(2)))


@pytest.mark.parametrize(
    ("inputs", "outputs", "codec", "reason"),
    [
        (64, 32, Float8("block", block=16), "scales are of blocks"),
        (64, 32, Float8("row", dtype=torch.float8_e5m2), "stored as float8_e5m2/row, not in float8_e4m3fn"),
        (64, 32, Int8("row"), "stored as int8/row"),
        (72, 32, ROW, "72 inputs, not a multiple of 16"),
        (64, 40, ROW, "40 outputs, not a multiple of 16"),
    ],
)
def test_who_can_not_multiply_in_float8_is_told_why(inputs: int, outputs: int, codec: Codec, reason: str) -> None:
    assert reason in (compute_obstacle(inputs, outputs, codec) or "")


@pytest.mark.parametrize("granularity", ["row", "tensor", "none"])
def test_aligned_layers_in_e4m3_can_multiply_in_float8(granularity: str) -> None:
    assert compute_obstacle(16, 3072, Float8(granularity)) is None


def test_enabling_refuses_what_can_not_multiply_in_float8() -> None:
    with pytest.raises(
        QuantisationError, match=r"12 outputs, not a multiple of 16(.|\n)*leave this layer on fp8 storage"
    ):
        enable_compute_(quantise_module_(nn.Linear(32, 12), ROW, torch.float32), input_scale=None)
    hooked = storage_layer()
    hooked.forward = hooked.forward
    with pytest.raises(QuantisationError, match="a hook has replaced its forward"):
        enable_compute_(hooked, input_scale=None)

    class Other(QuantisedLinear):
        pass

    other = storage_layer()
    other.__class__ = Other
    with pytest.raises(QuantisationError, match=r"its class is .*Other"):
        enable_compute_(other, input_scale=None)


@pytest.mark.parametrize("static", [None, 0.01], ids=["dynamic", "static"])
def test_a_gradient_passes_the_rounding_by(static: float | None) -> None:
    """Through the casts to float8 it would be rounded to float8 itself, without a scale."""
    layer = compute_layer(static=static)
    given = given_input(4).requires_grad_()
    gradient = torch.randn(4, OUTPUTS) * 1e-4
    layer(given).backward(gradient)
    assert relative_l2(given.grad, gradient @ layer.dequantised_weight()) < 1e-6
    assert layer.weight.grad is None


def test_under_autocast_the_result_has_autocasts_dtype() -> None:
    layer, given = compute_layer(), given_input(4)
    expected = layer(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(given)
    assert result.dtype == torch.bfloat16
    assert relative_l2(result, expected) < 2**-8


@pytest.mark.parametrize("static", [None, 0.01], ids=["dynamic", "static"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_without_a_graph_break(backend: str, static: float | None) -> None:
    model = nn.Sequential(compute_layer(static=static), nn.GELU())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = compiled(given_input(3))
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no compiler: {error}")
    assert relative_l2(result, model(given_input(3))) < 1e-5


def test_a_cpu_emulates() -> None:
    assert probe_fp8(resolve_device("cpu")[0]) == Probe(True, True, "emulated: no speed-up")


@pytest.mark.parametrize(
    ("described", "ok"), [("cuda:8.6,12GiB", False), ("cuda:8.9,24GiB", True), ("cuda:12.0,32GiB", True)]
)
def test_a_described_device_is_judged_by_rule(described: str, ok: bool) -> None:
    probe = probe_fp8(resolve_device(described)[0])
    assert (probe.ok, probe.definite) == (ok, False)
    assert "by rule, not tried" in probe.reason
    assert described[5:].partition(",")[0] in probe.reason


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A card that computes as the CPU does."""
    monkeypatch.setattr(fp8_probe, "_answers", {})
    monkeypatch.setattr(Device, "torch_device", torch.device("cpu"))
    monkeypatch.setattr(fp8_probe, "_SHAPES", ((16, 16, 16), (33, 256, 64)))
    return Device("cuda:0", "cuda", 2**34, (8, 6), True, True, "a card", "cuda")


def failing(error: Exception) -> Callable[..., Tensor]:
    def fail(*arguments: object) -> Tensor:
        raise error

    return fail


def test_a_device_is_asked_to_do_it_whatever_its_number(card: Device) -> None:
    probe = probe_fp8(card)
    assert probe.ok
    assert probe.definite
    assert "tried: relative error 0.0" in probe.reason


@pytest.mark.parametrize(
    ("error", "definite"),
    [
        (RuntimeError("torch._scaled_mm is only supported on devices with compute capability >= 8.9"), True),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), True),
        (NotImplementedError("Could not run 'aten::_scaled_mm' with arguments from the backend"), True),
        (ValueError("row-wise scaling is not supported"), True),
        (torch.OutOfMemoryError("CUDA out of memory, not supported"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=str,
)
def test_only_definite_answers_are_kept(
    card: Device, monkeypatch: pytest.MonkeyPatch, error: Exception, definite: bool
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(fp8_probe, "scaled_matmul", failing(error))
        probe = probe_fp8(card)
    assert (probe.ok, probe.definite) == (False, definite)
    assert str(error) in probe.reason
    assert probe_fp8(card).ok is not definite


@pytest.mark.parametrize("wrong", [lambda y: y * 1.1, lambda y: y * float("nan"), lambda y: y + 1e-3])
def test_a_device_that_multiplies_wrongly_is_found_out(
    card: Device, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]
) -> None:
    right = fp8_probe.scaled_matmul
    monkeypatch.setattr(fp8_probe, "scaled_matmul", lambda *arguments: wrong(right(*arguments)))
    probe = probe_fp8(card)
    assert (probe.ok, probe.definite) == (False, True)
    assert "the product is wrong" in probe.reason


def test_a_compute_layer_is_a_quantised_layer_to_all_who_ask() -> None:
    layer = compute_layer(static=0.5)
    assert isinstance(layer, QuantisedModule)
    assert list(layer.expected_tensors()) == ["weight", "weight_scale"]
    assert relative_l2(layer.dequantised_weight(), plain_layer().weight) < 0.04
