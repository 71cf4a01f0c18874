"""GGUF's block formats, against the ``gguf`` package."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from slipcast.engine.codecs.base import CODES
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES
from slipcast.registry.errors import QuantisationError, UnsupportedFormatError
from support.gguf_blocks import random_blocks
from support.number_formats import relative_l2

NAMES = ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
NAMES += ["Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"]
WRITABLE = ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
"""Types that the package can write as well."""


@pytest.fixture(scope="module")
def gguf() -> ModuleType:
    return pytest.importorskip("gguf")


def test_all_types_are_there() -> None:
    assert sorted(BLOCK_TYPES) == sorted(NAMES)


@pytest.mark.parametrize("kind", NAMES)
def test_blocks_decode_as_the_gguf_package_decodes_them(gguf: ModuleType, kind: str) -> None:
    block = BLOCK_TYPES[kind]
    theirs = gguf.GGMLQuantizationType[kind]
    assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[theirs]
    raw = random_blocks(kind, 100)
    expected = torch.from_numpy(np.array(gguf.dequantize(raw, theirs))).reshape(10, -1)
    shape = tuple(expected.shape)
    codec = GGUF(kind)
    parts = {CODES: torch.from_numpy(raw).reshape(codec.parts(shape)[CODES].shape)}
    decoded = codec.decode(parts, shape, torch.float32)
    assert relative_l2(decoded, expected) < 1e-7
    assert (decoded - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert len(decoded.unique()) > 15
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(codec.decode(parts, shape, dtype), decoded.to(dtype))


@pytest.mark.parametrize("kind", WRITABLE)
def test_what_the_gguf_package_wrote_comes_back(gguf: ModuleType, kind: str) -> None:
    weight = np.random.default_rng(0).normal(0, 0.02, (12, 64)).astype(np.float32)
    raw = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    codec = GGUF(kind)
    codes = torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8))
    assert tuple(codes.shape) == codec.parts((12, 64))[CODES].shape
    assert relative_l2(codec.decode({CODES: codes}, (12, 64), torch.float32), torch.from_numpy(weight)) < 0.1


def test_a_weight_of_more_than_one_chunk_is_decoded_whole(gguf: ModuleType) -> None:
    raw = random_blocks("Q4_0", 140_000)
    expected = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)).reshape(1000, -1)
    decoded = GGUF("Q4_0").decode({CODES: torch.from_numpy(raw)}, tuple(expected.shape), torch.float32)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize(
    ("kind", "shape", "stored"),
    [
        ("Q8_0", (4, 64), (4, 68)),
        ("Q4_K", (2, 512), (2, 288)),
        ("Q8_0", (8, 16, 2, 2), (8, 68)),
        ("Q4_K", (64, 4, 3, 3), (1, 1296)),
        ("BF16", (3, 5), (3, 10)),
        ("F32", (7,), (1, 28)),
    ],
)
def test_bytes_are_predicted_from_the_shape(kind: str, shape: tuple[int, ...], stored: tuple[int, int]) -> None:
    (part,) = GGUF(kind).parts(shape).values()
    assert (part.dtype, part.shape) == (torch.uint8, stored)
    codes = part.empty("cpu").zero_()
    assert GGUF(kind).decode({CODES: codes}, shape, torch.bfloat16).shape == shape


def test_chosen_rows_are_the_same_weights() -> None:
    codec, codes = GGUF("Q5_K"), torch.from_numpy(random_blocks("Q5_K", 20)).view(10, -1)
    rows = torch.tensor([3, 3, 9, 0])
    whole = codec.decode({CODES: codes}, (10, 512), torch.float32)
    assert torch.equal(codec.decode(codec.select_rows({CODES: codes}, rows), (4, 512), torch.float32), whole[rows])


def test_what_can_not_be_done_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"type IQ2_XXS(.|\n)*Q4_K(.|\n)*use a file in one of these types"):
        GGUF("IQ2_XXS")
    with pytest.raises(QuantisationError, match="blocks of 256 elements don't divide it"):
        GGUF("Q6_K").parts((4, 40))
    with pytest.raises(QuantisationError, match=r"a weight to be written as gguf/Q8_0(.|\n)*can only be read"):
        GGUF("Q8_0").encode(torch.randn(4, 32))


@pytest.mark.parametrize("kind", NAMES)
def test_a_codec_is_known_by_its_name(kind: str) -> None:
    assert codec_named(f"gguf/{kind}") == GGUF(kind)
    with pytest.raises(UnsupportedFormatError):
        codec_named("gguf/IQ1_S")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", NAMES)
def test_a_gpu_decodes_like_the_cpu(kind: str) -> None:
    raw = torch.from_numpy(random_blocks(kind, 64))
    shape = (64, BLOCK_TYPES[kind].elements)
    for dtype in (torch.float32, torch.bfloat16):
        there = GGUF(kind).decode({CODES: raw.cuda()}, shape, dtype)
        assert relative_l2(there, GGUF(kind).decode({CODES: raw}, shape, dtype)) < 1e-6
