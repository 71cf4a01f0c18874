"""The tensor types of GGUF files: how many elements make a block, and how many bytes it takes.

Source: the GGUF specification and the sizes in the gguf package 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from slipcast.registry.header import Shape


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type.

    Attributes:
        name: ggml's name; of plain types that of safetensors, which is the same for all that occur.
        elements: elements of one block.
        nbytes: bytes of one block.
    """

    name: str
    elements: int
    nbytes: int

    @property
    def plain(self) -> bool:
        """Whether the elements are the values themselves."""
        return self.elements == 1

    def size(self, shape: Shape) -> int | None:
        """Bytes of a tensor of this logical shape; None where blocks don't divide its rows."""
        if shape and shape[-1] % self.elements:
            return None
        return prod(shape) // self.elements * self.nbytes


_TYPES = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {number: BlockType(name, elements, nbytes) for number, name, elements, nbytes in _TYPES}
)
"""By the number that stands in a file."""

BLOCK_TYPES_BY_NAME: Mapping[str, BlockType] = MappingProxyType({kind.name: kind for kind in BLOCK_TYPES.values()})
"""By name."""


def is_block_quantised(dtype: str) -> bool:
    """Whether a tensor's dtype is one of ggml's quantised types."""
    kind = BLOCK_TYPES_BY_NAME.get(dtype)
    return kind is not None and not kind.plain
