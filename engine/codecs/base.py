"""What a codec is: the way from a float weight to the parts that store it, and back.

A part is one tensor of a quantised weight: ``codes`` always, ``scale`` where the format has one, further parts where it
has more. Shapes and dtypes of all parts follow from the weight's logical shape alone, so bytes can be predicted before
anything is read. Codes are only ever decoded together with their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from slipcast.registry.errors import QuantisationError

CODES = "codes"
SCALE = "scale"

Parts = Mapping[str, Tensor]
Shape = tuple[int, ...]

LARGEST_SCALE = 2.0**116
"""Under a larger scale a weight's values may be infinite in float32: no format's largest code is beyond 2**12."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Part:
    """Dtype and shape of one part."""

    dtype: torch.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes in memory."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor for the part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Codec(ABC):
    """One way to store a weight. Codecs are frozen values: equal names, equal codecs."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The format and all its parameters in one word, as plans, reports and ``codec_named`` spell it."""

    @property
    def encodes(self) -> bool:
        """Whether weights can be written in this format, not only read."""
        return True

    @property
    def streams(self) -> bool:
        """Whether a weight can be encoded a few rows at a time (``encode_rows_into``)."""
        return False

    def defers(self, device: torch.device) -> bool:  # noqa: ARG002 - most do nowhere
        """Whether rows are encoded on a device without scratch, and without waiting for a look at their values.

        Then ``encode_rows_into`` raises nothing, and ``refuse_not_finite`` has to be asked in the end.
        """
        return False

    @property
    def multiplies(self) -> bool:
        """Whether decoding and encoding multiply matrices, for which CUDA keeps a workspace in each thread."""
        return False

    @property
    def embeds(self) -> bool:
        """Whether an embedding can be stored so: rows are chosen and decoded by themselves without much ado."""
        return False

    @classmethod
    @abstractmethod
    def from_name(cls, name: str) -> Self | None:
        """The codec of this class that has the name, or None."""

    @abstractmethod
    def obstacle(self, shape: Shape) -> str | None:
        """Why a weight of this logical shape can't be stored by this codec, as a clause; None where it can."""

    @abstractmethod
    def _parts(self, shape: Shape) -> dict[str, Part]:
        """``parts`` for a shape without an obstacle."""

    @abstractmethod
    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The weight that the parts hold: dequantised with the scales in float32, then cast once.

        Args:
            parts: tensors as ``parts(shape)`` describes them, on one device.
            shape: the weight's logical shape.
            dtype: dtype of the result.
        """

    def _encode(self, weight: Tensor) -> dict[str, Tensor]:
        """``encode`` for a float weight that is there and has a shape without an obstacle."""
        raise NotImplementedError(self.name)

    def encode_rows_into(self, rows: Tensor, out: Parts, scratch: Tensor) -> None:
        """Encode some rows of a weight into the same rows of its parts; only of a codec that ``streams``.

        Allocates nothing that grows with the rows. A million elements at a time suit a processor's caches.

        Args:
            rows: float ``[n, ...]``, contiguous.
            out: the parts' own rows, ``part[first:last]`` each; written.
            scratch: float32, one-dimensional, at least ``rows.numel()`` elements, on the same device; overwritten.
                Where the codec ``defers`` none is needed.

        Raises:
            QuantisationError: values that are not finite, but where the codec ``defers``.
        """
        raise NotImplementedError(self.name)

    def refuse_not_finite(self, parts: Parts) -> None:
        """Look at the parts that a codec which ``defers`` has encoded.

        Raises:
            QuantisationError: values that were not finite.
        """
        raise NotImplementedError(self.name)

    def select_rows(self, parts: Parts, rows: Tensor) -> dict[str, Tensor]:
        """The parts of the weight that consists of the given rows (int64 ``[n]``) of this one: no value changes.

        Only where ``takes_rows``. Of formats that pad rows, rows beyond the logical shape can't be chosen.
        """
        raise NotImplementedError(self.name)

    def takes_rows(self, shape: Shape) -> bool:  # noqa: ARG002 - of most formats they can
        """Whether rows can be taken out of the parts of a weight of this shape without decoding it."""
        return True

    def join_rows(self, several: Sequence[tuple[Parts, int]]) -> dict[str, Tensor]:
        """The parts of the weight whose rows are those of several weights, one after another: no value changes.

        Only where outputs lie on axis 0. A scale of a whole weight must be the same in all.

        Args:
            several: the parts of each weight, and how many rows it has.
        """
        raise NotImplementedError(self.name)

    def odd_scales(self, name: str, part: Tensor, shape: Shape) -> int:  # noqa: ARG002 - for those that pad scales
        """How many scales in a part can't be: not finite, negative, or so large that values are infinite.

        Zero can be: it is the scale of zeros. Padding does not count, nobody reads it.

        Args:
            name: of the part; not the codes.
            part: its tensor, for the rows of a weight.
            shape: the logical shape of these rows.
        """
        return count_odd(part)

    def tile_rows(self, shape: Shape) -> int:  # noqa: ARG002 - most formats are cut anywhere
        """Parts can be cut between rows that are a multiple of this many, each part at the same rows.

        All rows of the shape where they can't be cut at all. ``select_rows`` takes rows out anywhere.
        """
        return 1

    def for_axis(self, axis: int) -> Codec:  # noqa: ARG002 - most formats hold matrices alone
        """This codec for weights whose outputs lie on the given axis: 1 for transposed convolutions, else 0."""
        return self

    def parts(self, shape: Shape) -> dict[str, Part]:
        """The parts of a weight of this logical shape, the codes first.

        Raises:
            QuantisationError: the codec can't store such a weight (see ``obstacle``).
        """
        obstacle = self.obstacle(shape)
        if obstacle is not None:
            raise QuantisationError(
                f"a weight of shape {list(shape)} for {self.name}: {obstacle}",
                expected="a weight that the format can hold",
                hint="keep this weight in the compute dtype, or choose another format for it",
            )
        return self._parts(shape)

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts that store a weight, on the weight's device; those of a weight on the meta device are empty.

        Raises:
            QuantisationError: the weight is in no plain float dtype, holds values that are not finite or has a shape
                that the codec can't store, or the format can only be read.
        """
        parts = self.parts(tuple(weight.shape))
        if not self.encodes:
            raise QuantisationError(
                f"a weight to be written as {self.name}",
                expected="a format that slipcast writes",
                hint=f"{self.name} can only be read; choose another format, or keep the weight in a float dtype",
            )
        if not is_plain_float(weight.dtype):
            raise QuantisationError(
                f"a weight in {weight.dtype} to be written as {self.name}",
                expected="a weight in float64, float32, float16 or bfloat16",
                hint="decode the weight with its own scale first; codes are never cast without their scale",
            )
        if weight.is_meta:
            return {name: part.empty("meta") for name, part in parts.items()}
        with torch.no_grad():
            return self._encode(weight.detach())


def count_odd(scale: Tensor) -> int:
    """Number of scales, in a float dtype of at least 16 bits, that can't be (see ``Codec.odd_scales``)."""
    least, most = scale.aminmax()  # NaN if one is
    if bool(least >= 0) and bool(most < LARGEST_SCALE):
        return 0
    return int((~((scale >= 0) & (scale < LARGEST_SCALE))).sum())


def is_plain_float(dtype: torch.dtype) -> bool:
    """Whether a dtype holds values rather than codes: any floating dtype of more than 8 bits."""
    return dtype.is_floating_point and dtype.itemsize > 1


def bits(tensor: Tensor) -> Tensor:
    """A view of the tensor's bits as integers of the same size, which casts of floats leave alone."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])
