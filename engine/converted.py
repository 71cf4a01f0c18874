"""The tensors of a written checkpoint, before any is read: names, dtypes, shapes, and whose values they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from slipcast.engine.plan import Target
from slipcast.registry.claims import Layout
from slipcast.registry.dtypes import item_bits
from slipcast.registry.header import Shape, TensorInfo

Rows = tuple[int, int]
Origin = tuple[int, int]
"""File and byte of the input."""


@dataclass(frozen=True, slots=True)
class Extract:
    """Values of one tensor of the input, row-major.

    Attributes:
        tensor: the tensor.
        rows: first and one past the last row; None for all of it.
        transposed: whether the matrix's axes are exchanged; only of a whole one.
    """

    tensor: TensorInfo
    rows: Rows | None = None
    transposed: bool = False

    @property
    def elements(self) -> Rows:
        """First and one past the last element."""
        if self.rows is None:
            return 0, self.tensor.elements
        width = prod(self.tensor.shape[1:])
        return self.rows[0] * width, self.rows[1] * width


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor of the output. Its values are extracts, or a part of a weight that is computed, or given bytes.

    Attributes:
        name: its name in the file.
        dtype: as the container spells it.
        shape: its shape.
        extracts: whose values it holds as they are, one after another.
        made: how the weight comes to be that it is a part of.
        part: which part of it; "" for the values of one without codes.
        data: its bytes, of a marker.
        origin: where in the input its values begin.
    """

    name: str
    dtype: str
    shape: Shape
    extracts: tuple[Extract, ...] = ()
    made: Target | None = None
    part: str = ""
    data: bytes = b""
    origin: Origin = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * item_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint in another naming or format, before anything of it is read.

    Attributes:
        layout: whose names the output bears.
        prefix: what stands before each of them.
        tensors: every tensor of the output, in the order in which they lie in the file.
        left_out: tensors of the input that the output lacks, with the reason.
        altered: what comes back otherwise, or is not quite what was asked for, as sentences.
        metadata: strings to put beside the tensors.
        formats: number of the output's weights in each format.
        codecs: name of each weight of the output that is in codes, without the prefix -> its codec's name.
        folded: weights of the output that lost their codes without having been asked to, with the reason.
        full_precision: weights of the output in codes that the producer marks for products in full precision.
        stayed: weights of layers that are not in the format of codes that was asked for, with the reason.
    """

    layout: Layout
    prefix: str
    tensors: tuple[ConvertedTensor, ...]
    left_out: Mapping[str, str]
    altered: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, int] = field(default_factory=dict)
    codecs: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)
    full_precision: frozenset[str] = frozenset()
    stayed: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(tensor.nbytes for tensor in self.tensors)


def origin_of(tensor: TensorInfo, rows: Rows | None = None) -> Origin:
    """Where the values of some rows of a tensor begin."""
    return tensor.file, tensor.start + Extract(tensor, rows).elements[0] * tensor.nbytes // max(tensor.elements, 1)
