"""Building model classes without their weights: what is on the meta device, and what has to be real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import slipcast
from slipcast.engine.build import build_on_meta, build_with_buffers, model_class
from slipcast.engine.materialise import meta_tensors
from slipcast.registry.errors import ConfigError, FamilyFileError
from support.isolation import isolate
from support.number_formats import bytes_of

ROTARY: dict[str, dict[str, Any]] = {
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16,
        "pooled_projection_dim": 12, "out_channels": 4, "pos_embed_max_size": 12,
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6),
    },
}  # fmt: skip
"""Classes that compute tables in their constructors: as buffers of both kinds, and in plain attributes."""

FAMILY = """
schema: 1
id: rotary
title: Rotary
kind: denoiser
model: diffusers.{name}
identify: {{has: [{first}]}}
config: {{{config}}}
precision:
  compute: checkpoint
  fp16: safe
  fp8: {{storage: supported, compute: supported}}
"""


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a model by its path, wherever a module keeps it."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        own = dict(vars(module))
        groups = own.pop("_parameters"), own.pop("_buffers"), own
        del own["_modules"]
        for name, value in (item for group in groups for item in group.items()):
            found.update(_within(value, f"{path}.{name}" if path else name, 4))
    return found


def _within(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and not isinstance(value, (nn.Module, type)):
        members: Any = ()
        if isinstance(value, dict):
            members = value.items()
        elif isinstance(value, (list, tuple)):
            members = enumerate(value)
        elif hasattr(value, "__dict__"):
            members = vars(value).items()
        for name, member in members:
            yield from _within(member, f"{path}.{name}", depth - 1)


def _plainly(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**ROTARY[name])
    return model.eval()


@pytest.mark.parametrize("name", ROTARY)
def test_everything_but_parameters_is_what_the_constructor_makes(name: str) -> None:
    expected, built = _tensors(_plainly(name)), _tensors(build_with_buffers(f"diffusers.{name}", ROTARY[name]))
    assert built.keys() == expected.keys()
    computed = {path: tensor for path, tensor in expected.items() if not isinstance(tensor, nn.Parameter)}
    assert computed
    for path, tensor in built.items():
        assert (tensor.dtype, tensor.shape) == (expected[path].dtype, expected[path].shape)
        assert tensor.is_meta is (path not in computed), path
        if path in computed:
            assert torch.equal(tensor, computed[path]), path


@pytest.mark.parametrize("name", ROTARY)
def test_on_the_meta_device_nothing_has_memory(name: str) -> None:
    model = build_on_meta(f"diffusers.{name}", ROTARY[name])
    assert not model.training
    named = (*model.named_parameters(), *model.named_buffers())
    assert all(tensor.is_meta for _, tensor in named)
    left = {path for path, tensor in _tensors(model).items() if tensor.is_meta}
    assert set(meta_tensors(model)) == left > {path for path, _ in model.named_parameters()}


@pytest.mark.parametrize("fp8", ["off", "storage"])
@pytest.mark.parametrize("name", ROTARY)
def test_every_tensor_of_a_loaded_model_is_real(tmp_path: Path, name: str, fp8: str) -> None:
    plain = _plainly(name)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    state = {key: tensor.contiguous() for key, tensor in plain.state_dict().items()}
    folder = tmp_path / "families"
    folder.mkdir()
    config = ", ".join(
        f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in ROTARY[name].items()
    )
    first = next(key for key in state if ".0." in key)
    (folder / "rotary.yaml").write_text(FAMILY.format(name=name, first=first, config=config))
    save_file(state, tmp_path / "m.safetensors")
    loaded = slipcast.load(
        tmp_path / "m.safetensors", device="cpu", dtype="float32", fp8=fp8, family="rotary", families=[str(folder)]
    )
    assert loaded.report.differences == ()
    assert list(meta_tensors(loaded.model)) == []
    found, expected = _tensors(loaded.model), _tensors(plain)
    assert all(not tensor.is_meta for tensor in found.values())
    same = found.keys() & expected.keys() if fp8 == "storage" else expected.keys() | found.keys()
    for path in same:
        if not hasattr(_module(loaded.model, path), "weight_scale"):
            assert torch.equal(found[path], expected[path]), path
    buffers = {target.name for target in loaded.report.plan.targets if target.how == "computed"}
    assert buffers == {path for path, _ in plain.named_buffers()} - state.keys()
    held = (*loaded.model.parameters(), *loaded.model.buffers())
    assert loaded.report.resident == sum(tensor.nbytes for tensor in held)


def _module(model: nn.Module, path: str) -> nn.Module:
    for part in path.split("."):
        if part in model._modules:
            model = model.get_submodule(part)
    return model


def test_parameters_of_other_threads_stay_real() -> None:
    """A model that another thread builds in the meantime must not lose its weights."""
    started, done = threading.Event(), threading.Event()
    layers: list[nn.Linear] = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            started.set()
            assert done.wait(10)
            self.second = nn.Linear(2, 2)

    def elsewhere() -> None:
        assert started.wait(10)
        layers.append(nn.Linear(3, 3))
        done.set()

    from slipcast.engine import build

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with build._parameters_on_meta():
        slow = Slow()
    thread.join()
    assert all(parameter.is_meta for parameter in slow.parameters())
    assert not any(parameter.is_meta for parameter in layers[0].parameters())
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


def test_a_failing_constructor_leaves_torch_as_it_was() -> None:
    register = nn.Module.register_parameter
    with pytest.raises(ConfigError) as caught:
        build_with_buffers("diffusers.SD3Transformer2DModel", {"num_layers": "many"})
    assert "diffusers.SD3Transformer2DModel refuses its configuration: TypeError" in caught.value.found
    assert "num_layers: many" in caught.value.items
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "torch.nn.Linear", "diffusers._lazy", "diffusers.utils", "diffusers.DDIMScheduler", "diffusers",
        "diffusers.models.WanTransformer3DModel", "diffusers.NoSuchModel", "slipcast.load", "",
    ],
)  # fmt: skip
def test_only_model_classes_of_two_libraries_are_ever_imported(name: str) -> None:
    with pytest.raises(FamilyFileError) as caught:
        model_class(name)
    assert f"the model class {name!r}" in caught.value.found
    assert caught.value.field == "model"


def test_copies_of_a_model_with_tables_take_them_along(tmp_path: Path) -> None:
    import copy

    model = build_with_buffers("diffusers.QwenImageTransformer2DModel", ROTARY["QwenImageTransformer2DModel"])
    tables = {path: tensor for path, tensor in _tensors(model).items() if not tensor.is_meta}
    others = _tensors(copy.deepcopy(model))
    assert all((bytes_of(others[path]) == bytes_of(tensor)).all() for path, tensor in tables.items())
