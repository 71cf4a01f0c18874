"""Adapters on quantised layers: they work beside the codes, change no bit of them, and are never merged into them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.fp8_compute import Float8ComputeLinear, enable_compute_
from slipcast.engine.layers import QuantisedLinear, QuantisedModule, quantise_module_
from slipcast.engine.quantised_model import mark_quantised_
from slipcast.registry.errors import QuantisationError
from support.number_formats import bytes_of, relative_l2
from support.tiny_z_image import CONFIG, tiny_tensors

peft = pytest.importorskip("peft")

Bits = dict[str, bytes]
ROW, TENSOR, INT8 = Float8("row"), Float8("tensor"), Int8("row")


def bits_of(model: nn.Module) -> Bits:
    """Of codes, scales and everything else that quantised layers hold, by name without what adapters add to it."""
    return {
        f"{path.replace('.base_layer', '')}.{name}": bytes_of(tensor).tobytes()
        for path, module in model.named_modules()
        if isinstance(module, QuantisedModule)
        for name, tensor in module.state_dict().items()
    }


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Tensor) -> Tensor:
        return self.layer(given)


def linear(codec: Codec, compute: bool, dtype: torch.dtype) -> QuantisedLinear:
    torch.manual_seed(0)
    layer = quantise_module_(nn.Linear(64, 32), codec, dtype)
    return enable_compute_(layer, input_scale=None) if compute else layer


def adapted(layer: nn.Module, **options: object) -> Holder:
    """A model of one layer with a random adapter, its effect as large as the layer's own."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["layer"], init_lora_weights=False, **options)
    holder = Holder(layer)
    peft.inject_adapter_in_model(config, holder)
    torch.manual_seed(1)
    for name, parameter in holder.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).to(parameter.dtype) / 4
    return holder.requires_grad_(False)


PATHS = {
    "storage, rows": (ROW, False),
    "storage, tensor": (TENSOR, False),
    "storage, int8": (INT8, False),
    "compute, rows": (ROW, True),
    "compute, tensor": (TENSOR, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_an_adapter_adds_its_product_and_leaves_the_layer_on_its_path(path: str, dtype: torch.dtype) -> None:
    layer = linear(*PATHS[path], dtype)
    before, kind = bits_of(layer), type(layer)
    given = torch.randn(7, 64).to(dtype)
    alone = layer(given)
    model = adapted(layer)
    down, up = model.layer.lora_A["default"].weight, model.layer.lora_B["default"].weight
    assert down.dtype == up.dtype == dtype
    assert type(model.layer.base_layer) is kind
    delta = 2 * (given.double() @ down.double().t() @ up.double().t())
    result = model(given)
    assert result.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert relative_l2(result, alone.double() + delta) < tolerance
    assert relative_l2(result.double() - alone.double(), delta) < 2 * tolerance
    assert bits_of(layer) == before
    model.layer.enable_adapters(False)
    assert torch.equal(model(given), alone)


OTHERS: dict[str, tuple[nn.Module, Tensor]] = {
    "conv1d": (nn.Conv1d(8, 6, 3, padding=1), torch.randn(2, 8, 10)),
    "conv2d": (nn.Conv2d(8, 12, (3, 2), stride=2), torch.randn(2, 8, 9, 9)),
    "conv3d": (nn.Conv3d(4, 6, 2), torch.randn(1, 4, 5, 5, 5)),
    "embedding": (nn.Embedding(20, 16), torch.tensor([[1, 3, 19]])),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_convolutions_and_embeddings_take_adapters_in_the_compute_dtype(kind: str) -> None:
    plain, given = OTHERS[kind]
    layer = quantise_module_(copy.deepcopy(plain), ROW, torch.bfloat16)
    before, given = bits_of(layer), given.bfloat16() if given.is_floating_point() else given
    alone = layer(given)
    model = adapted(layer)
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2
    assert {parameter.dtype for parameter in adapters.values()} == {torch.bfloat16}
    assert not any(isinstance(module, QuantisedModule) for module in model.modules() if module is not layer)
    result = model(given)
    assert result.shape == alone.shape
    assert result.dtype == torch.bfloat16
    if kind == "embedding":
        down, up = model.layer.lora_embedding_A["default"], model.layer.lora_embedding_B["default"]
        delta = down.t()[given] @ up.t()
    else:
        delta = model.layer.lora_B["default"](model.layer.lora_A["default"](given))
    assert relative_l2(result, alone + 2 * delta) < 2**-8
    assert bits_of(layer) == before
    model.layer.enable_adapters(False)
    assert torch.equal(model(given), alone)


def test_a_layer_like_a_quantised_one_is_a_plain_one() -> None:
    layer = linear(ROW, True, torch.float32)
    like = type(layer)(8, 4, bias=False)
    assert type(like) is nn.Linear
    assert like.weight.shape == (4, 8)
    convolution = quantise_module_(nn.Conv2d(4, 4, 3), ROW, torch.float32)
    assert type(type(convolution)(4, 2, kernel_size=3)) is nn.Conv2d


def merge_unsafely(model: Holder) -> None:
    model.layer.merge()


def merge_safely(model: Holder) -> None:
    model.layer.merge(safe_merge=True)


@pytest.mark.parametrize("merge", [merge_unsafely, merge_safely])
@pytest.mark.parametrize("path", PATHS)
def test_merging_is_refused_with_the_reason_and_changes_nothing(path: str, merge: Callable[[Holder], None]) -> None:
    """torch would refuse float8 without a reason, and add what is left of an adapter in int8 to codes in int8."""
    model = adapted(linear(*PATHS[path], torch.bfloat16))
    before, given = bits_of(model), torch.randn(3, 64).bfloat16()
    expected = model(given)
    with pytest.raises(QuantisationError, match=r"add on the codes(.|\n)*never merged into them(.|\n)*fp8=off"):
        merge(model)
    assert bits_of(model) == before
    assert torch.equal(model(given), expected)


CONFIGS = {
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["layer"], init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=["layer"], init_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["layer"], feedforward_modules=[], init_ia3_weights=False),
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_peft_model_can_not_be_merged_and_unloads_to_the_same_bits(config: str) -> None:
    layer = linear(ROW, True, torch.bfloat16)
    before, given = bits_of(layer), torch.randn(3, 64).bfloat16()
    alone = layer(given)
    model = peft.get_peft_model(Holder(layer), CONFIGS[config]())
    assert not torch.equal(model(given), alone)
    assert not any(parameter.dtype.itemsize == 1 for name, parameter in model.named_parameters() if "base" not in name)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(QuantisationError, match="the codes of a quantised weight"):
            merge()
    unloaded = model.unload()
    assert unloaded.layer is layer
    assert bits_of(layer) == before
    assert torch.equal(unloaded(given), alone)


def test_an_adapter_that_reads_the_weight_is_refused_rather_than_given_codes() -> None:
    """DoRA takes norms of the weight; those of the codes are hundreds of times too large."""
    with pytest.raises(QuantisationError, match=r"the codes of a quantised weight(.|\n)*dequantised_weight\(\)"):
        adapted(linear(ROW, False, torch.bfloat16), use_dora=True)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "addition": lambda codes, other: codes + other,
    "addition the other way": lambda codes, other: other + codes,
    "subtraction in place": lambda codes, other: codes.data.sub_(other),
    "product": lambda codes, other: torch.mul(codes.data, other),
    "matrix product": lambda codes, other: other.t() @ codes,
    "linear": lambda codes, other: nn.functional.linear(other, codes),
    "after a cast": lambda codes, other: codes.float() + other,
    "after a copy": lambda codes, other: codes.data.clone().add_(other),
    "fusing": lambda codes, other: torch.cat([codes.data, other]),
    "overwriting": lambda codes, other: codes.data.copy_(other),
    "replacing": lambda codes, other: setattr(codes, "data", other),
    "overwriting a part": lambda codes, other: codes.__setitem__(slice(0, 2), other[:2]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("codec", [ROW, INT8], ids=lambda codec: codec.name)
def test_codes_are_not_taken_for_values(codec: Codec, operation: str) -> None:
    layer = linear(codec, False, torch.float32)
    before = bits_of(layer)
    with pytest.raises(QuantisationError, match=r"on the codes of a quantised weight, as if they were its values"):
        OPERATIONS[operation](layer.weight, torch.randn(32, 64))
    assert bits_of(layer) == before


def test_codes_can_be_moved_copied_and_compared() -> None:
    """As offloading hooks do, which move parameters by themselves, and as people do who look."""
    layer = linear(ROW, False, torch.float32)
    before, weight = bits_of(layer), layer.weight
    layer.weight.data = layer.weight.data.to("cpu", non_blocking=True).clone().contiguous()
    layer._parameters["weight"] = type(weight)(weight.data, requires_grad=weight.requires_grad)
    layer.weight.data.copy_(weight.detach())
    assert bits_of(layer) == before
    assert bool((layer.weight == weight).all())
    assert torch.equal(layer.weight.view(torch.uint8), weight.view(torch.uint8))
    assert "float8_e4m3fn" in repr(layer.weight)
    copied = copy.deepcopy(layer.weight)
    assert type(copied) is type(weight)
    assert copied.data_ptr() != weight.data_ptr()
    assert type(layer.state_dict()["weight"]) is Tensor


@pytest.mark.parametrize("way", ["deepcopy", "meta", "assigned", "swapped"])
def test_codes_are_guarded_in_every_copy(way: str) -> None:
    layer = linear(ROW, True, torch.float32)
    other = copy.deepcopy(layer)
    if way == "meta":
        other.to("meta").to_empty(device="cpu")
    elif way == "assigned":
        other.load_state_dict(layer.state_dict(), assign=True)
    elif way == "swapped":
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            other.half()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert type(other.weight) is type(layer.weight)
    with pytest.raises(QuantisationError):
        other.weight.data += torch.ones(32, 64)


@pytest.fixture
def transformer() -> nn.Module:
    """A small diffusers model with layers of all precisions: the second of three blocks is plain."""
    diffusers = pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = diffusers.ZImageTransformer2DModel(**CONFIG)
        model.load_state_dict(tiny_tensors(torch.float32))
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".attention." in path and not path.startswith("layers.1."):
            quantise_module_(module, ROW, torch.float32)
            if path.endswith(("to_k", "to_out.0")):
                enable_compute_(module, input_scale=None)
    return mark_quantised_(model).eval().requires_grad_(False)


def run(model: nn.Module) -> Tensor:
    random = torch.Generator().manual_seed(3)
    image = torch.randn(4, 1, 8, 8, generator=random)
    text = torch.randn(5, 24, generator=random)
    return model([image], torch.tensor([0.5]), [text]).sample[0]


TARGETS = ["to_q", "to_k", "to_out.0"]


def lora_weights(model: nn.Module) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(tuple(TARGETS)):
            for name, shape in (("lora_A", (4, module.in_features)), ("lora_B", (module.out_features, 4))):
                weights[f"{path}.{name}.weight"] = torch.randn(shape, generator=random).div_(4)
    return weights


def test_a_diffusers_model_takes_adapters_and_gives_them_back(transformer: nn.Module) -> None:
    before, alone, weights = bits_of(transformer), run(transformer), lora_weights(transformer)
    transformer.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    assert torch.equal(run(transformer), alone)
    transformer.load_lora_adapter(weights, prefix=None, adapter_name="loaded")
    transformer.set_adapters(["loaded"], [0.7])
    assert bits_of(transformer) == before
    changed = run(transformer)
    assert relative_l2(changed, alone) > 0.01
    assert not any(p.dtype.itemsize == 1 for name, p in transformer.named_parameters() if "lora_" in name)
    assert any(isinstance(module, Float8ComputeLinear) for module in transformer.modules())
    transformer.disable_lora()
    assert torch.equal(run(transformer), alone)
    transformer.unload_lora()
    assert bits_of(transformer) == before
    assert torch.equal(run(transformer), alone)


def test_an_adapter_changes_a_quantised_model_as_it_changes_the_plain_one(transformer: nn.Module) -> None:
    """The weights that the codes hold, in plain layers, are what the adapter would be merged into elsewhere."""
    plain, weights = copy.deepcopy(transformer), lora_weights(transformer)
    for path, module in list(plain.named_modules()):
        if isinstance(module, QuantisedLinear):
            replacement = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            replacement.weight.data = module.dequantised_weight()
            if module.bias is not None:
                replacement.bias.data = module.bias.detach().clone()
            plain.set_submodule(path, replacement)
    for model in (transformer, plain):
        model.load_lora_adapter(weights, prefix=None, adapter_name="loaded")
    plain.fuse_lora()
    assert relative_l2(run(transformer), run(plain)) < 0.04


@pytest.mark.parametrize("options", [{}, {"safe_fusing": True}, {"lora_scale": 0.5}], ids=str)
def test_fusing_an_adapter_is_refused_before_anything_is_changed(transformer: nn.Module, options: dict) -> None:
    transformer.load_lora_adapter(lora_weights(transformer), prefix=None, adapter_name="loaded")
    before, expected = bits_of(transformer), run(transformer)
    with pytest.raises(QuantisationError, match=r"fused into \d+ quantised layers(.|\n)*attention.to_q(.|\n)*fp8=off"):
        transformer.fuse_lora(**options)
    assert bits_of(transformer) == before
    assert torch.equal(run(transformer), expected)


def test_adapters_of_plain_layers_alone_are_fused(transformer: nn.Module) -> None:
    weights = {name: weight for name, weight in lora_weights(transformer).items() if name.startswith("layers.1.")}
    transformer.load_lora_adapter(weights, prefix=None, adapter_name="loaded")
    expected = run(transformer)
    transformer.fuse_lora()
    assert transformer.layers[1].attention.to_q.merged
    assert relative_l2(run(transformer), expected) < 1e-4


def test_fusing_the_projections_of_quantised_layers_is_refused() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".attn." in path:
            quantise_module_(module, ROW, torch.float32)
    before = bits_of(mark_quantised_(model))
    with pytest.raises(QuantisationError, match=r"cat on the codes(.|\n)*projections of quantised"):
        model.fuse_qkv_projections()
    assert bits_of(model) == before
