"""What a model with quantised layers says of itself: its dtype, its class, its saved config."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ZImageTransformer2DModel,
)
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.compute_dtype import compute_dtype
from slipcast.engine.layers import QUANTISED_CLASSES, QuantisedModule, quantise_module_
from slipcast.engine.quantised_model import mark_quantised_, quantization_config
from slipcast.registry.errors import UnsupportedFormatError
from support.number_formats import bytes_of, relative_l2

CONFIG = {
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 32,
    "axes_dims": [8, 8, 8],
    "axes_lens": [64, 32, 32],
    "in_channels": 16,
}


def plain_model() -> ZImageTransformer2DModel:
    torch.manual_seed(0)
    model = ZImageTransformer2DModel(**CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 1.0))
    return model


def quantised_model(dtype: torch.dtype = torch.float32) -> ZImageTransformer2DModel:
    """A quantised transformer as the loader leaves it; t_embedder stays, since its forward reads its weight's dtype."""
    model = plain_model().to(dtype)
    for path, module in model.named_modules():
        if type(module) in QUANTISED_CLASSES and not path.startswith(("t_embedder", "cap_embedder")):
            quantise_module_(module, Float8("row"), dtype)
    return mark_quantised_(model)


def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(16, 1, 8, 8, generator=generator).to(dtype)]
    captions = [torch.randn(7, 32, generator=generator).to(dtype)]
    with torch.no_grad():
        return model(latents, torch.tensor([0.3], dtype=dtype), captions).sample[0]


def codes(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor).tobytes() for name, tensor in model.state_dict().items()}


class Holder(DiffusionPipeline):
    def __init__(self, transformer: ZImageTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_model_dtype_is_the_compute_dtype(dtype: torch.dtype) -> None:
    model = quantised_model(dtype)
    assert model.dtype == dtype
    assert compute_dtype(model) == dtype
    model.to(torch.float32)
    assert model.dtype == compute_dtype(model) == torch.float32
    assert relative_l2(run(model), run(plain_model())) < 0.12


def test_a_model_of_codes_alone_does_not_say_float8() -> None:
    layers = nn.Sequential(
        *[quantise_module_(nn.Linear(8, 8, bias=False), Float8("row"), torch.bfloat16) for _ in "ab"]
    )
    assert compute_dtype(layers) == torch.bfloat16
    assert mark_quantised_(layers).dtype == torch.bfloat16


def test_a_plain_models_compute_dtype_holds_most_of_its_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 4).float(), nn.Linear(16, 16).bfloat16())
    assert compute_dtype(model) == torch.bfloat16
    model[1].to(torch.float8_e4m3fn)
    assert compute_dtype(model) == torch.float32
    assert compute_dtype(nn.BatchNorm1d(4, affine=False).half()) == torch.float16
    assert compute_dtype(nn.Identity()) == torch.get_default_dtype()


def test_the_class_looks_the_same() -> None:
    model = quantised_model()
    assert isinstance(model, ZImageTransformer2DModel)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), attribute) == getattr(ZImageTransformer2DModel, attribute)
    assert type(model) is type(quantised_model())
    assert type(mark_quantised_(model)) is type(model)
    assert type(model)._repeated_blocks == ZImageTransformer2DModel._repeated_blocks
    assert dict(model.config).keys() == dict(plain_model().config).keys()
    assert isinstance(type(model).from_config(model.config), ZImageTransformer2DModel)


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_a_copy_is_the_same_model(way) -> None:
    model = quantised_model(torch.bfloat16)
    other = way(model)
    assert type(other) is type(model)
    assert other.dtype == torch.bfloat16
    assert codes(other) == codes(model)
    assert dict(other.config) == dict(model.config)
    assert torch.equal(run(other, torch.bfloat16), run(model, torch.bfloat16))


def test_a_saved_model_says_what_is_quantised_and_how(tmp_path: Path) -> None:
    model = quantised_model(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == "ZImageTransformer2DModel"
    assert config["dim"] == 48
    said = config["quantization_config"]
    assert said == quantization_config(model)
    assert said["quant_method"] == "slipcast"
    assert said["version"] == 1
    assert said["compute_dtype"] == "bfloat16"
    layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantisedModule)}
    assert len(layers) == 34
    assert {path: codec_named(name) for path, name in said["modules"].items()} == {
        path: module.codec for path, module in layers.items()
    }
    assert "quantization_config" not in model.config
    model.half()
    model.save_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["compute_dtype"] == "float16"


def test_a_saved_models_weights_hold_codes_and_scales(tmp_path: Path) -> None:
    model = quantised_model(torch.bfloat16)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    assert saved["layers.0.attention.to_q.weight"].dtype == torch.float8_e4m3fn
    assert saved["layers.0.attention.to_q.weight_scale"].dtype == torch.float32
    assert {name: bytes_of(tensor).tobytes() for name, tensor in saved.items()} == codes(model)
    again = quantised_model(torch.bfloat16)
    for parameter in again.parameters():
        parameter.data.view(torch.uint8).zero_()
    again.load_state_dict(saved)
    assert codes(again) == codes(model)


def test_plain_diffusers_refuses_the_folder(tmp_path: Path) -> None:
    quantised_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unknown quantization type, got slipcast"):
        ZImageTransformer2DModel.from_pretrained(tmp_path)
    plain_model().save_pretrained(tmp_path)
    ZImageTransformer2DModel.from_pretrained(tmp_path)


def test_a_marked_model_without_quantised_layers_saves_as_ever(tmp_path: Path) -> None:
    mark_quantised_(plain_model()).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert codes(ZImageTransformer2DModel.from_pretrained(tmp_path)) == codes(plain_model())


def test_flashpack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"FlashPack(.|\n)*save it without use_flashpack"):
        quantised_model().save_pretrained(tmp_path, use_flashpack=True)
    assert not list(tmp_path.iterdir())


def test_a_pipeline_holds_it_and_saves_it(tmp_path: Path) -> None:
    model = quantised_model(torch.bfloat16)
    pipeline = Holder(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler())
    assert pipeline.transformer is model
    assert pipeline.dtype == torch.bfloat16
    before = codes(model)
    pipeline.to(torch.float32)
    assert model.dtype == torch.float32
    assert {name: data for name, data in codes(model).items() if "weight_scale" in name} == {
        name: data for name, data in before.items() if "weight_scale" in name
    }
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "ZImageTransformer2DModel"]
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "slipcast"
    with pytest.raises(ValueError, match="Unknown quantization type, got slipcast"):
        Holder.from_pretrained(tmp_path)


def test_a_compiled_forward_may_read_the_dtype() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @property
        def dtype(self) -> torch.dtype:
            raise AssertionError("the plain class is asked")

        def forward(self, given_input: Tensor) -> Tensor:
            return self.linear(given_input.to(self.dtype))

    model = Reader()
    quantise_module_(model.linear, Float8("row"), torch.float32)
    mark_quantised_(model)
    torch._dynamo.reset()
    given_input = torch.randn(2, 8).double()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given_input), model(given_input))


def test_a_transformers_model_reports_it_too() -> None:
    from transformers import T5Config, T5EncoderModel

    settings = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = T5EncoderModel(settings).to(torch.bfloat16)
    for path, module in model.named_modules():
        if type(module) is nn.Linear and not path.endswith(".wo"):  # whose input is cast to its weight's dtype
            quantise_module_(module, Float8("row"), torch.bfloat16)
    mark_quantised_(model)
    assert model.dtype == torch.bfloat16
    assert isinstance(pickle.loads(pickle.dumps(model)), T5EncoderModel)
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.dtype == torch.bfloat16


def test_other_libraries_casting_and_offloading_leave_it_alone() -> None:
    model = quantised_model(torch.bfloat16)
    before, result = codes(model), run(model, torch.bfloat16)
    offloaded = copy.deepcopy(model)
    apply_group_offloading(
        offloaded, torch.device("cpu"), torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )
    casting = copy.deepcopy(model)
    casting.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    for other in (offloaded, casting):
        assert torch.equal(run(other, torch.bfloat16), result)
        assert codes(other) == before


def test_adapters_of_peft_are_a_side_branch() -> None:
    model = quantised_model(torch.bfloat16)
    before, result = codes(model), run(model, torch.bfloat16)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "w1"]))
    adapters = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 24
    assert {tensor.dtype for tensor in adapters.values()} == {torch.bfloat16}
    assert torch.equal(run(model, torch.bfloat16), result)
    for name, tensor in adapters.items():
        if "lora_B" in name:
            nn.init.normal_(tensor, std=0.1)
    assert not torch.equal(run(model, torch.bfloat16), result)
    after = codes(model)
    assert {name: after[adapted(name, after)] for name in before} == before


def adapted(name: str, names: dict[str, bytes]) -> str:
    module, _, tensor = name.rpartition(".")
    return name if name in names else f"{module}.base_layer.{tensor}"
