"""int8, mxfp8 and nvfp4: against decoders written from the formats' descriptions, and against comfy-kitchen."""

from __future__ import annotations

import itertools
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from slipcast.engine.codecs.base import CODES, SCALE, Codec
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.hadamard import rotation_group, signs
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4, SCALE_2
from slipcast.registry.errors import QuantisationError, UnsupportedFormatError
from support import quantised_formats
from support.number_formats import bytes_of, relative_l2

COMFY, LINEAR, MX = NVFP4("comfy"), NVFP4("linear"), MXFP8()
INT8 = [Int8(), Int8("tensor"), Int8(rotation=16), Int8(rotation=64), Int8(rotation=256), Int8("tensor", rotation=16)]
CODECS: list[Codec] = [*INT8, Int8(axis=1), MX, COMFY, LINEAR]

gpu = pytest.mark.gpu
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def normal(*shape: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * sigma


def name(value: object) -> str:
    return value.name if isinstance(value, Codec) else str(value)


def independent(codec: Codec, parts: dict[str, Tensor], shape: tuple[int, int]) -> np.ndarray:
    """What the parts mean by the format's description."""
    if isinstance(codec, Int8):
        codes = parts[CODES].cpu().numpy()
        scale = parts[SCALE].cpu().double().numpy()
        return (
            quantised_formats.int8(codes.T, scale).T
            if codec.axis
            else quantised_formats.int8(codes, scale, codec.rotation)
        )
    codes, scale = bytes_of(parts[CODES]), bytes_of(parts[SCALE])
    if isinstance(codec, MXFP8):
        return quantised_formats.mxfp8(codes, scale, *shape)
    assert isinstance(codec, NVFP4)
    return quantised_formats.nvfp4(codes, scale, float(parts[SCALE_2]), *shape, comfy=codec.layout == "comfy")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Codec, Tensor]:
    codec = draw(st.sampled_from(CODECS))
    step = codec.rotation or 1 if isinstance(codec, Int8) else 16 if codec == LINEAR else 1
    rows, columns = draw(st.integers(1, 140)), step * draw(st.integers(1, max(1, 96 // step)))
    weight = normal(rows, columns, seed=draw(st.integers(0, 2**31)))
    weight *= torch.logspace(*draw(st.sampled_from([(0, 0), (-3, 3), (-12, -6)])), rows)[:, None]
    return codec, weight


@settings(max_examples=40, deadline=None)
@given(cases())
def test_decoding_is_what_the_format_says(case: tuple[Codec, Tensor]) -> None:
    codec, weight = case
    shape = tuple(weight.shape)
    parts = codec.encode(weight)
    decoded = codec.decode(parts, shape, torch.float32)
    expected = independent(codec, parts, shape)
    assert decoded.shape == shape
    assert np.abs(decoded.double().numpy() - expected).max() <= 1e-6 * np.abs(expected).max()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(codec.decode(parts, shape, dtype), decoded.to(dtype))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", [MX, COMFY, LINEAR], ids=name)
def test_any_bytes_decode_as_the_format_says(codec: Codec, seed: int) -> None:
    """Also codes and scales that no encoder writes; those that mean NaN are left out."""
    shape = (130, 96)
    random = np.random.default_rng(seed)
    parts = {}
    for key, part in codec.parts(shape).items():
        if key == SCALE_2:
            parts[key] = torch.tensor(0.003)
            continue
        raw = random.integers(0, 256, part.shape, np.uint8)
        if part.dtype == torch.float8_e4m3fn:
            raw[raw & 0x7F == 0x7F] = 0x40
        elif key == SCALE:
            raw = random.integers(90, 160, part.shape).astype(np.uint8)
            raw[random.random(part.shape) < 0.1] = 0
        parts[key] = torch.from_numpy(raw).view(part.dtype)
    decoded = codec.decode(parts, shape, torch.float32).double().numpy()
    expected = independent(codec, parts, shape)
    assert np.all(np.abs(decoded - expected) <= 1e-6 * np.abs(expected))
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        (MX, 0.029),
        (COMFY, 0.106),
        (LINEAR, 0.106),
        (Int8(), 0.008),
        (Int8(axis=1), 0.008),
        (Int8(rotation=256), 0.01),
        (Int8("tensor", rotation=256), 0.01),
        (Int8("tensor"), 0.01),
    ],
    ids=name,
)
@pytest.mark.parametrize(
    ("dtype", "sigma"), [(torch.float32, 1.0), (torch.bfloat16, 0.0015), (torch.float16, 0.0015)], ids=str
)
def test_the_loss_on_normal_weights_is_bounded(codec: Codec, bound: float, dtype: torch.dtype, sigma: float) -> None:
    weight = normal(192, 512, sigma=sigma).to(dtype)
    error = relative_l2(codec.decode(codec.encode(weight), (192, 512), torch.float32), weight)
    assert bound / 3 < error < bound


@pytest.mark.parametrize("codec", INT8, ids=name)
def test_int8_codes_are_symmetric(codec: Int8) -> None:
    codes = codec.encode(torch.cat([normal(64, 256), -normal(64, 256)]))[CODES]
    assert (int(codes.min()), int(codes.max())) == (-127, 127)


@pytest.mark.parametrize("largest", [448.0, 448.0 * 2**-20, 448.0 * 2**30])
def test_mxfp8_takes_the_smallest_scale_that_fits(largest: float) -> None:
    weight = torch.full((1, 32), largest / 7)
    weight[0, 3] = -largest
    parts = MX.encode(weight)
    decoded = MX.decode(parts, (1, 32), torch.float32)
    assert decoded[0, 3] == -448 * 2.0 ** round(np.log2(largest / 448))
    assert bytes_of(parts[CODES])[0, 3] == 0xFE


def test_a_rotation_spreads_outliers() -> None:
    weight = normal(64, 512, sigma=0.02)
    weight[:, 7] *= 50
    plain, rotated = (
        relative_l2(codec.decode(codec.encode(weight), (64, 512), torch.float32)[:, 8:], weight[:, 8:])
        for codec in (Int8(), Int8(rotation=256))
    )
    assert rotated < plain / 3


def test_the_rotation_is_its_own_inverse() -> None:
    for group in (4, 16, 64, 256):
        matrix = signs(group, torch.device("cpu")) / group**0.5
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix @ matrix, torch.eye(group))
        assert np.array_equal(matrix.double().numpy(), quantised_formats.hadamard(group))
    assert [rotation_group(columns) for columns in (512, 192, 48, 40)] == [256, 64, 16, 0]


def test_a_rotated_weight_decodes_alike_under_autocast() -> None:
    codec = Int8(rotation=16)
    parts = codec.encode(normal(8, 32))
    expected = codec.decode(parts, (8, 32), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(codec.decode(parts, (8, 32), torch.float32), expected)


def test_a_tracers_tensors_are_not_kept() -> None:
    with FakeTensorMode():
        assert type(signs(1024, torch.device("cpu"))) is not Tensor
    assert type(signs(1024, torch.device("cpu"))) is Tensor
    assert signs(1024, torch.device("cpu")) is signs(1024, torch.device("cpu"))


def test_what_one_layout_writes_the_other_does_not_read() -> None:
    """Both layouts have these very shapes here, so nothing but the codec's name tells them apart."""
    weight = normal(128, 64)
    assert COMFY.parts((128, 64)) == LINEAR.parts((128, 64))
    parts = COMFY.encode(weight)
    assert relative_l2(LINEAR.decode(parts, (128, 64), torch.float32), weight) > 1


@settings(max_examples=40, deadline=None)
@given(cases())
def test_parts_are_predicted_from_the_shape(case: tuple[Codec, Tensor]) -> None:
    codec, weight = case
    predicted = {key: (part.dtype, part.shape) for key, part in codec.parts(tuple(weight.shape)).items()}
    assert next(iter(predicted)) == CODES
    for given_weight in (weight, weight.to("meta")):
        parts = codec.encode(given_weight)
        assert {key: (part.dtype, tuple(part.shape)) for key, part in parts.items()} == predicted
        assert all(part.is_contiguous() and part.device == given_weight.device for part in parts.values())


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_chosen_rows_are_the_same_weights(case: tuple[Codec, Tensor], data: st.DataObject) -> None:
    codec, weight = case
    if isinstance(codec, Int8) and codec.axis:
        return
    count, columns = weight.shape
    rows = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=150)))
    parts = codec.encode(weight)
    chosen = codec.select_rows(parts, rows)
    shape = (len(rows), columns)
    assert {key: (part.dtype, tuple(part.shape)) for key, part in chosen.items()} == {
        key: (part.dtype, part.shape) for key, part in codec.parts(shape).items()
    }
    assert torch.equal(
        codec.decode(chosen, shape, torch.float32), codec.decode(parts, (count, columns), torch.float32)[rows]
    )


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_rows_apart_and_joined_again_are_the_same_parts(case: tuple[Codec, Tensor], data: st.DataObject) -> None:
    codec, weight = case
    if isinstance(codec, Int8) and codec.axis:
        return
    count = weight.shape[0]
    parts = codec.encode(weight)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    several = [
        (codec.select_rows(parts, torch.arange(first, last)), last - first) for first, last in itertools.pairwise(cuts)
    ]
    joined = codec.join_rows(several)
    assert joined.keys() == parts.keys()
    assert all((bytes_of(joined[key]) == bytes_of(part)).all() for key, part in parts.items())


@pytest.mark.parametrize("shape", [(128, 64), (100, 96), (33, 16)], ids=str)
def test_the_linear_layout_in_the_other(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    parts = LINEAR.encode(weight)
    moved = LINEAR.in_comfy_layout(parts, shape[0])
    assert {key: (part.dtype, tuple(part.shape)) for key, part in moved.items()} == {
        key: (part.dtype, part.shape) for key, part in COMFY.parts(shape).items()
    }
    assert torch.equal(COMFY.decode(moved, shape, torch.float32), LINEAR.decode(parts, shape, torch.float32))
    again = COMFY.in_comfy_layout(moved, shape[0])
    assert all(again[key] is part for key, part in moved.items())


@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_zeros_stay_zeros(codec: Codec) -> None:
    for weight in (torch.zeros(40, 256), torch.cat([normal(8, 256), torch.zeros(32, 256)])):
        decoded = codec.decode(codec.encode(weight), (40, 256), torch.float32)
        assert torch.equal(decoded[8:], torch.zeros(32, 256))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_extreme_magnitudes_stay_finite(codec: Codec, magnitude: float) -> None:
    if isinstance(codec, Int8) and codec.rotation and magnitude > 1e37:
        pytest.skip("sums of 16 such values are beyond float32")
    weight = normal(16, 256).clamp(-1, 1) * magnitude
    decoded = codec.decode(codec.encode(weight), (16, 256), torch.float32)
    assert torch.isfinite(decoded).all()
    assert (decoded - weight).abs().max() <= magnitude * 0.3 + 1e-37


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_values_that_are_not_finite_are_refused(codec: Codec, bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = normal(32, 256).to(dtype)
        weight[5, 100] = bad
        with pytest.raises(QuantisationError, match="not finite"):
            codec.encode(weight)


@pytest.mark.parametrize("codec", CODECS, ids=name)
def test_a_codec_is_known_by_its_name(codec: Codec) -> None:
    assert codec_named(codec.name) == codec


@pytest.mark.parametrize(
    "wrong",
    ["int8", "int8/none", "int8/row/convrot", "int8/tensor@1", "int8/row/convrot16@1", "nvfp4", "nvfp4/x", "mxfp8/row"],
)
def test_an_unknown_codec_name_is_refused(wrong: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"the codec name '{wrong}'"):
        codec_named(wrong)


@pytest.mark.parametrize(
    ("codec", "shape", "reason"),
    [
        (MX, (4, 4, 4), "not a matrix with elements"),
        (COMFY, (4, 4, 4), "not a matrix with elements"),
        (COMFY, (0, 16), "not a matrix with elements"),
        (LINEAR, (4, 24), r"blocks of 16 columns don't divide it, and the linear layout has no padding"),
        (Int8(rotation=64), (4, 96), "groups of 64 rotated columns don't divide it"),
        (Int8(rotation=16), (4, 16, 3), "groups of 16 rotated columns don't divide it"),
        (Int8(), (4,), "not a matrix with elements"),
    ],
    ids=name,
)
def test_a_shape_that_does_not_fit_has_a_reason(codec: Codec, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(QuantisationError, match=reason + r"(.|\n)*keep this weight in the compute dtype"):
        codec.encode(torch.zeros(shape))


@pytest.mark.parametrize("rotation", [2, 8, 100, -4])
def test_a_rotation_that_is_no_power_of_4_is_refused(rotation: int) -> None:
    with pytest.raises(QuantisationError, match=rf"groups of {rotation} rotated columns(.|\n)*4, 16, 64, 256"):
        Int8(rotation=rotation)


@pytest.fixture(scope="module")
def kitchen() -> ModuleType:
    return pytest.importorskip("comfy_kitchen.backends.eager")


@pytest.mark.parametrize("shape", [(128, 64), (100, 90), (33, 48), (192, 512)], ids=str)
def test_mxfp8_is_comfy_kitchens(kitchen: ModuleType, shape: tuple[int, int]) -> None:
    weight = normal(*shape) * torch.logspace(-3, 3, shape[0])[:, None]
    parts = MX.encode(weight)
    codes, scale = kitchen.quantize_mxfp8(weight, pad_32x=True)
    assert np.array_equal(bytes_of(parts[CODES]), bytes_of(codes))
    assert np.array_equal(bytes_of(parts[SCALE]), bytes_of(scale))
    theirs = kitchen.dequantize_mxfp8(codes, scale, torch.float32)[: shape[0], : shape[1]]
    print(f"mxfp8 {list(shape)}: relative L2 {relative_l2(MX.decode(parts, shape, torch.float32), theirs):.1e}")
    assert torch.equal(MX.decode(parts, shape, torch.float32), theirs)


@pytest.mark.parametrize("shape", [(128, 64), (100, 90), (33, 48), (192, 512)], ids=str)
def test_nvfp4_is_comfy_kitchens(kitchen: ModuleType, shape: tuple[int, int]) -> None:
    weight = normal(*shape) * torch.logspace(-1, 1, shape[0])[:, None]
    parts = COMFY.encode(weight)
    assert float(parts[SCALE_2]) == pytest.approx(float(weight.abs().amax()) / (448 * 6))
    codes, scale = kitchen.quantize_nvfp4(weight, parts[SCALE_2], pad_16x=True)
    assert np.array_equal(bytes_of(parts[SCALE]), bytes_of(scale))
    assert np.array_equal(bytes_of(parts[CODES]), bytes_of(codes))
    theirs = kitchen.dequantize_nvfp4(codes, parts[SCALE_2], scale, torch.float32)[: shape[0], : shape[1]]
    difference = relative_l2(COMFY.decode(parts, shape, torch.float32), theirs)
    print(f"nvfp4 {list(shape)}: relative L2 {difference:.1e}")
    assert difference < 1e-6


def test_ties_of_nvfp4_go_to_the_even_code(kitchen: ModuleType) -> None:
    values = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    )
    steps = torch.stack([torch.nextafter(values, torch.tensor(side)) for side in (-9.0, 0.0, 9.0)]).clamp(-6, 6)
    weight = torch.cat([values[None], steps]) * 448
    weight[:, 15] = -6 * 448
    parts = COMFY.encode(weight)
    assert float(parts[SCALE_2]) == 1
    decoded = COMFY.decode(parts, tuple(weight.shape), torch.float32) / 448
    assert decoded[0].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]
    codes, _ = kitchen.quantize_nvfp4(weight, parts[SCALE_2], pad_16x=True)
    theirs = kitchen.dequantize_nvfp4(codes, parts[SCALE_2], parts[SCALE], torch.float32)[:4] / 448
    assert torch.equal(decoded, theirs)


@pytest.mark.parametrize("group", [16, 64, 256])
def test_int8_with_and_without_rotation_is_comfy_kitchens(kitchen: ModuleType, group: int) -> None:
    weight = normal(48, 512) * torch.logspace(-2, 2, 48)[:, None]
    theirs, scale = kitchen.quantize_int8_convrot_weight(weight, group)
    codec = Int8(rotation=group)
    parts = codec.encode(weight)
    assert relative_l2(parts[SCALE], scale[:, 0]) < 1e-6
    assert (parts[CODES].int() - theirs.int()).abs().max() <= 1
    assert (parts[CODES] != theirs).float().mean() < 0.01
    taken = {CODES: theirs, SCALE: scale[:, 0]}
    expected = kitchen.dequantize_int8_convrot_weight(theirs, scale, group)
    difference = relative_l2(codec.decode(taken, (48, 512), torch.float32), expected)
    print(f"int8 rotated in groups of {group}: relative L2 {difference:.1e}")
    assert difference < 1e-6
    theirs, scale = kitchen.quantize_int8_rowwise(weight)
    parts = Int8().encode(weight)
    assert torch.equal(parts[SCALE], scale[:, 0])
    assert torch.equal(parts[CODES], theirs)


@gpu
@cuda_only
@pytest.mark.parametrize("codec", CODECS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_decodes_and_encodes_like_the_cpu(codec: Codec, dtype: torch.dtype) -> None:
    weight = normal(160, 512).to(dtype)
    here, there = codec.encode(weight), codec.encode(weight.cuda())
    rotated = isinstance(codec, Int8) and codec.rotation
    for key, part in here.items():
        assert there[key].is_cuda
        if rotated and key == SCALE:
            assert relative_l2(there[key], part) < 1e-5
        else:
            same = bytes_of(there[key]) == bytes_of(part)
            assert same.mean() > 0.98 if rotated else same.all()
    moved = {key: part.cuda() for key, part in here.items()}
    precision = torch.get_float32_matmul_precision()
    for allowed in ("highest", "high"):
        torch.set_float32_matmul_precision(allowed)
        for result in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(codec.decode(moved, (160, 512), result).cpu(), codec.decode(here, (160, 512), result))
    torch.set_float32_matmul_precision(precision)
