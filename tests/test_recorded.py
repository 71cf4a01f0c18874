"""The test data itself: compact names expand to what was recorded, and files written after it are right."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from support.compact_names import collapse, digest, expand
from support.recorded import (
    BYTES,
    DATA,
    record_text,
    recorded,
    recorded_config,
    recorded_config_names,
    recorded_names,
    write_checkpoint,
)

segments = st.sampled_from(["a", "b", "0", "1", "2", "3", "10", "00", "x1"])
names = st.lists(segments, min_size=1, max_size=5).flatmap(
    lambda parts: st.sampled_from([".".join(parts), "_".join(parts)])
)
descriptions = st.sampled_from([("F32", (1,)), ("BF16", (2, 3)), (None, (2, 3)), ("F32", None), ("F32", ())])


@given(st.dictionaries(names, descriptions, max_size=40))
def test_expanding_undoes_collapsing(tensors):
    assert expand(collapse(tensors)) == tensors


def test_runs_of_indices_become_ranges():
    tensors = {f"layers.{i}.heads.{j}.w1": ("F32", (2,)) for i in (0, 1, 2, 5) for j in range(3)}
    assert collapse(tensors) == {"layers.{0-2,5}.heads.{0-2}.w1": ("F32", (2,))}
    assert list(expand({"a.{9-10}": ("F32", ())})) == ["a.9", "a.10"]


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="a second time"):
        expand({"a.{0-2}": ("F32", ()), "a.1": ("F32", ())})


def test_the_digest_sees_every_part():
    base = {"a": ("F32", (2,)), "b": (None, None)}
    others = [
        {"a": ("F32", (2,))},
        {**base, "a": ("F16", (2,))},
        {**base, "a": ("F32", (2, 1))},
        {**base, "b": (None, ())},
    ]
    assert len({digest(tensors) for tensors in [base, *others]}) == 5
    assert digest(dict(reversed(base.items()))) == digest(base)


@pytest.mark.parametrize("name", recorded_names())
def test_records_expand_to_what_was_recorded(name):
    text = (DATA / "headers" / f"{name}.json").read_text()
    record = recorded(name)
    assert digest(record.tensors) == json.loads(text)["sha256"]
    assert record_text(record) == text
    assert record.source


def test_recorded_sizes_are_those_of_the_published_files():
    sizes = {}
    for name in recorded_names():
        record = recorded(name)
        published = record.verified or {}
        if "file_size" in published:
            nbytes = sum(prod(shape) * BYTES[dtype] for dtype, shape in record.tensors.values())
            sizes[name] = (nbytes, published["file_size"] - published["header_bytes"] - 8)
    assert len(sizes) == 18
    assert all(recorded == published for recorded, published in sizes.values()), sizes


def test_configurations_are_recorded():
    assert len(recorded_config_names()) == 67
    assert recorded_config("Qwen--Qwen-Image.transformer")["_class_name"] == "QwenImageTransformer2DModel"


def test_written_values_are_finite_positive_where_scales_and_depend_on_seed_and_name_alone(tmp_path):
    tensors = {
        "blocks.0.w": ("F8_E4M3", (64, 32)),
        "blocks.0.scale_weight": ("F32", (1,)),
        "blocks.0.w_scale": ("F8_E4M3", (512,)),
        "blocks.1.attention.w": ("BF16", (64, 64)),
        "norm.weight": ("F16", (8,)),
        "mask": ("BOOL", (4,)),
        "e": ("F8_E5M2", (512,)),
        "other": (None, (256, 16)),
    }
    path = write_checkpoint(tensors, tmp_path / "a.safetensors", fill="normal", sigma=0.5, dtype="F64", prefix="p.")
    alone = write_checkpoint(
        {"other": (None, (256, 16))}, tmp_path / "b.safetensors", fill="normal", sigma=0.5, dtype="F64"
    )
    few = write_checkpoint(tensors, tmp_path / "c.safetensors", blocks=1)
    torch = pytest.importorskip("torch")
    with safe_open(path, "pt") as file:
        values = {name.removeprefix("p."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert all(torch.isfinite(value.double()).all() for value in values.values())
    assert values["blocks.0.scale_weight"].item() > 0
    assert (values["blocks.0.w_scale"].float() >= 0).all()
    assert values["other"].std().item() == pytest.approx(0.5, rel=0.1)
    assert values["blocks.1.attention.w"].float().std().item() == pytest.approx(0.5, rel=0.1)
    assert (values["norm.weight"] == 1).all()
    with safe_open(alone, "np") as file:
        assert np.array_equal(file.get_tensor("other"), values["other"].numpy())
    with safe_open(few, "np") as file:
        assert set(file.keys()) == tensors.keys() - {"blocks.1.attention.w"}


def test_markers_hold_their_text_in_a_sparse_file(tmp_path):
    record = recorded("z-image-turbo--comfy-int8-convrot")
    path = write_checkpoint(record, tmp_path / "model.safetensors")
    assert path.stat().st_size > 6e9
    assert path.stat().st_blocks * 512 < 10e6
    with safe_open(path, "np") as file:
        marker = file.get_tensor("layers.0.attention.qkv.comfy_quant").tobytes()
    assert json.loads(marker) == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
