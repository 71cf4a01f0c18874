"""Text encoders in GGUF files: names by the gguf package, values as llama.cpp's converter changes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import slipcast
from slipcast.engine.check.small_model import random_values
from slipcast.engine.check.subject import build
from slipcast.engine.convert import convert
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import IdentificationError
from slipcast.registry.identify import identify
from support.isolation import isolate
from support.quantised_cases import is_close

Tensors = dict[str, torch.Tensor]

ARCHITECTURES = {
    "qwen3": ["QWEN3"],
    "gemma-2": ["GEMMA2"],
    "gemma-3-text": ["GEMMA3"],
    "mistral-3-text": ["LLAMA", "MISTRAL3"],
    "ministral-3-text": ["MISTRAL3"],
    "qwen2.5-vl-text": ["QWEN2VL"],
}
TURNED_BY_NEIGHBOURS = {"LLAMA", "MISTRAL3"}
"""Architectures for which llama.cpp puts the rows of queries and keys in another order; heads have 128 of them."""
ONE_MORE = {"GEMMA2", "GEMMA3"}
"""Architectures whose norms it adds one to."""
QUANTISED = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_down")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def gguf() -> ModuleType:
    return pytest.importorskip("gguf")


def _values(family: str) -> Tensors:
    described = load_catalogue()[family]
    assert described.tiny is not None
    return random_values(build(described.model, described.tiny.config))


def _as_llama_cpp(name: str, tensor: torch.Tensor, architecture: str) -> torch.Tensor:
    if architecture in TURNED_BY_NEIGHBOURS and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = tensor.shape[0] // 128
        return tensor.view(heads, 2, 64, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture in ONE_MORE and name.endswith("norm.weight") else tensor


def _write(gguf: ModuleType, path: Path, values: Tensors, architecture: str, *, quantised: bool) -> Mapping[str, str]:
    """Write a file; returns the types of the model's quantised weights."""
    kind = getattr(gguf.MODEL_ARCH, architecture)
    names = gguf.get_tensor_name_map(kind, 99)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    types: dict[str, str] = {}
    for name, tensor in values.items():
        module, _, leaf = name.rpartition(".")
        theirs = names.get_name(f"model.{module}")
        assert theirs is not None, name
        held = _as_llama_cpp(name, tensor, architecture).contiguous().float().numpy()
        if quantised and theirs.rpartition(".")[2] in QUANTISED and leaf == "weight" and tensor.shape[1] % 32 == 0:
            types[name] = "Q8_0"
            raw = gguf.quantize(held, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{theirs}.{leaf}", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{theirs}.{leaf}", held)
    writer.add_tensor("output.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types


CASES = [(family, architecture) for family, known in ARCHITECTURES.items() for architecture in known]


@pytest.mark.parametrize(("family", "architecture"), CASES)
def test_values_are_the_model_s(gguf: ModuleType, tmp_path: Path, family: str, architecture: str) -> None:
    values = _values(family)
    path = tmp_path / "m.gguf"
    _write(gguf, path, values, architecture, quantised=False)
    found = slipcast.inspect(path)
    assert (found.main.family, found.main.layout, found.container) == (family, "llama.cpp", "gguf")
    loaded = slipcast.load(path, device="cpu", dtype="float32")
    assert loaded.report.differences == ()
    state = loaded.model.state_dict()
    for name, tensor in values.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)
    assert loaded.report.plan.dropped == {
        "output.weight": load_catalogue()[family].namings["llama.cpp"].drop["output.weight"]
    }


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("family", "architecture"), CASES)
def test_codes_stay_codes_where_rows_change_places(
    gguf: ModuleType, tmp_path: Path, family: str, architecture: str, mmap: bool
) -> None:
    values = _values(family)
    path = tmp_path / "m.gguf"
    types = _write(gguf, path, values, architecture, quantised=True)
    assert len(types) >= 2
    loaded = slipcast.load(path, device="cpu", dtype="float32", mmap=mmap)
    assert loaded.report.differences == ()
    assert loaded.report.resident == loaded.report.plan.bytes.resident
    kept = {target.name for target in loaded.report.plan.targets if target.how == "keep"}
    assert kept == types.keys()
    plain = slipcast.load(path, device="cpu", dtype="float32", fp8="off", mmap=mmap).model.state_dict()
    for name in types:
        codes = loaded.model.get_submodule(name.removesuffix(".weight")).dequantised_weight()
        assert is_close(codes, plain[name]), name
        assert float((codes - values[name]).norm() / values[name].norm()) < 0.01, name


def test_it_is_converted_to_the_names_of_transformers(gguf: ModuleType, tmp_path: Path) -> None:
    values = _values("mistral-3-text")
    _write(gguf, tmp_path / "m.gguf", values, "LLAMA", quantised=False)
    for layout, prefix in (("diffusers", ""), ("native", "model."), (None, "")):
        out = tmp_path / f"{layout}.safetensors"
        convert(identify(read_checkpoint(tmp_path / "m.gguf"), load_catalogue())[0], out, layout)
        written = load_file(out)
        assert written.keys() == {prefix + name for name in values}
        assert all(written[prefix + name].equal(tensor) for name, tensor in values.items())


def test_another_architecture_with_the_same_names_is_not_taken(gguf: ModuleType, tmp_path: Path) -> None:
    """Qwen3-VL has the names and shapes of Qwen3, and turns its heads by other angles."""
    _write(gguf, tmp_path / "m.gguf", _values("qwen3"), "QWEN3VL", quantised=False)
    with pytest.raises(IdentificationError, match="no family claims this checkpoint"):
        slipcast.inspect(tmp_path / "m.gguf")
