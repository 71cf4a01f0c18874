"""Files that do not add up to their model: what is refused, in which words, and what may pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLFlux2
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.accounting import account
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import strip_prefix
from slipcast.registry.errors import AccountingError, ConfigError, UnsupportedFormatError
from slipcast.registry.identify import identify
from support.fp8_checkpoints import Scaled, fp8_file
from support.isolation import isolate
from support.tiny_z_image import CONFIG, Tensors, natively, tiny_tensors, write_folder

CHANGED = "layers.1.feed_forward.w1.weight"
FUSED = "layers.1.attention.qkv.weight"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors()


def _refusal(tmp_path: Path, tensors: Tensors, prefix: str = "", **settings: Any) -> AccountingError:
    path = tmp_path / "m.safetensors"
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(AccountingError) as caught:
        slipcast.load(path, device="cpu", **settings)
    assert caught.value.path == str(path)
    return caught.value


def test_tensors_of_another_model_in_the_same_file_are_left_to_it(tmp_path: Path, tensors: Tensors) -> None:
    save_file(
        {"a." + name: tensor for name, tensor in tensors.items()} | {"b.x": torch.ones(2)}, tmp_path / "m.safetensors"
    )
    (tmp_path / "families").mkdir()
    text = (Path(__file__).parents[1] / "families" / "z-image.yaml").read_text().replace("id: z-image", "id: own")
    (tmp_path / "families" / "own.yaml").write_text(text.replace("prefixes: [", "prefixes: [a., "))
    catalogue = load_catalogue([tmp_path / "families"])
    (match,) = identify(read_checkpoint(tmp_path / "m.safetensors"), catalogue, family="own")
    other = replace(match, prefix="b.", bundles=strip_prefix(match.everything.weights, "b."))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(AccountingError):
        account(match, shapes, {}, others=[match])
    (fate,) = account(match, shapes, {}, others=[match, other]).unused
    assert (fate.name, fate.fate) == ("b.x", "other component")


def test_one_tensor_missing(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors)
    del native[FUSED]
    error = _refusal(tmp_path, native)
    assert "the tensors do not add up to a model of the family z-image: 1 missing" in error.found
    parts = " + ".join(f"layers.1.attention.to_{part}.weight" for part in "qkv")
    assert error.items == (f"missing: {FUSED} (for {parts})",)
    assert "exactly the tensors of diffusers.ZImageTransformer2DModel" in error.expected
    assert "the file is incomplete" in error.hint


def test_one_tensor_missing_in_the_model_s_names(tmp_path: Path, tensors: Tensors) -> None:
    short = dict(tensors)
    del short["layers.1.attention.to_k.weight"]
    assert _refusal(tmp_path, short).items == (
        "missing: layers.1.attention.to_k.weight (for layers.1.attention.to_k.weight)",
    )


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_one_tensor_too_many_and_the_setting_that_lets_it_pass(tmp_path: Path, tensors: Tensors, prefix: str) -> None:
    extra = natively(tensors) | {"layers.0.extra.weight": torch.ones(2, 3)}
    error = _refusal(tmp_path, extra, prefix)
    assert error.items == (f"left over: {prefix}layers.0.extra.weight F32 [2, 3]",)
    assert f"unexpected=[{prefix}layers.0.extra.weight]" in error.hint
    for glob in ("layers.0.extra.weight", f"{prefix}layers.*.extra.*"):
        loaded = slipcast.load(tmp_path / "m.safetensors", device="cpu", unexpected=["nothing", glob])
        reason = "left over; the setting unexpected lets it pass"
        assert loaded.report.plan.dropped == {f"{prefix}layers.0.extra.weight": reason}
        assert loaded.report.to_dict()["dropped"] == loaded.report.plan.dropped


def test_a_misspelt_tensor_is_likened_to_the_one_that_it_may_be(tmp_path: Path, tensors: Tensors) -> None:
    extra = natively(tensors) | {"layers.0.feed_forward.w1.weigth": torch.ones(2)}
    assert "the model has layers.0.feed_forward.w1.weight: is it misspelt?" in _refusal(tmp_path, extra).hint


def test_a_quantised_weight_too_many_never_passes(tmp_path: Path, tensors: Tensors) -> None:
    file = fp8_file(tensors)
    file.native["layers.0.extra.weight"] = torch.ones(4, 4)
    file.scale_layer("layers.0.extra", Scaled())
    error = _refusal(tmp_path, file.native, unexpected=["*"])
    assert error.items == ("left over: layers.0.extra.weight F8_E4M3 [4, 4]",)
    assert "quantised weights can't be let pass" in error.hint


def test_a_tensor_that_the_family_drops_passes_with_its_reason(tmp_path: Path, tensors: Tensors) -> None:
    save_file(natively(tensors) | {"norm_final.weight": torch.ones(2)}, tmp_path / "m.safetensors")
    plan = slipcast.plan(tmp_path / "m.safetensors", device="cpu")
    assert plan.dropped == {"norm_final.weight": "the norm has no weight in the model class"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t[:-1], f"shape: {CHANGED} is [169, 64], the model's {CHANGED} [170, 64] needs [170, 64]"),
        (lambda t: t.t(), f"shape: {CHANGED} is [64, 170], the model's {CHANGED} [170, 64] needs [170, 64]"),
        (lambda t: t.flatten(), f"shape: {CHANGED} is [10880], the model's {CHANGED} [170, 64] needs [170, 64]"),
        (lambda t: t[..., None], f"shape: {CHANGED} is [170, 64, 1], the model's {CHANGED} [170, 64] needs [170, 64]"),
    ],
)
def test_one_wrong_shape(
    tmp_path: Path, tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor], line: str
) -> None:
    native = natively(tensors)
    native[CHANGED] = change(native[CHANGED])
    error = _refusal(tmp_path, native)
    assert "1 of another shape" in error.found
    assert error.items == (line,)


def test_a_fused_tensor_with_rows_too_many(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors)
    native[FUSED] = torch.cat([native[FUSED], native[FUSED][:3]])
    (line,) = _refusal(tmp_path, native).items
    assert line.startswith(f"shape: {FUSED} is [195, 64], the model's layers.1.attention.to_q.weight [64, 64] + ")
    assert line.endswith("needs [192, 64]")


def test_all_faults_are_named_at_once(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors) | {"extra": torch.ones(1)}
    native[CHANGED] = native[CHANGED][:-1]
    del native[FUSED]
    error = _refusal(tmp_path, native)
    assert error.found.endswith("1 missing, 1 left over, 1 of another shape")
    assert [item.partition(":")[0] for item in error.items] == ["shape", "missing", "left over"]


def test_integers_in_place_of_floats_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors)
    bias = "layers.0.adaLN_modulation.0.bias"
    native[bias] = native[bias].to(torch.int8)
    error = _refusal(tmp_path, native)
    assert "1 tensor in integers where the model has floats, or the other way round" in error.found
    assert error.items == (f"{bias} I8, for {bias} float32",)


@pytest.mark.parametrize(
    ("value", "dtype", "loads"),
    [
        (7.0, torch.bfloat16, True),
        (-2.0, torch.float32, True),
        (7.5, torch.bfloat16, False),
        (float("nan"), torch.float32, False),
        (2.0**63, torch.float32, False),
    ],
)
def test_a_counter_in_floats_is_taken_where_its_number_is_whole(
    tmp_path: Path, value: float, dtype: torch.dtype, loads: bool
) -> None:
    tiny = load_catalogue()["flux-2-vae"].tiny
    assert tiny is not None
    counter = "bn.num_batches_tracked"
    tensors = AutoencoderKLFlux2(**tiny.config).state_dict() | {counter: torch.tensor(value, dtype=dtype)}
    path = tmp_path / "vae.safetensors"
    save_file(tensors, path)
    if loads:
        loaded = slipcast.load(path, device="cpu")
        held = loaded.model.state_dict()[counter]
        assert (held.dtype, int(held)) == (torch.int64, value)
        assert not loaded.report.differences
        return
    with pytest.raises(
        AccountingError, match="1 tensor in integers where the model has floats, or the other"
    ) as caught:
        slipcast.plan(path, device="cpu")
    assert caught.value.items[0].startswith(counter)


def test_integer_codes_without_a_scale_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors)
    native[CHANGED] = native[CHANGED].to(torch.int8)
    save_file(native, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(tmp_path / "m.safetensors", device="cpu")
    assert "unknown (1 weights)" in caught.value.found
    assert caught.value.items == (f"{CHANGED}: codes of I8 without a scale",)


def _folder(tmp_path: Path, tensors: Tensors, change: Callable[[dict[str, Any]], None]) -> Path:
    folder = write_folder(tmp_path / "folder", tensors)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("n_layers", 4, "n_layers: config.json says 4, the tensors show 3"),
        ("dim", 128, "dim: config.json says 128, the tensors show 64"),
        ("siglip_feat_dim", 16, "siglip_feat_dim: config.json says 16, the tensors show None"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    tmp_path: Path, tensors: Tensors, key: str, value: object, line: str
) -> None:
    folder = _folder(tmp_path, tensors, lambda config: config.update({key: value}))
    with pytest.raises(ConfigError) as caught:
        slipcast.plan(folder, device="cpu")
    assert caught.value.found == "config.json contradicts the tensors beside it"
    assert caught.value.items == (line,)
    assert "put the right config.json beside the weights" in caught.value.hint


def test_a_config_that_no_single_tensor_contradicts_is_refused_by_the_model(tmp_path: Path, tensors: Tensors) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(n_heads=4, n_kv_heads=4, axes_dims=[4, 6, 6])

    with pytest.raises(AccountingError) as caught:
        slipcast.plan(_folder(tmp_path, tensors, change), device="cpu")
    assert "of another shape" in caught.value.found
    with pytest.raises(ConfigError, match="refuses its configuration"):
        slipcast.plan(_folder(tmp_path, tensors, lambda config: config.update(axes_dims=[1, 2, 3])), device="cpu")
    with pytest.raises(ConfigError, match="refuses its configuration"):  # null leaves a value to the class
        slipcast.plan(_folder(tmp_path, tensors, lambda config: config.update(cap_feat_dim=None)), device="cpu")


def test_a_config_of_another_class(tmp_path: Path, tensors: Tensors) -> None:
    folder = _folder(tmp_path, tensors, lambda config: config.update(_class_name="Lumina2Transformer2DModel"))
    with pytest.raises(ConfigError) as caught:
        slipcast.plan(folder, device="cpu")
    assert caught.value.found == "config.json is of the class Lumina2Transformer2DModel"
    assert "ZImageTransformer2DModel, the class of the family z-image" in caught.value.expected


def test_a_config_s_own_values_win_and_unknown_ones_are_passed_over(tmp_path: Path, tensors: Tensors) -> None:
    folder = _folder(tmp_path, tensors, lambda config: config.update(axes_lens=[1024, 64, 64], from_the_future=3))
    plan = slipcast.plan(folder, device="cpu")
    recorded = json.loads((folder / "config.json").read_text())
    known = {key: value for key, value in recorded.items() if key[0] != "_" and key != "from_the_future"}
    assert plan.origin.config == known
    assert "config.json's from_the_future is unknown to the installed class and passed over" in plan.notes
    model = slipcast.load(folder, device="cpu").model
    assert model.config["axes_lens"] == [1024, 64, 64]


def test_a_folder_without_a_config_is_read_off_its_tensors(tmp_path: Path, tensors: Tensors) -> None:
    folder = write_folder(tmp_path / "folder", tensors)
    (folder / "config.json").unlink()
    assert {key: slipcast.plan(folder, device="cpu").origin.config[key] for key in CONFIG} == CONFIG


def test_a_folder_that_another_library_quantised_is_refused_by_its_name(tmp_path: Path, tensors: Tensors) -> None:
    folder = _folder(tmp_path, tensors, lambda config: config.update(quantization_config={"quant_method": "torchao"}))
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(folder, device="cpu")
    assert "the method 'torchao'" in caught.value.found
    assert "load it with diffusers and the library behind torchao" in caught.value.hint


def test_nothing_is_written_by_a_refusal(tmp_path: Path, tensors: Tensors) -> None:
    native = natively(tensors)
    del native[FUSED]
    _refusal(tmp_path, native)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    assert load_file(tmp_path / "m.safetensors").keys() == native.keys()
