"""What a checkpoint is in the other naming, from its header alone, at full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipcast.engine.conversion import convert_header
from slipcast.engine.converted import Conversion
from slipcast.engine.wanted import Wanted
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import AccountingError, SettingsError
from slipcast.registry.identify import Match, identify
from support.recorded import recorded, write_checkpoint

NATIVE, DIFFUSERS = "z-image-turbo--comfy-bf16", "z-image--turbo-diffusers"


def _match(folder: Path, record: str = NATIVE, prefix: str = "", extra: dict | None = None) -> Match:
    tensors = {**recorded(record).tensors, **(extra or {})}
    path = write_checkpoint(tensors, folder / f"{record}.safetensors", prefix=prefix)
    return identify(read_checkpoint(path), load_catalogue())[0]


def _shapes(conversion: Conversion) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in conversion.tensors}


def _recorded_shapes(record: str) -> dict[str, tuple[int, ...] | None]:
    return {name: shape for name, (_, shape) in recorded(record).tensors.items()}


def test_a_native_header_becomes_the_published_diffusers_header(tmp_path: Path) -> None:
    match = _match(tmp_path)
    conversion = convert_header(match, "diffusers")
    assert _shapes(conversion) == _recorded_shapes(DIFFUSERS)
    assert {tensor.dtype for tensor in conversion.tensors} == {"BF16"}
    assert conversion.nbytes == match.header.nbytes
    assert (conversion.left_out, conversion.altered) == ({}, ())


def test_a_diffusers_header_becomes_the_published_native_header(tmp_path: Path) -> None:
    conversion = convert_header(_match(tmp_path, DIFFUSERS), "native", prefix="model.diffusion_model.")
    native = {name.removeprefix("model.diffusion_model."): shape for name, shape in _shapes(conversion).items()}
    assert native == _recorded_shapes(NATIVE)
    assert all(name.startswith("model.diffusion_model.") for name in _shapes(conversion))


def test_fused_rows_go_to_their_own_tensors_in_order(tmp_path: Path) -> None:
    tensors = {tensor.name: tensor for tensor in convert_header(_match(tmp_path), "diffusers").tensors}
    parts = [tensors[f"layers.0.attention.to_{letter}.weight"].extracts for letter in "qkv"]
    assert [part[0].rows for part in parts] == [(0, 3840), (3840, 7680), (7680, 11520)]
    assert {part[0].tensor.name for part in parts} == {"layers.0.attention.qkv.weight"}


def test_the_same_naming_keeps_every_tensor_and_changes_the_prefix(tmp_path: Path) -> None:
    match = _match(tmp_path, prefix="model.diffusion_model.", extra={"norm_final.weight": ("BF16", (3840,))})
    conversion = convert_header(match, "native", prefix="")
    assert _shapes(conversion) == {**_recorded_shapes(NATIVE), "norm_final.weight": (3840,)}
    assert conversion.left_out == {}
    assert convert_header(match, "native").prefix == "model.diffusion_model."


def test_what_the_family_drops_is_lost_and_said(tmp_path: Path) -> None:
    conversion = convert_header(_match(tmp_path, extra={"norm_final.weight": ("BF16", (3840,))}), "diffusers")
    assert conversion.left_out == {"norm_final.weight": "the norm has no weight in the model class"}
    assert _shapes(conversion) == _recorded_shapes(DIFFUSERS)


def test_a_shape_that_the_model_has_otherwise_is_said(tmp_path: Path) -> None:
    conversion = convert_header(_match(tmp_path, extra={"x_pad_token": ("BF16", (3840,))}), "diffusers")
    assert conversion.altered == ("x_pad_token [3840] comes back as x_pad_token [1, 3840]",)
    assert _shapes(conversion)["x_pad_token"] == (1, 3840)


def test_wide_items_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    match = _match(tmp_path, extra={"t_embedder.mlp.2.bias": ("F32", (256,)), "x_embedder.bias": ("F32", (3840,))})
    tensors = convert_header(match, "diffusers").tensors
    assert [tensor.dtype for tensor in tensors[:3]] == ["F32", "F32", "BF16"]
    starts = [tensor.extracts[0].tensor.start for tensor in tensors[2:]]
    assert starts == sorted(starts)


def test_a_prefix_that_nobody_would_look_under_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"the prefix 'modle\.', under which no z-image would be found") as error:
        convert_header(_match(tmp_path), "native", prefix="modle.")
    assert "'model.diffusion_model.'" in error.value.expected


def test_tensors_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    match = _match(tmp_path, extra={"layers.0.attention.qkv.bias": ("BF16", (11520,))})
    with pytest.raises(AccountingError, match=r"left over: layers\.0\.attention\.qkv\.bias"):
        convert_header(match, "diffusers")
    conversion = convert_header(match, "diffusers", unexpected=["*.qkv.bias"])
    assert list(conversion.left_out) == ["layers.0.attention.qkv.bias"]


def test_rows_of_two_dtypes_are_not_joined(tmp_path: Path) -> None:
    match = _match(tmp_path, DIFFUSERS, extra={"layers.1.attention.to_v.weight": ("F16", (3840, 3840))})
    with pytest.raises(AccountingError, match=r"layers\.1\.attention\.qkv\.weight .* several dtypes: BF16, F16"):
        convert_header(match, "native")


INT8, FP8 = "z-image-turbo--comfy-int8-convrot", "z-image-turbo--kijai-fp8-scaled"


@pytest.mark.parametrize(("record", "format_"), [(INT8, "int8_convrot"), (FP8, "fp8_scaled")])
def test_a_quantised_header_at_full_size(tmp_path: Path, record: str, format_: str) -> None:
    """Each of the 34 fused weights becomes three, with all that belongs to it."""
    match = _match(tmp_path, record)
    conversion = convert_header(match, "diffusers")
    before = sum(bundle.format == format_ for bundle in match.bundles.values())
    assert conversion.formats[format_] == before + 2 * 34
    assert (conversion.folded, conversion.left_out, conversion.altered) == ({}, {}, ())
    shapes = _shapes(conversion)
    scale = {INT8: ("weight_scale", (3840, 1)), FP8: ("scale_weight", (1,))}[record]
    for letter in "qkv":
        layer = f"layers.7.attention.to_{letter}"
        assert shapes[f"{layer}.weight"] == (3840, 3840)
        assert shapes[f"{layer}.{scale[0]}"] == scale[1]
        assert (f"{layer}.comfy_quant" in shapes) == (record == INT8)
    assert {tensor.dtype for tensor in conversion.tensors} == {tensor.dtype for tensor in match.header.tensors.values()}
    plain = convert_header(match, wanted=Wanted("bf16"))
    assert {tensor.dtype for tensor in plain.tensors} == {"BF16"}
    assert _shapes(plain) == _recorded_shapes(NATIVE)


@pytest.mark.parametrize(("format_", "size"), [("fp8_scaled", 0.5), ("nvfp4", 0.29), ("int8_convrot", 0.5)])
def test_a_plain_header_in_another_format(tmp_path: Path, format_: str, size: float) -> None:
    match = _match(tmp_path)
    conversion = convert_header(match, wanted=Wanted(format_))
    quantised = 34 * 5 + 32 + 3  # of each block five, of those with modulation one more; x_embedder and the final layer
    assert conversion.formats[format_] == quantised
    assert conversion.nbytes == pytest.approx(match.header.nbytes * size, rel=0.03)
