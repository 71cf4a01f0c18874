"""Formats of other libraries: recognised, and refused by name with what would load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import slipcast
from slipcast.registry.errors import UnsupportedFormatError
from support.conversions import converted
from support.isolation import isolate
from support.quantised_checkpoints import UNEVEN, small_tensors
from support.tiny_z_image import natively

LAYER = "layers.0.feed_forward.w1"


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _i8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


STATE = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 48]}'
BITSANDBYTES = {"weight": _u8(3072, 1), "weight.absmax": torch.ones(96), "weight.quant_map": torch.ones(16)}
NUNCHAKU = {
    "qweight": _i8(128, 24),
    "wscales": torch.ones(1, 128).bfloat16(),
    "smooth_factor": torch.ones(48).bfloat16(),
    "proj_down": torch.ones(48, 16).bfloat16(),
    "proj_up": torch.ones(128, 16).bfloat16(),
}
TORCHAO = {"tensor_names": json.dumps([f"{LAYER}.weight"]), f"{LAYER}.weight": '{"_type": "Float8Tensor"}'}
COMPRESSED = {
    "weight_packed": _u8(128, 24),
    "weight_scale": torch.ones(128, 3).to(torch.float8_e4m3fn),
    "weight_global_scale": torch.ones(1),
}
SVDQUANT = {
    "weight": _i8(128, 24),
    "weight_scale": torch.ones(1, 128),
    "smooth_factor": torch.ones(48),
    "proj_down": torch.ones(48, 16),
    "proj_up": torch.ones(128, 16),
    "comfy_quant": _bytes('{"format": "svdquant_w4a4"}'),
}
AWQ = {
    "qweight": torch.ones(48, 16, dtype=torch.int32),
    "qzeros": torch.ones(1, 16, dtype=torch.int32),
    "scales": torch.ones(1, 128).half(),
}
AWQ_MARKED = {
    "weight": _i8(128, 24),
    "weight_scale": torch.ones(1, 128),
    "weight_zeros": torch.ones(1, 128),
    "comfy_quant": _bytes('{"format": "awq_w4a16"}'),
}
NF4_MARKED = {
    "weight": _u8(3072),
    "weight_scale": torch.ones(96),
    "weight_code": torch.ones(16),
    "comfy_quant": _bytes('{"format": "nf4"}'),
}
INT8 = {"weight": _i8(128, 48), "SCB": torch.ones(128), "weight_format": _u8()}
SDNQ = {"weight": _u8(128, 48), "scale": torch.ones(128, 1), "zero_point": torch.ones(128, 1)}


@dataclass(frozen=True)
class Foreign:
    """A layer in another library's format.

    Attributes:
        format: what it is recognised as.
        loader: what would load it.
        tensors: by the ends of their names.
        metadata: of the file.
    """

    format: str
    loader: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def _state(kind: str) -> dict[str, torch.Tensor]:
    return {**BITSANDBYTES, f"weight.quant_state.bitsandbytes__{kind}": _bytes(STATE)}


FORMATS = {
    "bitsandbytes nf4": Foreign("bnb_nf4", "bitsandbytes", _state("nf4")),
    "bitsandbytes fp4": Foreign("bnb_fp4", "bitsandbytes", _state("fp4")),
    "bitsandbytes int8": Foreign("bnb_int8", "bitsandbytes", INT8),
    "bitsandbytes nf4, marked": Foreign("bnb_nf4", "bitsandbytes", NF4_MARKED),
    "torchao": Foreign("torchao", "torchao", {"_weight_qdata": _i8(9, 9), "_weight_scale": torch.ones(9, 1)}, TORCHAO),
    "nunchaku": Foreign("nunchaku", "nunchaku", NUNCHAKU),
    "sdnq": Foreign("sdnq", "sdnq", SDNQ),
    "compressed-tensors": Foreign("compressed_tensors", "compressed-tensors", COMPRESSED),
    "svdquant": Foreign("svdquant", "nunchaku", SVDQUANT),
    "awq": Foreign("awq", "nunchaku", AWQ),
    "awq, marked": Foreign("awq", "nunchaku", AWQ_MARKED),
}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    foreign = FORMATS[name]
    path = _write(tmp_path, foreign.tensors, foreign.metadata)
    assert foreign.format in slipcast.inspect(path).formats
    for attempt in (
        lambda: slipcast.plan(path, device="cpu"),
        lambda: slipcast.load(path, device="cpu"),
        lambda: converted(path, tmp_path / "out.safetensors", format="bf16"),
    ):
        with pytest.raises(UnsupportedFormatError) as caught:
            attempt()
        assert f": {foreign.format} (" in caught.value.found
        assert foreign.loader in caught.value.hint
        assert "fp8_scaled" in caught.value.expected
    assert not (tmp_path / "out.safetensors").exists()


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
    """A small checkpoint of which one layer is something else."""
    native = natively(small_tensors(UNEVEN))
    del native[f"{LAYER}.weight"]
    path = folder / "m.safetensors"
    save_file({**native, **{f"{LAYER}.{leaf}": tensor for leaf, tensor in tensors.items()}}, path, dict(metadata))
    return path


E4M3 = torch.float8_e4m3fn
MXFP8 = {"weight": torch.ones(128, 64).to(E4M3), "weight_scale": _u8(4, 128)}
NVFP4 = {"weight": _u8(128, 24), "weight_scale": torch.ones(4, 128).to(E4M3), "weight_scale_2": torch.ones(())}
ROWS = {"weight": _i8(128, 48), "weight_scale": torch.ones(128)}
UNKNOWN: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "four bits": ({**ROWS, "comfy_quant": _bytes('{"format": "convrot_w4a4"}')}, "marked as 'convrot_w4a4'"),
    "a name of tomorrow": ({**ROWS, "comfy_quant": _bytes('{"format": "int6"}')}, "marked as 'int6', stored as I8"),
    "bytes without a scale": ({"weight": _u8(128, 48)}, "codes of U8 without a scale"),
    "mxfp8, scales transposed": (
        MXFP8,
        "a scale of U8 [4, 128], needed: F8_E4M3 codes of whole blocks of 32 by 32, U8 [",
    ),
    "nvfp4, scales transposed": (
        NVFP4,
        "a scale of F8_E4M3 [4, 128], needed: F8_E4M3 [128, 4] (comfy) or F8_E4M3 [128",
    ),
    "a scale that fits nothing": ({**ROWS, "weight_scale": torch.ones(7)}, "a scale of F32 [7]"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_format_fits_is_refused_with_what_is_odd(tmp_path: Path, name: str) -> None:
    tensors, odd = UNKNOWN[name]
    path = _write(tmp_path, tensors, {})
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(path, device="cpu")
    assert "unknown (1 weights)" in caught.value.found
    assert any(odd in item for item in caught.value.items)
