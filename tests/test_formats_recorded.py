"""Published quantised checkpoints after their recorded headers: planned at full size, loaded with random values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import slipcast
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import IdentificationError
from support import quantised_formats
from support.compact_names import Tensors as Descriptions
from support.conversions import converted
from support.fp8_checkpoints import in_model_names
from support.fp8_compute import fp8_of, multiplying
from support.isolation import isolate
from support.number_formats import bytes_of, e4m3, relative_l2
from support.quantised_cases import is_close
from support.quantised_records import QUANTISED
from support.recorded import recorded, write_checkpoint

FP8, INT8 = "z-image-turbo--kijai-fp8-scaled", "z-image-turbo--comfy-int8-convrot"
KEPT = {FP8: "float8_e4m3fn/tensor", INT8: "int8/row/convrot256"}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_whole_header(tmp_path: Path, name: str) -> None:
    """At full size, as a sparse file: a plan where a family knows it, else a refusal that says its format."""
    record = recorded(name)
    path = write_checkpoint(record, tmp_path / f"{name}.safetensors")
    families = {example.header for family in load_catalogue().values() for example in family.examples}
    if name in families:
        plan = slipcast.plan(path, device="cpu", dtype="bfloat16")
        fates = Counter(tensor.fate for tensor in plan.tensors)
        print(f"{name}: {_counted(path)}; planned: {_listed(fates)}")
        assert sorted(tensor.name for tensor in plan.tensors) == sorted(record.tensors)
        assert {tensor.fate for tensor in plan.tensors} <= {"loaded", "folded", "side tensor", "dropped"}
        key_map = load_catalogue()[plan.origin.family].key_map
        for tensor, reason in plan.dropped.items():
            if not reason.startswith("no product of") and "is the same tensor as another" not in reason:
                assert key_map.drop_reason(tensor.removeprefix(plan.origin.prefix)) == reason
        return
    with pytest.raises(IdentificationError) as caught:
        slipcast.plan(path, device="cpu")
    assert caught.value.found.startswith("no family claims this checkpoint: ")
    for form in QUANTISED[name]:
        assert f"{form} " in caught.value.found
    assert "slipcast explain" in caught.value.hint
    print(f"{name}: {_counted(path)}; refused: {caught.value.found.partition(';')[0]}")


def _counted(path: Path) -> str:
    return _listed(slipcast.inspect(path).formats)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _narrow(name: str) -> Descriptions:
    """A record's tensors with the model's widths divided by five: still whole heads, and whole groups of 256."""
    return {
        key: (
            dtype,
            None if shape is None else tuple(length // 5 if length % 1280 == 0 else length for length in shape),
        )
        for key, (dtype, shape) in recorded(name).tensors.items()
    }


@cache
def _decoded(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a file of one block of each kind, by the model's names, float32."""
    tensors = load_file(path)
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("scale_weight", "weight_scale", "comfy_quant", "scaled_fp8")):
            continue
        layer = name.removesuffix(".weight")
        if tensor.dtype == torch.float8_e4m3fn:
            weight = e4m3(bytes_of(tensor)) * tensors[f"{layer}.scale_weight"].double().numpy()
        elif tensor.dtype == torch.int8:
            marker = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))
            assert marker == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
            scale = tensors[f"{layer}.weight_scale"].double().numpy()
            weight = quantised_formats.int8(tensor.numpy(), scale, group=256)
        else:
            weight = tensor.double().numpy()
        values[name] = torch.from_numpy(weight).float()
    return in_model_names(values)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("narrow")
    return {
        name: write_checkpoint(_narrow(name), folder / f"{name}.safetensors", fill="normal", blocks=1) for name in KEPT
    }


def _weights(loaded: slipcast.Loaded, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter, of quantised layers what they compute with."""
    found = {key: tensor.detach() for key, tensor in loaded.model.named_parameters()}
    for path, module in loaded.model.named_modules():
        if isinstance(module, QuantisedModule):
            found[f"{path}.weight"] = module.dequantised_weight()
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fp8", ["auto", "off", "storage", "compute"])
@pytest.mark.parametrize("name", KEPT)
def test_random_values_in_each_precision(files: Mapping[str, Path], name: str, fp8: str, dtype: str) -> None:
    expected = _decoded(files[name])
    settings = fp8_of(fp8, hints="ignore")  # the producer wishes for full precision
    loaded = slipcast.load(files[name], device="cpu", dtype=dtype, fp8=settings)
    assert loaded.report.differences == ()
    assert loaded.report.resident == loaded.report.plan.bytes.resident
    codecs = {module.codec for module in loaded.report.plan.modules if module.codec}
    assert codecs == (set() if fp8 == "off" else {KEPT[name]})
    assert bool(multiplying(loaded.report.plan)) is (fp8 == "compute" and name == FP8)
    weights = _weights(loaded, getattr(torch, dtype))
    assert weights.keys() == expected.keys()
    worst = max(relative_l2(weights[key], tensor.reshape(weights[key].shape)) for key, tensor in expected.items())
    print(f"{name}, fp8={fp8}, {dtype}: {len(expected)} tensors, largest relative L2 {worst:.1e}")
    for key, tensor in expected.items():
        if dtype == "float32":
            assert is_close(weights[key], tensor.reshape(weights[key].shape)), key
        else:
            rounded = tensor.reshape(weights[key].shape).to(torch.bfloat16)
            assert relative_l2(weights[key], tensor.reshape(weights[key].shape)) <= 0.003
            assert (weights[key] != rounded).float().mean() <= 1e-3, key


@pytest.mark.parametrize("name", KEPT)
def test_they_convert_and_come_back(tmp_path: Path, files: Mapping[str, Path], name: str) -> None:
    converted(files[name], tmp_path / "model.safetensors", "diffusers")
    converted(tmp_path / "model.safetensors", tmp_path / "back.safetensors", "native")
    with safe_open(files[name], "pt") as before, safe_open(tmp_path / "back.safetensors", "pt") as after:
        assert set(before.keys()) == set(after.keys())
        for key in before.keys():  # noqa: SIM118 - no mapping
            mine, theirs = after.get_tensor(key), before.get_tensor(key)
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert np.array_equal(bytes_of(mine), bytes_of(theirs)), key


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_random_values_at_full_width(tmp_path: Path, name: str) -> None:
    """One block of each kind as it was published, weight for weight, a few rows of each at a time."""
    path = write_checkpoint(recorded(name), tmp_path / "m.safetensors", fill="normal", blocks=1)
    loaded = slipcast.load(path, device="cpu", dtype="float32")
    assert loaded.report.differences == ()
    layers: dict[str, Any] = dict(loaded.model.named_modules())
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            if not key.endswith((".scale_weight", ".weight_scale")):
                continue
            layer = key.rpartition(".")[0]
            codes, scale = file.get_tensor(f"{layer}.weight"), file.get_tensor(key).double().numpy()
            for model_name, rows in _parts(layer, codes.shape[0]):
                module = layers[model_name]
                quantised = isinstance(module, QuantisedModule)
                weight = module.dequantised_weight() if quantised else module.weight.detach()
                for first in (0, len(weight) // 2, len(weight) - 64):
                    chosen = codes[rows + first : rows + first + 64]
                    if codes.dtype == torch.int8:
                        own = scale[rows + first : rows + first + 64]
                        expected = quantised_formats.int8(chosen.numpy(), own, group=256)
                    else:
                        expected = e4m3(bytes_of(chosen)) * scale
                    assert is_close(weight[first : first + 64], torch.from_numpy(expected)), model_name


def _parts(layer: str, rows: int) -> list[tuple[str, int]]:
    """The layers of the model that a layer of the file is, and the first row of each."""
    names = in_model_names({f"{layer}.weight": torch.empty(rows, 0)})
    return [(name.removesuffix(".weight"), index * (rows // len(names))) for index, name in enumerate(names)]
