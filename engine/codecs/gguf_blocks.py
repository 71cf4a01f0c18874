"""The blocks of GGUF's tensor types, decoded in torch: bytes ``[n, bytes of a block]`` to float32 ``[n, elements]``.

Layouts are those of ggml. Sub-blocks of 16 or 32 elements have integer scales under the block's own float16 scale.
Where codes are spread over bytes, a run of bytes holds their low bits first: ``planes`` takes them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from slipcast.engine.codecs.constants import kept

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockType(NamedTuple):
    """A GGUF tensor type: elements and bytes of a block, and its decoder."""

    elements: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]


def planes(codes: Tensor, bits: int, width: int) -> Tensor:
    """Codes of a few bits out of bytes ``[n, m]``, as uint8 ``[n, m * 8 / bits]``.

    Each run of ``width`` bytes gives its lowest bits first, one code a byte, then the next bits of the same bytes.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).view(1, 1, -1, 1)
    runs = codes.reshape(codes.shape[0], -1, 1, width)
    codes = (runs >> shifts) & (2**bits - 1)
    return codes.flatten(1)


def _half(block: Tensor, first: int) -> Tensor:
    """The float16 at a byte of each block, as float32 ``[n, 1]``."""
    return block[:, first : first + 2].contiguous().view(torch.float16).to(torch.float32)


def _sub_blocks(codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """``codes * scale - offset``: codes ``[n, m]`` in s equal sub-blocks, scales and offsets ``[n, s]``."""
    values = codes.to(torch.float32).view(*scales.shape, -1)
    values *= scales.unsqueeze(-1)
    if offsets is not None:
        values -= offsets.unsqueeze(-1)
    return values.flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda block: block.contiguous().view(dtype).to(torch.float32)


def _q4_0(block: Tensor) -> Tensor:
    return _half(block, 0) * (planes(block[:, 2:], 4, 16).to(torch.float32) - 8)


def _q4_1(block: Tensor) -> Tensor:
    return _half(block, 0) * planes(block[:, 4:], 4, 16) + _half(block, 2)


def _fifth_bits(block: Tensor) -> Tensor:
    """32 bits out of 4 bytes, lowest first, worth 16 each."""
    return planes(block, 1, 1) << 4


def _q5_0(block: Tensor) -> Tensor:
    codes = planes(block[:, 6:], 4, 16) | _fifth_bits(block[:, 2:6])
    return _half(block, 0) * (codes.to(torch.float32) - 16)


def _q5_1(block: Tensor) -> Tensor:
    codes = planes(block[:, 8:], 4, 16) | _fifth_bits(block[:, 4:8])
    return _half(block, 0) * codes + _half(block, 2)


def _q8_0(block: Tensor) -> Tensor:
    return _half(block, 0) * block[:, 2:].contiguous().view(torch.int8)


def _q2_k(block: Tensor) -> Tensor:
    scales, codes = block[:, :16], planes(block[:, 16:80], 2, 32)
    return _sub_blocks(codes, _half(block, 80) * (scales & 15), _half(block, 82) * (scales >> 4))


def _q3_k(block: Tensor) -> Tensor:
    high, low = planes(block[:, :32], 1, 32), planes(block[:, 32:96], 2, 32)
    codes = (low | (high << 2)).to(torch.float32) - 4
    scales = planes(block[:, 96:104], 4, 8) | (planes(block[:, 104:108], 2, 4) << 4)
    return _sub_blocks(codes, _half(block, 108) * (scales.to(torch.float32) - 32))


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 offsets of 6 bits out of 12 bytes."""
    first, second, rest = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), dim=1)
    offsets = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), dim=1)
    return scales, offsets


def _with_offsets(block: Tensor, codes: Tensor) -> Tensor:
    scales, offsets = _scales_and_offsets(block[:, 4:16].contiguous())
    return _sub_blocks(codes, _half(block, 0) * scales, _half(block, 2) * offsets)


def _q4_k(block: Tensor) -> Tensor:
    return _with_offsets(block, planes(block[:, 16:], 4, 32))


def _q5_k(block: Tensor) -> Tensor:
    return _with_offsets(block, planes(block[:, 48:], 4, 32) | (planes(block[:, 16:48], 1, 32) << 4))


def _q6_k(block: Tensor) -> Tensor:
    codes = planes(block[:, :128], 4, 64) | (planes(block[:, 128:192], 2, 32) << 4)
    scales = block[:, 192:208].contiguous().view(torch.int8)
    return _sub_blocks(codes.to(torch.float32) - 32, _half(block, 208) * scales)


@kept
def _iq4_values(device: torch.device) -> Tensor:
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=device)


def _iq4(codes: Tensor) -> Tensor:
    return _iq4_values(codes.device)[codes.to(torch.int32)]


def _iq4_nl(block: Tensor) -> Tensor:
    return _half(block, 0) * _iq4(planes(block[:, 2:], 4, 16))


def _iq4_xs(block: Tensor) -> Tensor:
    scales = planes(block[:, 4:8], 4, 1) | (planes(block[:, 2:4], 2, 1) << 4)
    return _sub_blocks(_iq4(planes(block[:, 8:], 4, 16)), _half(block, 0) * (scales.to(torch.float32) - 32))


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "F32": BlockType(1, 4, _plain(torch.float32)),
        "F16": BlockType(1, 2, _plain(torch.float16)),
        "BF16": BlockType(1, 2, _plain(torch.bfloat16)),
        "Q4_0": BlockType(32, 18, _q4_0),
        "Q4_1": BlockType(32, 20, _q4_1),
        "Q5_0": BlockType(32, 22, _q5_0),
        "Q5_1": BlockType(32, 24, _q5_1),
        "Q8_0": BlockType(32, 34, _q8_0),
        "Q2_K": BlockType(256, 84, _q2_k),
        "Q3_K": BlockType(256, 110, _q3_k),
        "Q4_K": BlockType(256, 144, _q4_k),
        "Q5_K": BlockType(256, 176, _q5_k),
        "Q6_K": BlockType(256, 210, _q6_k),
        "IQ4_NL": BlockType(32, 18, _iq4_nl),
        "IQ4_XS": BlockType(256, 136, _iq4_xs),
    }
)
"""Tensor types that can be decoded, by GGUF's names."""
