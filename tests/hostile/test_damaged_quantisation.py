"""Damaged quantised files of every format: refused, or read as what they are; no fault of ours, no other weights."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slipcast
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.errors import SlipcastError
from support.conversions import converted
from support.fp8_compute import fp8_of
from support.isolation import isolate
from support.quantised_cases import CASES, draw_file, is_close
from support.quantised_checkpoints import QuantisedFile
from support.raw_safetensors import RawTensor, read_raw, write_tensors

LEAVES = ("weight_scale", "scale_weight", "weight_scale_2", "input_scale", "scale", "absmax", "weight", "bias")
ALIKE = (("F8_E4M3", "F8_E5M2", "U8", "I8", "BOOL", "F8_E8M0"), ("BF16", "F16", "I16"), ("F32", "I32", "U32"))
KEYS = ("format", "convrot", "convrot_groupsize", "full_precision_matrix_mult", "params")
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 10**30, "", "x" * 5000, [], {}, [[]], {"a": [1]}, float("nan")),
    *("nvfp4", "mxfp8", "int8_tensorwise", "float8_e5m2", "int4", 16, "16"),
)
TEXTS = ("{", "null", "[]", '{"layers": null}', '{"layers": [1]}', '{"layers": {"": {}}}', "[" * 3000, "\x00")
MARKERS = (b"", b"\xff\xfe", b"{", b"null", b" " * 5000, b"[" * 4000, b'{"format": "nvfp4"}\x00\x00')

Tensors = dict[str, RawTensor]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _damage(data: st.DataObject, kind: str, tensors: Tensors, metadata: dict[str, str], layers: list[str]) -> None:
    """Change one tensor of a layer in codes, or what the file says of it."""
    name = data.draw(st.sampled_from(sorted(key for key in tensors if key.rpartition(".")[0] in layers)))
    layer, (dtype, shape, raw) = name.rpartition(".")[0], tensors[name]
    if kind == "shape":
        count = prod(shape)
        others = [shape[::-1], (count,), (1, *shape), (*shape, 1), (count, 1), (1, count)]
        tensors[name] = (dtype, data.draw(st.sampled_from(others)), raw)
    elif kind == "dtype":
        tensors[name] = (data.draw(st.sampled_from(next(each for each in ALIKE if dtype in each))), shape, raw)
    elif kind == "name":
        del tensors[name]
        tensors[f"{layer}.{data.draw(st.sampled_from(LEAVES))}"] = (dtype, shape, raw)
    elif kind == "gone":
        del tensors[name]
    elif kind == "more":
        extra = data.draw(st.sampled_from([("F32", (), bytes(4)), ("F32", (0,), b""), ("U8", (48,), bytes(48))]))
        tensors.setdefault(f"{layer}.{data.draw(st.sampled_from(LEAVES))}", extra)
    elif kind == "marker":
        marker = data.draw(st.sampled_from(MARKERS))
        tensors[f"{layer}.comfy_quant"] = ("U8", (len(marker),), marker)
    elif kind == "text":
        metadata["_quantization_metadata"] = data.draw(st.sampled_from(TEXTS))
    else:
        says = data.draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(JUNK), min_size=1))
        metadata["_quantization_metadata"] = json.dumps({"layers": {layer: says}})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_whatever_is_damaged(tmp_path: Path, name: str, data: st.DataObject) -> None:
    case = CASES[name]
    file = draw_file(case, "uneven")
    path = file.write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    tensors, metadata = read_raw(path)
    kind = data.draw(st.sampled_from(["shape", "dtype", "name", "gone", "more", "marker", "text", "says"]))
    _damage(data, kind, tensors, metadata, list(file.markers))
    write_tensors(path, tensors, metadata)
    for attempt in (
        lambda: slipcast.inspect(path),
        lambda: slipcast.load(path, device="cpu", dtype="float32", fp8="auto"),
        lambda: slipcast.load(path, device="cpu", dtype="float32", fp8=fp8_of("compute", remainder="quantise")),
        lambda: converted(path, tmp_path / "out.safetensors", format="bf16", overwrite=True),
        lambda: converted(path, tmp_path / "other.safetensors", "diffusers", overwrite=True),
    ):
        try:
            result = attempt()
        except SlipcastError:
            continue
        if kind in ("shape", "more") and isinstance(result, slipcast.Loaded):
            _check_values(result, file, exact=result.report.plan.settings["fp8"].requested == "auto")


def _check_values(loaded: slipcast.Loaded, file: QuantisedFile, *, exact: bool) -> None:
    """No shape that passes, and no tensor too many, changes what a weight is."""
    held = {key: tensor.detach() for key, tensor in loaded.model.named_parameters()}
    for key, module in loaded.model.named_modules():
        if isinstance(module, QuantisedModule):
            held[f"{key}.weight"] = module.dequantised_weight()
    for key, expected in file.expected().items():
        values = held[key].reshape(expected.shape)
        assert is_close(values, expected) if exact else (values - expected).norm() <= 0.04 * expected.norm(), key
