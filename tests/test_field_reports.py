"""What went wrong with quantised checkpoints elsewhere, each as a file that must come out right here.

Every expected value is worked out in the test, from codes and scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.fp8_compute import Float8ComputeLinear
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.errors import AccountingError, QuantisationError, UnsupportedFormatError
from support.conversions import converted
from support.fp8_checkpoints import in_model_names
from support.fp8_compute import fp8_of
from support.hinted_family import hinted_family
from support.isolation import isolate
from support.number_formats import relative_l2
from support.quantised_cases import is_close
from support.quantised_checkpoints import (
    EVEN,
    FOLDED,
    QUANTISED,
    UNEVEN,
    fp8,
    int8,
    nvfp4,
    quantised_file,
    small_tensors,
)
from support.tiny_z_image import Tensors, natively

LAYER = "layers.0.feed_forward.w1"
"""A layer of the same name in both namings."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def native() -> Tensors:
    return natively(small_tensors(UNEVEN))


def _load(path: Path, **settings: Any) -> slipcast.Loaded:
    loaded = slipcast.load(path, **{"device": "cpu", "dtype": "float32", **settings})
    assert loaded.report.differences == ()
    return loaded


def _weight(loaded: slipcast.Loaded, path: str) -> torch.Tensor:
    module = loaded.model.get_submodule(path)
    return module.dequantised_weight() if isinstance(module, QuantisedModule) else module.weight.detach()  # type: ignore[operator, union-attr]


def _kept_and_folded(path: Path) -> tuple[slipcast.Loaded, slipcast.Loaded]:
    return _load(path), _load(path, fp8="off")


def test_scales_of_rows_without_a_marker(tmp_path: Path, native: Tensors) -> None:
    """ComfyUI loads the raw codes of such a text encoder, off by a factor of about 700 for each row."""
    codes = torch.randn(128, 48).to(E4M3)
    scale = torch.logspace(-4, -2, 128)
    native |= {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale": scale}
    save_file(native, tmp_path / "m.safetensors")
    expected = codes.float() * scale[:, None]
    for loaded in _kept_and_folded(tmp_path / "m.safetensors"):
        assert is_close(_weight(loaded, LAYER), expected)


def test_nvfp4_without_metadata(tmp_path: Path) -> None:
    """The two byte layouts have the same names; read as the other the weights are noise (1.4 in relative L2)."""
    for comfy in (True, False):
        file = quantised_file(nvfp4(comfy=comfy), block=16)
        path = file.write(tmp_path / "m.safetensors")
        for loaded in _kept_and_folded(path):
            for key, expected in file.expected().items():
                if key.endswith(".weight") and expected.ndim == 2:
                    assert is_close(_weight(loaded, key.removesuffix(".weight")), expected), key


TILED = ("layers.0.attention.qkv", "layers.0.attention.out")
"""Layers whose scales are whole tiles where the width is 128, so that both byte layouts fit."""


def test_nvfp4_of_which_nothing_tells_the_layout(tmp_path: Path) -> None:
    for comfy in (True, False):
        path = quantised_file(nvfp4(comfy=comfy), EVEN, TILED).write(tmp_path / "m.safetensors")
        assert slipcast.inspect(path).formats["nvfp4"] == 2
        with pytest.raises(QuantisationError) as caught:
            slipcast.plan(path, device="cpu")
        assert "nothing in the file tells the byte layout" in caught.value.found
        assert "comfy (high nibble first, scales swizzled) or linear (low nibble first)" in caught.value.expected
        assert "precision.nvfp4_layout in the family file" in caught.value.hint
        assert caught.value.items[0] in {f"{layer}.weight" for layer in TILED}
        with pytest.raises(QuantisationError, match="nothing in the file tells"):
            converted(path, tmp_path / "out.safetensors", "diffusers")


@pytest.mark.parametrize("layout", ["comfy", "linear"])
def test_a_family_file_s_hint_tells_the_layout(tmp_path: Path, layout: str) -> None:
    file = quantised_file(nvfp4(comfy=layout == "comfy"), EVEN, TILED)
    path = file.write(tmp_path / "m.safetensors")
    settings = hinted_family(tmp_path, EVEN, layout)
    for loaded in (_load(path, **settings), _load(path, fp8="off", **settings)):
        for key, expected in in_model_names(file.values).items():
            assert is_close(_weight(loaded, key.removesuffix(".weight")), expected), key


def test_shapes_are_not_read_from_packed_weights(tmp_path: Path) -> None:
    """Half the columns are stored of nvfp4; taken for the width they made another model of it."""
    layers = ("x_embedder", "cap_embedder.1", "layers.0.attention.qkv")
    file = quantised_file(nvfp4(), UNEVEN, layers)
    path = file.write(tmp_path / "m.safetensors", marked="metadata")
    config = slipcast.inspect(path).config
    assert {name: config[name] for name in ("dim", "in_channels", "cap_feat_dim")} == {
        "dim": 48,
        "in_channels": 8,
        "cap_feat_dim": 32,
    }
    loaded = _load(path)
    for key, expected in in_model_names(file.values).items():
        assert is_close(_weight(loaded, key.removesuffix(".weight")), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits(tmp_path: Path, native: Tensors, dtype: torch.dtype) -> None:
    codes, scale = torch.randn(128, 48).to(E4M3), torch.linspace(0.001, 0.01, 128).to(dtype)
    native |= {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale": scale}
    save_file(native, tmp_path / "m.safetensors")
    expected = codes.float() * scale.float()[:, None]
    kept, folded = _kept_and_folded(tmp_path / "m.safetensors")
    assert is_close(_weight(kept, LAYER), expected)
    assert is_close(_weight(folded, LAYER), expected)
    assert kept.model.get_submodule(LAYER).weight_scale.dtype == torch.float32


def test_scales_of_blocks(tmp_path: Path, native: Tensors) -> None:
    """One for each 16 columns of a row, ``[N, B, 1]``; broadcast over rows they fit as well, and are wrong."""
    codes, scale = torch.randn(128, 48).to(E4M3), torch.rand(128, 3, 1) + 0.01
    native |= {f"{LAYER}.weight": codes, f"{LAYER}.scale_weight": scale}
    save_file(native, tmp_path / "m.safetensors")
    expected = (codes.float().view(128, 3, 16) * scale).view(128, 48)
    for loaded in _kept_and_folded(tmp_path / "m.safetensors"):
        assert is_close(_weight(loaded, LAYER), expected)


def test_a_scaled_layer_on_the_skip_list(tmp_path: Path) -> None:
    """Cast without its scale such a layer came out 12,405 times too large."""
    file = quantised_file(fp8(spelling="scale_weight"))
    path = file.write(tmp_path / "m.safetensors", extra={"scaled_fp8": torch.zeros(0).to(E4M3)})
    loaded = _load(path, dtype="bfloat16")
    for layer in FOLDED:
        weight = loaded.model.get_submodule(layer).weight
        assert weight.dtype == torch.bfloat16
        assert relative_l2(weight, file.values[f"{layer}.weight"]) <= 0.003
        assert "unquantised" in loaded.report.plan.folded[f"{layer}.weight"]


def test_legacy_e5m2_is_not_taken_for_e4m3(tmp_path: Path, native: Tensors) -> None:
    """The old marker is made into one of e4m3 elsewhere; 97 % of the weights then end at 448."""
    codes = (torch.randn(128, 48) * 5000).to(E5M2)
    scale = torch.tensor(4e-6)
    native |= {f"{LAYER}.weight": codes, f"{LAYER}.scale_weight": scale, "scaled_fp8": torch.zeros(2).to(E4M3)}
    save_file(native, tmp_path / "m.safetensors")
    expected = codes.float() * scale
    assert (codes.float().abs() > 448).float().mean() > 0.9
    for loaded in _kept_and_folded(tmp_path / "m.safetensors"):
        assert is_close(_weight(loaded, LAYER), expected)
    assert "e5m2" in _load(tmp_path / "m.safetensors").report.plan.folded[f"{LAYER}.weight"]


@pytest.mark.parametrize("shape", [(48,), (48, 1)])
def test_a_square_weight_with_a_scale_for_each_row(tmp_path: Path, native: Tensors, shape: tuple[int, ...]) -> None:
    """On the wrong axis ``[N]`` broadcasts without a word."""
    codes, scale = torch.randn(48, 48).to(E4M3), torch.logspace(-3, -1, 48)
    layer = "layers.0.attention.out"
    native |= {f"{layer}.weight": codes, f"{layer}.weight_scale": scale.view(shape)}
    save_file(native, tmp_path / "m.safetensors")
    for loaded in _kept_and_folded(tmp_path / "m.safetensors"):
        assert is_close(_weight(loaded, "layers.0.attention.to_out.0"), codes.float() * scale[:, None])


def test_metadata_names_layers_as_the_file_does(tmp_path: Path) -> None:
    """The map renames them after that: looked up by the model's names nothing was found."""
    file = quantised_file(fp8(input_scale="input_scale"))
    for layer in ("layers.0.attention.qkv", "final_layer.linear"):
        file.markers[layer]["full_precision_matrix_mult"] = True
    path = file.write(tmp_path / "m.safetensors", marked="metadata", prefix="model.diffusion_model.")
    assert slipcast.inspect(path).problems == ()
    loaded = _load(path, fp8=fp8_of("compute"))
    multiplying = {name for name, module in loaded.model.named_modules() if isinstance(module, Float8ComputeLinear)}
    stored = {name for name, module in loaded.model.named_modules() if isinstance(module, QuantisedModule)}
    hinted = {f"layers.0.attention.to_{letter}" for letter in "qkv"} | {"all_final_layer.2-1.linear"}
    assert stored - multiplying == hinted
    assert "noise_refiner.0.attention.to_q" in multiplying


def test_a_fused_weight_with_one_scale(tmp_path: Path, native: Tensors) -> None:
    codes = torch.randn(144, 48).to(E4M3)
    scale = torch.tensor(0.007)
    layer = "layers.1.attention.qkv"
    native |= {f"{layer}.weight": codes, f"{layer}.scale_weight": scale, "scaled_fp8": torch.zeros(0).to(E4M3)}
    save_file(native, tmp_path / "m.safetensors")
    for loaded in _kept_and_folded(tmp_path / "m.safetensors"):
        for index, part in enumerate(("to_q", "to_k", "to_v")):
            expected = codes[48 * index : 48 * (index + 1)].float() * scale
            assert is_close(_weight(loaded, f"layers.1.attention.{part}"), expected)
    kept = _load(tmp_path / "m.safetensors").model
    for part in ("to_q", "to_k", "to_v"):
        assert torch.equal(kept.get_submodule(f"layers.1.attention.{part}").weight_scale, scale)


@pytest.mark.parametrize("format_", ["fp8_scaled", "mxfp8", "nvfp4", "int8", "int8_convrot"])
def test_a_weight_of_zeros(tmp_path: Path, native: Tensors, format_: str) -> None:
    """Its largest magnitude is no scale to divide by."""
    native["layers.0.attention.out.weight"] = torch.zeros(48, 48)
    native[f"{LAYER}.weight"][:40] = 0
    save_file(native, tmp_path / "m.safetensors")
    converted(tmp_path / "m.safetensors", tmp_path / "out.safetensors", format=format_)
    for loaded in (*_kept_and_folded(tmp_path / "out.safetensors"), _load(tmp_path / "m.safetensors", fp8="storage")):
        assert torch.equal(_weight(loaded, "layers.0.attention.to_out.0"), torch.zeros(48, 48))
        assert torch.equal(_weight(loaded, LAYER)[:40], torch.zeros(40, 48))
        assert all(torch.isfinite(tensor).all() for tensor in loaded.model.state_dict().values() if tensor.itemsize > 1)


@pytest.mark.parametrize(("value", "used"), [(0.25, True), (1.0, False), (float("nan"), False), (0.0, False)])
def test_scales_of_activations_that_mean_nothing(tmp_path: Path, value: float, used: bool) -> None:
    """1.0 is what producers write who have not calibrated; with NaN all outputs are NaN."""
    file = quantised_file(fp8(input_scale="input_scale"))
    for layer in QUANTISED:
        file.native[f"{layer}.input_scale"] = torch.tensor(value)
    path = file.write(tmp_path / "m.safetensors", marked="metadata")
    layer = _load(path, fp8=fp8_of("compute")).model.get_submodule(LAYER)
    assert isinstance(layer, Float8ComputeLinear)
    assert (layer.input_scale is not None) is used
    inputs = torch.randn(5, 48)
    expected = inputs @ file.values[f"{LAYER}.weight"].T
    assert relative_l2(layer(inputs), expected) <= 0.06
    for loaded in _kept_and_folded(path):  # what is not multiplied in float8 has no use for it
        assert relative_l2(torch.nn.functional.linear(inputs, _weight(loaded, LAYER)), expected) <= 1e-5


def test_a_file_whose_norms_and_biases_are_fp8(tmp_path: Path) -> None:
    """Kept in codes they are no operand that a norm or an addition takes."""
    native = {name: (tensor.float() * 8).to(E4M3) for name, tensor in natively(small_tensors(UNEVEN)).items()}
    save_file(native, tmp_path / "m.safetensors")
    expected = in_model_names({name: tensor.float() for name, tensor in native.items()})
    loaded = _load(tmp_path / "m.safetensors", dtype="bfloat16")
    for name, parameter in loaded.model.named_parameters():
        if parameter.dtype == E4M3:
            assert isinstance(loaded.model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
            assert parameter.ndim == 2
            assert name.endswith(".weight")
            assert torch.equal(parameter.detach().view(torch.uint8), expected[name].to(E4M3).view(torch.uint8))
        else:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter.detach().float(), expected[name].reshape(parameter.shape)), name
    with torch.no_grad():
        latents, captions = [torch.randn(8, 1, 4, 4).bfloat16()], [torch.randn(5, 32).bfloat16()]
        (output,) = loaded.model(latents, torch.tensor([0.3]), captions, return_dict=False)[0]
    assert torch.isfinite(output).all()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({f"{LAYER}.weight_scale": torch.tensor(1.0)}, f"{LAYER}.weight_scale F32 []"),
        ({f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}, f"{LAYER}.weight_scale_inv F32 [1, 1]"),
        ({f"{LAYER}.weight_scale_2": torch.tensor(1.0)}, f"{LAYER}.weight_scale_2 F32 []"),
        ({"gone.comfy_quant": torch.zeros(20, dtype=torch.uint8)}, "gone.comfy_quant U8 [20]"),
        ({"gone.absmax": torch.ones(4)}, "gone.absmax F32 [4]"),
        ({"gone.scale_weight": torch.ones(1)}, "gone.scale_weight F32 [1]"),
    ],
)
def test_a_scale_left_over_is_an_error(
    tmp_path: Path, native: Tensors, extra: dict[str, torch.Tensor], named: str
) -> None:
    save_file({**native, **extra}, tmp_path / "m.safetensors")
    for attempt in (
        lambda: slipcast.plan(tmp_path / "m.safetensors", device="cpu", unexpected=["*"]),
        lambda: converted(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "diffusers", unexpected=["*"]),
    ):
        with pytest.raises(QuantisationError) as caught:
            attempt()
        assert "1 scale or marker that no weight consumes" in caught.value.found
        assert caught.value.items == (named,)


@pytest.mark.parametrize(
    ("format_", "leaf"),
    [
        ("fp8_scaled", "weight_scale_2"),
        ("fp8_scaled", "weight_scale_inv"),
        ("fp8_scaled", "weight_zero_point"),
        ("fp8_scaled", "pre_quant_scale"),
        ("nvfp4", "pre_quant_scale"),
        ("nvfp4", "weight_global_scale"),
        ("mxfp8", "weight_scale_2"),
        ("int8", "weight_zeros"),
    ],
)
def test_a_side_tensor_that_the_format_does_not_know_is_an_error(
    tmp_path: Path, native: Tensors, format_: str, leaf: str
) -> None:
    """A zero point, a smoothing or a second scale that is passed over gives other weights."""
    save_file(native, tmp_path / "plain.safetensors")
    converted(tmp_path / "plain.safetensors", tmp_path / "m.safetensors", format=format_)
    tensors = {**load_file(tmp_path / "m.safetensors"), f"{LAYER}.{leaf}": torch.ones(48)}
    save_file(tensors, tmp_path / "m.safetensors")
    for attempt in (
        lambda: slipcast.plan(tmp_path / "m.safetensors", device="cpu", unexpected=["*"]),
        lambda: converted(tmp_path / "m.safetensors", tmp_path / "out.safetensors", format="bf16"),
    ):
        with pytest.raises(QuantisationError) as caught:
            attempt()
        assert caught.value.items == (f"{LAYER}.{leaf} F32 [48]",)
    assert any(f"{LAYER}.{leaf}" in problem for problem in slipcast.inspect(tmp_path / "m.safetensors").problems)


def test_descriptions_that_can_t_be_read_are_said_and_the_tensors_rule(tmp_path: Path) -> None:
    """But not where that would be a guess: int8 may be rotated."""
    broken = {"layers.0.attention.out.comfy_quant": torch.tensor([123, 34], dtype=torch.uint8)}
    file = quantised_file(fp8("N1"))
    loaded = _load(file.write(tmp_path / "m.safetensors", extra=broken))
    assert any("comfy_quant can't be read" in note for note in loaded.report.plan.notes)
    for key, expected in in_model_names(file.values).items():
        assert is_close(_weight(loaded, key.removesuffix(".weight")), expected), key
    path = quantised_file(int8()).write(tmp_path / "m.safetensors", extra=broken)
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(path, device="cpu")
    assert any("can't be read: they may be rotated" in item for item in caught.value.items)


def test_an_older_marker_of_int8_has_no_format(tmp_path: Path) -> None:
    """It says how the columns are rotated, and nothing of what they are in."""
    file = quantised_file(int8(group=256), block=16)
    for marker in file.markers.values():
        del marker["format"]
        marker["per_row"] = True
    loaded = _load(file.write(tmp_path / "m.safetensors", marked="tensors"))
    for key, expected in in_model_names(file.values).items():
        assert is_close(_weight(loaded, key.removesuffix(".weight")), expected), key


def test_codes_left_over_are_an_error(tmp_path: Path, native: Tensors) -> None:
    extra = {"gone.weight": torch.ones(4, 4).to(E4M3), "gone.weight_scale": torch.tensor(1.0)}
    save_file({**native, **extra}, tmp_path / "m.safetensors")
    with pytest.raises(AccountingError) as caught:
        slipcast.plan(tmp_path / "m.safetensors", device="cpu", unexpected=["*"])
    assert "quantised weights can't be let pass" in caught.value.hint
    assert caught.value.items == ("left over: gone.weight F8_E4M3 [4, 4]",)


def test_the_scale_of_a_layer_stays_with_it_through_convert(tmp_path: Path) -> None:
    """Converters elsewhere drop scales that they do not know, or write the codes without them."""
    file = quantised_file(fp8("N1", input_scale="input_scale"))
    path = file.write(tmp_path / "m.safetensors", marked="tensors")
    converted(path, tmp_path / "model.safetensors", "diffusers")
    tensors = load_file(tmp_path / "model.safetensors")
    for key in in_model_names(file.values):
        layer = key.removesuffix(".weight")
        assert {f"{layer}.weight_scale", f"{layer}.input_scale", f"{layer}.comfy_quant"} <= tensors.keys()
