"""GGUF files of the family, loaded and converted: the gguf package writes them and says what they hold."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import slipcast
from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.errors import UnsupportedFormatError
from support.conversions import converted
from support.fp8_checkpoints import in_model_names
from support.gguf_files import CROSSING, NARROW, TYPES, write_gguf
from support.isolation import isolate
from support.quantised_cases import is_close


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def gguf() -> ModuleType:
    return pytest.importorskip("gguf")


CASES = {
    "bare": {},
    "under a prefix, of another architecture": {"prefix": "model.diffusion_model.", "architecture": "flux"},
    "in other rows": {"folded": ("layers.0.attention.out", "layers.0.attention.qkv", "layers.0.feed_forward.w3")},
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_dequantised(gguf: ModuleType, tmp_path: Path, name: str, mmap: bool) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf", **CASES[name])  # type: ignore[arg-type]
    inspection = slipcast.inspect(file.path)
    assert (inspection.container, inspection.main.family) == ("gguf", "z-image")
    assert inspection.formats["gguf"] == len(TYPES)
    loaded = slipcast.load(file.path, device="cpu", dtype="float32", fp8="off", mmap=mmap)
    assert loaded.report.differences == ()
    state = loaded.model.state_dict()
    assert state.keys() == file.expected.keys()
    assert [key for key, tensor in file.expected.items() if not is_close(state[key], tensor)] == []


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_kept(gguf: ModuleType, tmp_path: Path, name: str, mmap: bool) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf", **CASES[name])  # type: ignore[arg-type]
    loaded = slipcast.load(file.path, device="cpu", dtype="float32", mmap=mmap)
    assert loaded.report.differences == ()
    assert loaded.report.resident == loaded.report.plan.bytes.resident
    layers = {path: module for path, module in loaded.model.named_modules() if isinstance(module, QuantisedModule)}
    kept = {layer: kind for layer, kind in TYPES.items() if layer != "cap_embedder.1"}
    promised = in_model_names({f"{layer}.weight": torch.empty(3) for layer in kept})
    assert {f"{path}.weight" for path in layers} == promised.keys()
    assert layers["layers.0.attention.to_k"].codec.name == "gguf/Q4_K"
    assert {module.codec.name for module in layers.values()} == {f"gguf/{kind}" for kind in kept.values()}
    for path, module in layers.items():
        assert is_close(module.dequantised_weight(), file.expected[f"{path}.weight"]), path
    assert loaded.report.plan.settings["fp8"].engaged == "keep"
    latents = [torch.randn(8, 1, 4, 4)]
    with torch.no_grad():
        (output,) = loaded.model(latents, torch.tensor([0.3]), [torch.randn(5, 32)], return_dict=False)[0]
    assert torch.isfinite(output).all()


def test_rows_of_blocks_that_cross_them_are_cut_after_decoding(gguf: ModuleType, tmp_path: Path) -> None:
    """Blocks of 256 in rows of 128: those of q, k and v can't be taken apart."""
    file = write_gguf(gguf, tmp_path / "m.gguf", config=NARROW, types={CROSSING: "Q4_K"}, folded=(CROSSING,))
    for fp8, mmap in (("auto", True), ("auto", False), ("off", True), ("off", False)):
        loaded = slipcast.load(file.path, device="cpu", dtype="float32", fp8=fp8, mmap=mmap)
        assert loaded.report.differences == ()
        state = loaded.model.state_dict()
        assert [key for key, tensor in file.expected.items() if not is_close(state[key], tensor)] == []
        if fp8 == "auto":
            reason = "dequantised: only some of its rows are wanted, and codes run across rows"
            assert loaded.report.plan.folded == {f"{CROSSING}.weight": reason}


def test_whole_weights_of_blocks_that_cross_rows_are_kept(gguf: ModuleType, tmp_path: Path) -> None:
    layer = "layers.0.attention.out"
    file = write_gguf(gguf, tmp_path / "m.gguf", config=NARROW, types={layer: "Q6_K"}, folded=(layer,))
    loaded = slipcast.load(file.path, device="cpu", dtype="float32")
    assert loaded.report.differences == ()
    kept = loaded.model.get_submodule("layers.0.attention.to_out.0")
    assert kept.codec.name == "gguf/Q6_K"
    assert is_close(kept.dequantised_weight(), file.expected["layers.0.attention.to_out.0.weight"])


@pytest.mark.parametrize("format_", ["bf16", "fp32", "fp8_scaled", "int8_convrot"])
def test_written_in_another_format(gguf: ModuleType, tmp_path: Path, format_: str) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf", prefix="model.diffusion_model.")
    written = converted(file.path, tmp_path / "out.safetensors", format=format_).conversion
    assert "gguf" not in written.formats
    state = slipcast.load(tmp_path / "out.safetensors", device="cpu", dtype="float32", fp8="off").model.state_dict()
    bounds = {"bf16": 0.003, "fp32": 1e-6, "fp8_scaled": 0.04, "int8_convrot": 0.02}
    for key, tensor in file.expected.items():
        assert (state[key] - tensor).norm() <= bounds[format_] * tensor.norm(), key
    if format_ == "fp8_scaled":
        assert written.folded.keys() == {"cap_embedder.1.weight"}
        assert "can't hold blocks of GGUF" in written.folded["cap_embedder.1.weight"]
        assert "12 weights were in gguf" in written.altered[0]
    if format_ == "bf16":
        assert {tensor.dtype for tensor in load_file(tmp_path / "out.safetensors").values()} == {torch.bfloat16}


def test_blocks_can_not_be_written_as_they_are(gguf: ModuleType, tmp_path: Path) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf")
    with pytest.raises(UnsupportedFormatError) as caught:
        converted(file.path, tmp_path / "out.safetensors", "diffusers")
    assert caught.value.found == f"{len(TYPES)} weights in blocks of GGUF, to be written as they are"
    assert "--format bf16" in caught.value.hint


def test_a_type_that_is_not_decoded_is_refused_by_name(gguf: ModuleType, tmp_path: Path) -> None:
    layer = "layers.0.attention.out"
    path = tmp_path / "m.gguf"
    write_gguf(gguf, path, types={layer: "IQ2_XXS"})
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(path, device="cpu")
    assert caught.value.found == "a GGUF tensor of type IQ2_XXS"
    assert all(kind in caught.value.expected for kind in BLOCK_TYPES)
