"""The fused kernels on a real GPU: the same bits as plain torch, and layers that compile with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine import quantised_input
from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.devices import resolve_device
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.fp8_probe import probe_fp8
from slipcast.engine.kernels import operators, plain, plain_nvfp4
from slipcast.engine.kernels.dequantise_kernel import Tile, launch_dequantise
from slipcast.engine.kernels.quantise_kernel import WHOLE_ROW
from slipcast.engine.kernels.targets import runs_kernels
from slipcast.engine.layers import quantise_module_
from support.number_formats import relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

OPERATORS = torch.ops.slipcast
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def runs_triton() -> None:
    if not runs_kernels(torch.device("cuda", 0)):
        pytest.skip("this GPU runs no kernels of Triton")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """But for the sign of NaN, which instructions drop."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = actual.float().isnan()
    assert torch.equal(nan, expected.float().isnan())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert torch.equal(
        actual.contiguous().view(integers).masked_fill(nan, 0), expected.contiguous().view(integers).masked_fill(nan, 0)
    )


def assert_rows_agree(rows: Tensor) -> None:
    codes, scale = OPERATORS.quantise_rows(rows)
    expected, of_rows = plain.quantise_rows(rows)
    assert_same_bits(codes, expected)
    assert_same_bits(scale, of_rows)
    for static in (0.013, 3e-5):
        given = torch.tensor(static, device="cuda")
        assert_same_bits(OPERATORS.quantise_under(rows, given), plain.quantise_under(rows, given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(0, 64), (1, 1), (3, 7), (17, 100), (1001, 3840), (64, 10240), (5, WHOLE_ROW), (5, WHOLE_ROW + 1)],
    ids=str,
)
def test_activations_are_quantised_to_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = random(*shape) * torch.logspace(-12, 3, shape[1], device="cuda")
    rows[1::7] = 0
    assert_rows_agree(rows.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_activations_are_quantised_to_the_same_bits(dtype: torch.dtype) -> None:
    rows = random(64, 96, dtype=dtype)
    odd = [float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -6e-39, 448.0, 464.0, 1e30]
    for row, value in enumerate(odd):
        rows[row, row * 3] = value
        rows[row + 20] = value
    rows[40:50] *= 1e-38
    assert_rows_agree(rows)


def test_all_numbers_of_16_bits_are_quantised_to_the_same_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rows = torch.arange(2**16, device="cuda").to(torch.int16).view(dtype)
        assert_rows_agree(rows.view(256, 256))
        assert_rows_agree(rows.view(-1, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_activations_are_quantised_to_the_same_bits(dtype: torch.dtype) -> None:
    wide = random(40, 256, dtype=dtype)
    for rows in (wide[:, :100], wide[::3], wide[:, 1:130], wide.t(), wide[:, ::2], wide[:1].expand(5, 256)):
        assert_rows_agree(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 7), (100, 33), (999, 3840), (33, 10240), (70001, 32)], ids=str)
def test_weights_are_dequantised_to_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8).cuda()
    scale = random(shape[0]).exp() * 1e-3
    for each in (codes.view(plain.FLOAT8), codes.view(torch.int8)):
        for scales in (scale, scale[:1]) if shape[0] else (scale,):
            values = OPERATORS.dequantise_rows(each, scales, dtype)
            assert_same_bits(values, plain.dequantise(each, scales.view(-1, 1), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["comfy", "linear"])
@pytest.mark.parametrize("shape", [(5, 32), (130, 80), (3, 48), (1000, 3840)], ids=str)
def test_weights_in_nvfp4_are_dequantised_to_the_same_bits(
    shape: tuple[int, int], layout: str, dtype: torch.dtype
) -> None:
    parts = NVFP4(layout).encode(random(*shape))
    codes = torch.randint(0, 256, parts["codes"].shape).to(torch.uint8).cuda()
    scale = torch.randint(0, 256, parts["scale"].shape).to(torch.uint8).cuda().view(plain.FLOAT8)
    given = (codes, scale, parts["scale_2"], *shape, layout == "comfy", dtype)
    assert_same_bits(OPERATORS.dequantise_nvfp4(*given), plain_nvfp4.dequantise(*given))


def test_codes_decoded_by_bits_are_those_that_instructions_decode() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(plain.FLOAT8).repeat(3, 1)
    scale = torch.tensor([1.0, 0.3, 1e-6], device="cuda")
    expected = plain.dequantise(codes, scale[:, None], torch.bfloat16)
    from slipcast.engine.kernels import dequantise_kernel

    for native in {False, dequantise_kernel.reads_float8(codes.device)}:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dequantise_kernel, "reads_float8", lambda _device, answer=native: answer)
            for tile in (None, Tile(1, 1024, 4), Tile(64, 32, 2)):
                assert_same_bits(launch_dequantise(codes, scale, torch.bfloat16, tile), expected)


def test_values_encoded_by_bits_are_those_that_instructions_encode() -> None:
    from slipcast.engine.kernels import quantise_kernel

    for native in {False, quantise_kernel.writes_float8(torch.device("cuda", 0))}:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(quantise_kernel, "writes_float8", lambda _device, answer=native: answer)
            assert_rows_agree(random(100, 1000) * torch.logspace(-12, 3, 1000, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_takes_them_for_operators(dtype: torch.dtype) -> None:
    rows, scale = random(5, 64, dtype=dtype), torch.tensor(0.01, device="cuda")
    torch.library.opcheck(OPERATORS.quantise_rows.default, (rows,))
    torch.library.opcheck(OPERATORS.quantise_under.default, (rows, scale))
    integers = torch.ones(5, 64, dtype=torch.int8, device="cuda")
    torch.library.opcheck(OPERATORS.dequantise_rows.default, (integers, random(5), dtype))


CODECS = [
    *(Float8("row"), Float8("tensor"), Float8("block", block=32)),
    *(Int8("row"), MXFP8(), NVFP4("comfy"), NVFP4("linear")),
]


def layer_of(codec: Codec, compute: bool = False, static: float | None = None) -> nn.Module:
    """A layer on the GPU."""
    torch.manual_seed(0)
    layer = quantise_module_(nn.Linear(256, 96).requires_grad_(False), codec, torch.bfloat16)
    if compute:
        probe = probe_fp8(resolve_device("cuda")[0])
        if not probe.ok:
            pytest.skip(probe.reason)
        enable_compute_(layer, input_scale=None if static is None else torch.tensor(static))
    return layer.cuda()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_layer_holds_the_same_weight_with_and_without_kernels(codec: Codec) -> None:
    layer = layer_of(codec)
    values = layer.dequantised_weight()
    with pytest.MonkeyPatch.context() as without:
        without.setattr(operators, "_fused", lambda *_, **__: False)
        assert torch.equal(layer.dequantised_weight(), values)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"storage in {codec.name}": lambda codec=codec: layer_of(codec) for codec in CODECS},
    "compute": lambda: layer_of(Float8("row"), compute=True),
    "compute under a static scale": lambda: layer_of(Float8("row"), True, 0.02),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_one_graph_serves_all_numbers_of_rows(kind: str) -> None:
    layer = LAYERS[kind]()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True)
    for rows in (64, 17, 200, 3):
        given = random(rows, 256, dtype=torch.bfloat16, seed=rows)
        assert relative_l2(compiled(given), layer(given)) <= 0.003
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_forward_needs_room_for_one_dequantised_weight() -> None:
    """The next layer's takes the same place: torch's allocator keeps it."""
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).requires_grad_(False)
    for layer in layers:
        quantise_module_(layer, Float8("row"), torch.bfloat16)
    layers.cuda()
    given = random(1, 2048, dtype=torch.bfloat16)
    with torch.no_grad():
        layers(given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layers(given)
        assert torch.cuda.max_memory_allocated() - before < 1.2 * 2048 * 2048 * 2


class Same(nn.Module):
    """Layers that are given the same tensor, one that is given another, and the same one written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(Float8("row"), compute=True) for _ in range(3))

    def forward(self, given: Tensor) -> list[Tensor]:
        first, second, third = self.layers
        results = [first(given), second(given), third(given * 2)]
        given.mul_(3)
        return [*results, first(given), third(given)]


def test_layers_that_are_given_the_same_tensor_quantise_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    quantise = operators.quantise_rows
    monkeypatch.setattr(
        quantised_input, "quantise_rows", lambda rows, *given: asked.append(rows) or quantise(rows, *given)
    )
    model, given = Same(), random(64, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        results = model(given.clone())
        assert len(asked) == 3
        with torch.inference_mode():
            plainly = model(given.clone())
        assert len(asked) == 8
    assert all(torch.equal(*pair) for pair in zip(results, plainly, strict=True))
    assert not quantised_input._last.slot, "codes die with their tensor"
