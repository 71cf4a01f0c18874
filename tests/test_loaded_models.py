"""What can be done with a loaded model: copies, pickles, a forward against float32, and every tensor of it real."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from torch import nn

import slipcast
from slipcast.demo.recognise import IMAGE_SIZE
from slipcast.demo.sampling import draw_noise, load_captions
from slipcast.registry.errors import AccountingError
from support.fp8_checkpoints import QUANTISED, Scaled, fp8_file
from support.isolation import isolate
from support.number_formats import bytes_of, relative_l2
from support.tiny_z_image import CONFIG, Tensors, tiny_tensors, write_native

DEMO = Path(slipcast.__path__[0]) / "demo"
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


@pytest.fixture
def path(tmp_path: Path, tensors: Tensors) -> Path:
    return write_native(tmp_path / "m.safetensors", tensors)


def _bits(model: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (tensor.dtype, bytes_of(tensor).tobytes()) for name, tensor in model.state_dict().items()}


def _inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    latents = [torch.randn(4, 1, 8, 8, generator=generator).to(dtype) for _ in range(2)]
    captions = [torch.randn(tokens, 24, generator=generator).to(dtype) for tokens in (5, 9)]
    return latents, torch.tensor([0.3, 0.8]), captions


def _output(model: nn.Module) -> torch.Tensor:
    latents, time, captions = _inputs(slipcast.compute_dtype(model))
    with torch.no_grad():
        return torch.stack(model(latents, time, captions, return_dict=False)[0]).float()


def _through_torch_save(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _through_torch_save]
)
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_a_copy_is_the_model_again(path: Path, fp8: str, mmap: bool, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = slipcast.load(path, device="cpu", dtype="bfloat16", fp8=fp8, mmap=mmap).model
    other = copied(model)
    assert _bits(other) == _bits(model)
    assert type(other) is type(model)
    assert isinstance(other, ZImageTransformer2DModel)
    assert other.dtype == slipcast.compute_dtype(other) == torch.bfloat16
    if mmap:
        assert torch.equal(_output(other), _output(model))
    with torch.no_grad():
        other.get_parameter("x_pad_token").add_(1)
    assert _bits(other) != _bits(model)


def test_a_pickle_of_a_mapped_model_is_as_large_as_the_model(path: Path) -> None:
    """A tensor that is a view of the whole file would bring the whole file along."""
    loaded = slipcast.load(path, device="cpu", dtype="bfloat16")
    assert loaded.report.plan.bytes.host_peak_anonymous == 0
    assert len(pickle.dumps(loaded.model)) < 1.3 * loaded.report.resident
    assert all(
        tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in (*loaded.model.parameters(), *loaded.model.buffers())
    )


@pytest.mark.parametrize("mmap", [True, False])
def test_codes_and_scales_survive_what_pipelines_do_to_models(path: Path, mmap: bool) -> None:
    model = slipcast.load(path, device="cpu", dtype="bfloat16", fp8="storage", mmap=mmap).model
    before = {
        name: bits for name, bits in _bits(model).items() if name.removesuffix("_scale") + "_scale" in _bits(model)
    }
    assert len(before) == 84
    for move in (lambda: model.to("cpu"), lambda: model.to(torch.float32), model.half, model.bfloat16, model.eval):
        move()
        after = _bits(model)
        assert {name: after[name] for name in before} == before
    assert model.dtype == torch.bfloat16
    _output(model)
    after = _bits(model)
    assert {name: after[name] for name in before} == before


def test_a_model_that_begins_with_codes_does_not_say_float8(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, ["x_embedder", "final_layer.linear", *QUANTISED], Scaled("N"))
    model = slipcast.load(file.write(tmp_path / "fp8.safetensors"), device="cpu", dtype="float32").model
    for name in ("x_pad_token", "cap_pad_token"):
        delattr(model, name)
    assert next(iter(model.parameters())).dtype == torch.float8_e4m3fn
    assert model.dtype == torch.float32


def _reference(tensors: Tensors) -> nn.Module:
    model = ZImageTransformer2DModel(**CONFIG)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"dtype": "float32", "fp8": "off"}, 1e-6),
        ({"dtype": "bfloat16", "fp8": "off"}, 0.02),
        ({"dtype": "float32", "fp8": "storage"}, 0.08),
        ({"dtype": "bfloat16", "fp8": "storage"}, 0.08),
    ],
)
def test_a_forward_is_close_to_that_in_float32(
    path: Path, tensors: Tensors, settings: dict[str, str], bound: float
) -> None:
    expected = _output(_reference(tensors))
    assert relative_l2(_output(slipcast.load(path, device="cpu", **settings).model), expected) < bound


def test_a_forward_of_kept_codes_is_that_of_their_values(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors, QUANTISED[::2], Scaled("N"))
    for layer in QUANTISED[1::2]:
        file.scale_layer(layer, Scaled(""))
    kept = slipcast.load(file.write(tmp_path / "fp8.safetensors"), device="cpu", dtype="float32")
    assert sum(module.codec is not None for module in kept.report.plan.modules) == 35
    expected = _output(_reference({name: value.view(tensors[name].shape) for name, value in file.expected().items()}))
    assert relative_l2(_output(kept.model), expected) < 1e-5
    assert relative_l2(expected, _output(_reference(tensors))) > 0.005


def test_the_demonstration_s_model_in_fp8_storage_is_close_to_float32() -> None:
    captions = load_captions(DEMO / "captions.safetensors")
    noise = draw_noise(2, seed=3)

    def velocity(**settings: Any) -> torch.Tensor:
        loaded = slipcast.load(DEMO / "digits.safetensors", device="cpu", **settings)
        assert loaded.report.differences == ()
        dtype = slipcast.compute_dtype(loaded.model)
        assert noise.shape == (2, 1, IMAGE_SIZE, IMAGE_SIZE)
        with torch.no_grad():
            latents = [one[:, None].to(dtype) for one in noise]
            words = [captions[digit].to(dtype) for digit in (1, 4)]
            time = torch.tensor([0.0, 0.9])
            return torch.stack([out.float() for out in loaded.model(latents, time, words, return_dict=False)[0]])

    exact = velocity(dtype="float32", fp8="off")
    assert exact.std() > 0.3
    assert relative_l2(velocity(dtype="float32", fp8="storage"), exact) < 0.02
    assert relative_l2(velocity(dtype="bfloat16", fp8="storage"), exact) < 0.02
    assert relative_l2(velocity(dtype="bfloat16", fp8="off"), exact) < 0.01


def test_a_tensor_that_nothing_filled_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(ZImageTransformer2DModel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.table = {"a": [torch.empty(2, device="meta")]}

    from slipcast.engine import build

    monkeypatch.setattr(build, "model_class", lambda *_: Forgetful)
    with pytest.raises(AccountingError) as caught:
        slipcast.load(path, device="cpu")
    assert caught.value.items == ("table.a.0",)
    assert "1 tensors of the model that nothing has filled" in caught.value.found
