"""GGUF's block formats: scales lie among the codes, in blocks of 32 or 256 elements. They can only be read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from slipcast.engine.codecs.base import CODES, Codec, Part, Parts, Shape
from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES, BlockType
from slipcast.registry.errors import UnsupportedFormatError

_CHUNK = 1 << 22


@dataclass(frozen=True)
class GGUF(Codec):
    """A GGUF tensor as its bytes, uint8 ``[N, bytes of a row]``; ``[1, bytes]`` where blocks run across rows.

    Attributes:
        type: GGUF's name of the tensor type, for example ``Q4_K``.
    """

    type: str

    def __post_init__(self) -> None:
        if self.type not in BLOCK_TYPES:
            raise UnsupportedFormatError(
                f"a GGUF tensor of type {self.type}",
                expected="one of " + " ".join(BLOCK_TYPES),
                hint="use a file in one of these types",
            )

    @property
    def name(self) -> str:
        """As in ``gguf/Q4_K``."""
        return f"gguf/{self.type}"

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """The GGUF codec that has the name, or None."""
        prefix, _, kind = name.partition("/")
        return cls(kind) if prefix == "gguf" and kind in BLOCK_TYPES else None

    @property
    def encodes(self) -> bool:
        """Never."""
        return False

    def obstacle(self, shape: Shape) -> str | None:
        """Blocks need their number of elements, in any number of dimensions."""
        if prod(shape) == 0 or prod(shape) % self._block.elements:
            return f"blocks of {self._block.elements} elements don't divide it"
        return None

    def _parts(self, shape: Shape) -> dict[str, Part]:
        nbytes = prod(shape) // self._block.elements * self._block.nbytes
        whole_rows = len(shape) > 1 and prod(shape[1:]) % self._block.elements == 0
        rows = shape[0] if whole_rows else 1
        return {CODES: Part(torch.uint8, (rows, nbytes // rows))}

    def tile_rows(self, shape: Shape) -> int:
        """Any row, unless blocks run across rows."""
        return 1 if self.takes_rows(shape) else shape[0]

    def takes_rows(self, shape: Shape) -> bool:
        """Unless blocks run across rows."""
        return self._parts(shape)[CODES].shape[0] == shape[0]

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The blocks' elements, computed in float32 some millions at a time, cast once."""
        blocks = parts[CODES].reshape(-1, self._block.nbytes)
        out = torch.empty((blocks.shape[0], self._block.elements), dtype=dtype, device=blocks.device)
        step = _CHUNK // self._block.elements
        for first in range(0, blocks.shape[0], step):
            rows = slice(first, first + step)
            out[rows] = self._block.decode(blocks[rows])
        return out.view(shape)

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """Rows of the bytes, where blocks don't run across rows."""
        return {CODES: parts[CODES].index_select(0, rows)}

    @property
    def _block(self) -> BlockType:
        return BLOCK_TYPES[self.type]
