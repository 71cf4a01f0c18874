"""What family files can say, on small files: operations, sums, ties, other dtypes, parts of other models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

import slipcast
from slipcast.engine import chunks
from slipcast.engine.convert import convert
from slipcast.registry.errors import AccountingError, ConfigError
from slipcast.registry.inspection import identify_path
from slipcast.registry.settings import resolve_settings
from support.fp8_checkpoints import QUANTISED, Fp8File, Scaled, decoded, fp8_file
from support.isolation import isolate
from support.number_formats import bytes_of
from support.tiny_z_image import Tensors, natively, tiny_tensors

STACKS = "{stack=layers|noise_refiner|context_refiner}.{i}"
BLOCKS = ("layers.0", "layers.1", "layers.2", "noise_refiner.0", "context_refiner.0")
PRECISION = """
precision:
  compute: checkpoint
  fp16: {fp16}
  keep: {{}}
  keep_fp32: {keep_fp32}
  fp8: {{storage: {storage}, compute: supported}}
"""
Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


def _family(tmp_path: Path, more: str, *, extends: str = "z-image") -> dict[str, Any]:
    """Settings that read a checkpoint as a family like the built-in one, but for what ``more`` says."""
    folder = tmp_path / "families"
    folder.mkdir(exist_ok=True)
    head = f"schema: 1\nid: other\ntitle: Other\nkind: denoiser\nextends: {extends}\n"
    (folder / "other.yaml").write_text(f"{head}model: diffusers.ZImageTransformer2DModel\n{more}\n")
    return {"families": [str(folder)], "family": "other", "device": "cpu"}


def _precision(*, fp16: str = "safe", keep_fp32: str = "[]", storage: str = "supported") -> str:
    return PRECISION.format(fp16=fp16, keep_fp32=keep_fp32, storage=storage)


def _keys(rule: str) -> str:
    return f'keys:\n  "{STACKS}.feed_forward":\n    {rule}\n'


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def _interleaved(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The two halves of each so many rows, one row of each after the other."""
    groups = [torch.stack(group.chunk(2), 1).flatten(0, 1) for group in tensor.split(rows)]
    return torch.cat(groups)


def _deinterleaved(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    groups = [torch.cat([group[0::2], group[1::2]]) for group in tensor.split(rows)]
    return torch.cat(groups)


OPERATIONS: dict[str, tuple[str, Operation, Operation]] = {
    # the rule for w2, [64, 170]; the file's tensor of the model's; the model's of the file's
    "swap_halves": ("w2: swap_halves(w2)", _swapped, _swapped),
    "transpose": ("w2: transpose(w2)", lambda t: t.t(), lambda t: t.t()),
    "flat": ("w2: flat(w2)", lambda t: t.flatten(), lambda t: t.view(64, 170)),
    "reshape": ("w2: reshape(w2)", lambda t: t.reshape(32, 340), lambda t: t.reshape(64, 170)),
    "interleave": ("w2: interleave(w2, 16)", lambda t: _interleaved(t, 16), lambda t: _deinterleaved(t, 16)),
    "deinterleave": ("w2: deinterleave(w2, 16)", lambda t: _deinterleaved(t, 16), lambda t: _interleaved(t, 16)),
    "conv1x1": ("w2: conv1x1(w2)", lambda t: t[..., None, None], lambda t: t.view(64, 170)),
}


def _check(model: nn.Module, expected: Tensors) -> None:
    held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, value in expected.items():
        scale = held.pop(name.removesuffix(".weight") + ".weight_scale", None)
        tensor = held.pop(name)
        values = decoded(tensor, scale) if tensor.element_size() == 1 else tensor.float()
        torch.testing.assert_close(values, value.float(), rtol=1e-6, atol=0, msg=name)
    assert held == {}


@pytest.mark.parametrize(("mmap", "rows"), [(True, None), (False, 5)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_undone_on_values(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, operation: str, mmap: bool, rows: int | None
) -> None:
    if rows is not None:
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    rule, of_model, _ = OPERATIONS[operation]
    native = natively(tensors)
    for block in BLOCKS:
        native[f"{block}.feed_forward.w2.weight"] = of_model(native[f"{block}.feed_forward.w2.weight"]).contiguous()
    save_file(native, tmp_path / "m.safetensors")
    settings = {**_family(tmp_path, _keys(rule)), "mmap": mmap}
    for dtype in ("bfloat16", "float32"):
        loaded = slipcast.load(tmp_path / "m.safetensors", dtype=dtype, **settings)
        assert loaded.report.differences == ()
        _check(loaded.model, tensors)
    quantised = slipcast.load(tmp_path / "m.safetensors", dtype="float32", fp8="storage", **settings)
    straight = slipcast.load(_plain(tmp_path, tensors), device="cpu", dtype="float32", fp8="storage")
    assert quantised.report.differences == ()
    ours, theirs = quantised.model.state_dict(), straight.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all((bytes_of(ours[name]) == bytes_of(tensor)).all() for name, tensor in theirs.items())


def _plain(tmp_path: Path, tensors: Tensors) -> Path:
    path = tmp_path / "plain.safetensors"
    save_file(natively(tensors), path)
    return path


@pytest.mark.parametrize(("mmap", "rows"), [(True, None), (False, 5)])
@pytest.mark.parametrize("fp8", ["auto", "off"])
@pytest.mark.parametrize("scale", ["", "N"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_undone_on_codes_and_their_scales(
    tmp_path: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    scale: str,
    fp8: str,
    mmap: bool,
    rows: int | None,
) -> None:
    """Codes and scales are made in the file's own shape, as a producer would who knows nothing of the model's."""
    if rows is not None:
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    rule, of_model, of_file = OPERATIONS[operation]
    if operation == "flat" and scale:
        pytest.skip("a flat tensor has no rows")
    file = fp8_file(tensors)
    expected = dict(file.expected())
    for block in BLOCKS:
        layer = f"{block}.feed_forward.w2"
        turned = of_model(file.native[f"{layer}.weight"]).contiguous()
        matrix = Fp8File({f"{layer}.weight": turned.reshape(turned.shape[0], -1)})
        matrix.scale_layer(layer, Scaled(scale))
        codes, factor = matrix.native[f"{layer}.weight"], matrix.native[f"{layer}.weight_scale"]
        file.native[f"{layer}.weight"] = codes.reshape(turned.shape)
        file.native[f"{layer}.weight_scale"] = factor
        expected[f"{layer}.weight"] = of_file(matrix.values[f"{layer}.weight"].reshape(turned.shape))
    path = file.write(tmp_path / "m.safetensors")
    loaded = slipcast.load(path, dtype="float32", fp8=fp8, mmap=mmap, **_family(tmp_path, _keys(rule)))
    assert loaded.report.differences == ()
    _check(loaded.model, expected)
    kept = {target.name for target in loaded.report.plan.targets if target.how == "keep"}
    keeps = fp8 == "auto" and operation in ("swap_halves", "conv1x1", "interleave", "deinterleave")
    assert kept == ({f"{block}.feed_forward.w2.weight" for block in BLOCKS} if keeps else set())
    if fp8 == "auto" and not keeps:
        reasons = set(loaded.report.plan.folded.values())
        assert reasons == {f"dequantised: the key map's {operation} breaks its scale"}


def _apart(file: Fp8File, how: Scaled | None, *, second: Scaled | None) -> Tensors:
    """Cut w1 into the file's gate and up, which are quantised one by one."""
    expected = dict(file.expected())
    for block in BLOCKS:
        whole = file.native.pop(f"{block}.feed_forward.w1.weight")
        values = []
        for name, part, scaled in (("gate", whole[:100], how), ("up", whole[100:], second)):
            layer = f"{block}.feed_forward.{name}"
            file.native[f"{layer}.weight"] = part.contiguous()
            if scaled is not None:
                file.scale_layer(layer, scaled)
            values.append(file.values.get(f"{layer}.weight", part.float()))
        expected[f"{block}.feed_forward.w1.weight"] = torch.cat(values)
    return expected


SUMS = {
    "plain": (None, None, ""),
    "one scale each": (Scaled(""), Scaled("1"), "float8_e4m3fn/row"),
    "scales by row": (Scaled("N"), Scaled("N1"), "float8_e4m3fn/row"),
    "one scale and scales by row": (Scaled(""), Scaled("N"), "float8_e4m3fn/row"),
    "quantised and plain": (Scaled(""), None, ""),
}


@pytest.mark.parametrize(("mmap", "rows"), [(True, None), (False, 7)])
@pytest.mark.parametrize("kind", SUMS)
def test_rows_that_the_file_has_apart_are_joined(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, kind: str, mmap: bool, rows: int | None
) -> None:
    if rows is not None:
        monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: rows)
    first, second, codec = SUMS[kind]
    file = fp8_file(tensors)
    expected = _apart(file, first, second=second)
    path = file.write(tmp_path / "m.safetensors")
    settings = {**_family(tmp_path, _keys("gate + up: w1")), "mmap": mmap, "dtype": "float32"}
    for fp8 in ("auto", "off"):
        loaded = slipcast.load(path, fp8=fp8, **settings)
        assert loaded.report.differences == ()
        _check(loaded.model, expected)
        assert sorted(tensor.name for tensor in loaded.report.plan.tensors) == sorted(file.native)
        module = {module.path: module for module in loaded.report.plan.modules}["layers.0.feed_forward.w1"]
        assert module.codec == ((codec or None) if fp8 == "auto" else None)
    if kind == "quantised and plain":
        reasons = slipcast.plan(path, **settings).folded
        assert set(reasons.values()) == {"dequantised: quantised and plain rows make one weight"}


def test_a_part_of_another_model_is_left_to_it(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors) | {"decoder.weight": torch.ones(2), "old.0.a": torch.ones(1)}
    save_file(native, tmp_path / "m.safetensors")
    settings = _family(tmp_path, "contains: {decoder.: some-decoder}\ndrop: {old: nobody needs it}")
    (tmp_path / "families" / "vaes").mkdir()
    decoder = T5.replace("id: t5", "id: some-decoder").replace("text_encoder", "vae")
    (tmp_path / "families" / "vaes" / "some-decoder.yaml").write_text(decoder)
    plan = slipcast.plan(tmp_path / "m.safetensors", **settings)
    fates = {tensor.name: (tensor.fate, tensor.reason) for tensor in plan.tensors}
    assert fates["decoder.weight"] == ("other component", "part of some-decoder")
    assert fates["old.0.a"] == ("dropped", "nobody needs it")
    assert slipcast.load(tmp_path / "m.safetensors", **settings).report.differences == ()


@pytest.mark.parametrize("is_evidence", [True, False])
def test_a_part_of_another_model_is_written_where_it_is_evidence(
    tmp_path: Path, tensors: Tensors, is_evidence: bool
) -> None:
    save_file(natively(tensors) | {"decoder.weight": torch.ones(2)}, tmp_path / "m.safetensors")
    has = f"[cap_embedder.1.weight, layers.0.attention.qkv.weight{', decoder.weight' if is_evidence else ''}]"
    settings = _family(tmp_path, f"contains: {{decoder.: some-decoder}}\nidentify: {{has: {has}}}")
    (tmp_path / "families" / "vaes").mkdir()
    decoder = T5.replace("id: t5", "id: some-decoder").replace("text_encoder", "vae")
    (tmp_path / "families" / "vaes" / "some-decoder.yaml").write_text(decoder)
    identified = identify_path(tmp_path / "m.safetensors", resolve_settings(settings).values)
    written = convert(identified.main, tmp_path / "w.safetensors", "diffusers", others=identified.beside)
    assert ("decoder.weight" in load_file(tmp_path / "w.safetensors")) == is_evidence
    assert ("decoder.weight" in written.to_dict()["left_out"]) != is_evidence


def test_modules_that_stay_in_float32(tmp_path: Path, tensors: Tensors) -> None:
    more = _precision(keep_fp32="['layers.{i}.feed_forward.w1', x_pad_token]")
    settings = {**_family(tmp_path, more), "dtype": "bfloat16"}
    path = _plain(tmp_path, {name: tensor.float() for name, tensor in tensors.items()})
    for fp8 in ("off", "storage"):
        loaded = slipcast.load(path, fp8=fp8, **settings)
        assert loaded.report.differences == ()
        state = loaded.model.state_dict()
        for name in ("layers.0.feed_forward.w1.weight", "layers.2.feed_forward.w1.weight", "x_pad_token"):
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], tensors[name].float())
        assert state["cap_pad_token"].dtype == torch.bfloat16
    modules = {module.path: module for module in loaded.report.plan.modules}
    assert modules["layers.0.feed_forward.w1"].reason == "the family keeps it in float32"
    assert modules["layers.0.feed_forward.w1"].precision == "float32"
    assert modules["noise_refiner.0.feed_forward.w1"].codec == "float8_e4m3fn/row"


@pytest.mark.parametrize("storage", ["{unsupported: it draws noise}", "{not_applicable: it draws noise}"])
def test_a_family_that_fp8_does_not_suit(
    tmp_path: Path, tensors: Tensors, storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipcast")
    settings = {**_family(tmp_path, _precision(storage=storage)), "dtype": "bfloat16"}
    loaded = slipcast.load(_plain(tmp_path, tensors), fp8="storage", **settings)
    decision = loaded.report.plan.settings["fp8"]
    assert (decision.requested, decision.engaged, decision.reason) == ("storage", "off", "other: it draws noise")
    _check(loaded.model, tensors)
    (record,) = caplog.records
    assert "0 modules quantised" in record.getMessage()
    assert record.getMessage().endswith("[fp8=storage became off: other: it draws noise]")
    tight = slipcast.plan(_plain(tmp_path, tensors), **{**settings, "device": "cuda:8.6,1MiB"})
    assert tight.verdict is not None
    assert tight.verdict.advice == "no setting makes them fit: fp8 is not for this family (other: it draws noise)"
    file = fp8_file(tensors, QUANTISED, Scaled(""))
    kept = slipcast.load(file.write(tmp_path / "fp8.safetensors"), **settings)
    assert kept.report.plan.settings["fp8"].engaged == "off"
    assert len(kept.report.plan.folded) == len(QUANTISED)


def test_float16_where_it_is_safe(tmp_path: Path, tensors: Tensors) -> None:
    loaded = slipcast.load(_plain(tmp_path, tensors), **_family(tmp_path, _precision()), dtype="float16")
    assert loaded.model.dtype == torch.float16
    assert loaded.report.plan.settings["dtype"].reason == "as requested"


def test_a_compute_dtype_that_the_family_names(tmp_path: Path, tensors: Tensors) -> None:
    more = _precision().replace("compute: checkpoint", "compute: float32")
    decision = slipcast.plan(_plain(tmp_path, tensors), **_family(tmp_path, more)).settings["dtype"]
    assert (decision.engaged, decision.reason) == ("float32", "the family's compute dtype")


def test_an_argument_that_the_class_refuses(tmp_path: Path, tensors: Tensors) -> None:
    settings = _family(tmp_path, "config: {no_such_argument: 3}")
    with pytest.raises(ConfigError) as caught:
        slipcast.plan(_plain(tmp_path, tensors), **settings)
    assert "diffusers.ZImageTransformer2DModel refuses its configuration: TypeError" in caught.value.found
    assert "no_such_argument: 3" in caught.value.items


T5 = """
schema: 1
id: t5
title: T5
kind: text_encoder
model: transformers.T5EncoderModel
identify: {has: [encoder.block.0.layer.0.SelfAttention.q.weight]}
config:
  vocab_size: 20
  d_model: size(encoder.final_layer_norm.weight, 0)
  d_kv: 8
  d_ff: size(encoder.block.0.layer.1.DenseReluDense.wi.weight, 0)
  num_layers: count(encoder.block)
  num_heads: 2
precision:
  compute: bfloat16
  fp16: unsafe
  fp8: {storage: supported, compute: supported}
"""
TIES = ("shared.weight", "encoder.embed_tokens.weight")


@pytest.fixture
def t5(tmp_path: Path) -> tuple[Tensors, dict[str, Any]]:
    (tmp_path / "families" / "text_encoders").mkdir(parents=True)
    (tmp_path / "families" / "text_encoders" / "t5.yaml").write_text(T5)
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    tensors = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors[TIES[1]] = tensors[TIES[0]].clone()
    return tensors, {"families": [str(tmp_path / "families")], "device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize("held", [TIES, TIES[:1], TIES[1:]])
@pytest.mark.parametrize("fp8", ["off", "storage"])
def test_tied_tensors_are_one(
    tmp_path: Path, t5: tuple[Tensors, dict[str, Any]], held: tuple[str, ...], fp8: str
) -> None:
    tensors, settings = t5
    written = {name: tensor for name, tensor in tensors.items() if name not in TIES or name in held}
    save_file(written, tmp_path / "m.safetensors")
    loaded = slipcast.load(tmp_path / "m.safetensors", fp8=fp8, **settings)
    plan, model = loaded.report.plan, loaded.model
    assert loaded.report.differences == ()
    assert model.get_parameter(TIES[0]) is model.get_parameter(TIES[1])
    assert torch.equal(model.get_parameter(TIES[0]), tensors[TIES[0]])
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(written)
    assert plan.synthesised == {TIES[1]: f"the same tensor as {TIES[0]}"}
    spare = {TIES[1]: "it is the same tensor as another, which is loaded"} if len(held) == 2 else {}
    assert plan.dropped == spare
    modules = {module.path: module for module in plan.modules}
    assert any(module.codec for module in plan.modules) is (fp8 == "storage")
    assert modules["shared"].codec is modules["encoder.embed_tokens"].codec is None
    if fp8 == "storage":
        source = modules["shared" if TIES[0] in held else "encoder.embed_tokens"]
        assert source.reason == "its weight is also another module's"
    held_bytes = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert plan.bytes.resident == sum(held_bytes.values())


def test_tied_tensors_without_a_source_are_missing(tmp_path: Path, t5: tuple[Tensors, dict[str, Any]]) -> None:
    tensors, settings = t5
    save_file({name: tensor for name, tensor in tensors.items() if name not in TIES}, tmp_path / "m.safetensors")
    with pytest.raises(AccountingError) as caught:
        slipcast.plan(tmp_path / "m.safetensors", **settings)
    assert "missing: shared.weight (for shared.weight)" in caught.value.items


def test_a_saved_config_may_lie_beside_the_weights(tmp_path: Path, t5: tuple[Tensors, dict[str, Any]]) -> None:
    tensors, settings = t5
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2).to_dict()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["T5EncoderModel"]}))
    assert slipcast.load(folder, **settings).report.differences == ()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["T5ForConditionalGeneration"]}))
    assert slipcast.plan(folder, **settings).origin.model == "transformers.T5EncoderModel"  # the same but for its head
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["UMT5EncoderModel"]}))
    with pytest.raises(ConfigError, match=r"config\.json is of the class UMT5EncoderModel"):
        slipcast.plan(folder, **settings)
