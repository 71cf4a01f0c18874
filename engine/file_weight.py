"""One weight of the file, ready to be read by rows: as values, or as the parts of its codec."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from slipcast.engine.codecs.base import CODES, Codec, Part
from slipcast.engine.computed_rows import row_order
from slipcast.engine.file_codec import matrix_shape, part_tensors
from slipcast.engine.reader import Reader, torch_dtype
from slipcast.engine.seen_values import SeenValues, hold_no_number
from slipcast.registry.errors import QuantisationError
from slipcast.registry.header import Shape, TensorInfo
from slipcast.registry.keymap.link import Operation
from slipcast.registry.quantisation import Bundle


@dataclass(frozen=True, slots=True)
class FileWeight:
    """A weight of the file.

    Attributes:
        bundle: its tensors.
        codec: the codec that it is in, or None where its values lie there.
        shape: its logical shape, without padding.
        reader: what reads the file.
        device: where values and parts are wanted.
        notes: takes down what a user should know of the values; None where nobody asks.
        codes_stay: whether codes stay in the mapped file, so that nobody may look at them.
    """

    bundle: Bundle
    codec: Codec | None
    shape: Shape
    reader: Reader
    device: torch.device
    notes: SeenValues | None = None
    codes_stay: bool = False

    @property
    def rows(self) -> int:
        """Rows of the weight; of one without axes one."""
        return self.shape[0] if self.shape else 1

    def values(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight, ``[stop - start, ...]``: in the file's dtype, or dequantised and cast to ``dtype``."""
        shape = (stop - start, *self.shape[1:])
        if self.codec is None:
            width = prod(self.shape[1:])
            return self.reader.elements(self.bundle.weight, start * width, stop * width).to(self.device).view(shape)
        if stop - start < self.rows and not self.codec.takes_rows(matrix_shape(self.shape)):
            return self.values(0, self.rows, dtype)[start:stop]
        return self.codec.decode(self.parts(start, stop), matrix_shape(shape), dtype).view(shape)

    def parts(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """The codec's parts for some rows: views of a mapped file wherever nothing has to be changed."""
        assert self.codec is not None
        matrix = matrix_shape(self.shape)
        tile = self.codec.tile_rows(matrix)
        cuts = start % tile == 0 and (stop % tile == 0 or stop == self.rows)
        found = self._parts(start, stop) if cuts else self._parts(0, self.rows)
        return found if cuts else self.codec.select_rows(found, torch.arange(start, stop, device=self.device))

    def selected(self, ranges: list[tuple[int, int]], operation: Operation | None = None) -> dict[str, torch.Tensor]:
        """The parts of the weight that consists of several ranges of rows, in this order.

        Args:
            ranges: first and one past the last row of each.
            operation: what these rows are of the wanted ones, which may be in another order.
        """
        assert self.codec is not None
        order = row_order(operation, sum(last - first for first, last in ranges), self.device)
        if order is None and len(ranges) == 1:
            return self.parts(*ranges[0])
        rows = torch.cat([torch.arange(*each, device=self.device) for each in ranges])
        rows = rows if order is None else rows[order]
        return self.codec.select_rows(self._parts(0, self.rows), rows)

    def _parts(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Parts that are cut out of the file's tensors.

        The codes come last, since a reader's buffer holds one tensor at a time.

        Raises:
            QuantisationError: scales that can't be.
        """
        assert self.codec is not None
        whole = self.codec.parts(matrix_shape(self.shape))
        tensors = part_tensors(self.bundle, self.codec)
        last = stop == self.rows
        found: dict[str, torch.Tensor] = {}
        for name in sorted(whole, key=lambda name: name == CODES):
            part = self._part(tensors[name], whole[name], start, None if last else stop)
            self._look_at(name, tensors[name], part, (stop - start, *matrix_shape(self.shape)[1:]))
            part = part.to(self.device)
            outlasts = name == CODES or self.reader.lasting or self.device.type != "cpu"
            found[name] = part if outlasts else part.clone()
        return {name: found[name] for name in whole}

    def _part(self, tensor: TensorInfo, part: Part, start: int, stop: int | None) -> torch.Tensor:
        """Rows of one part in the codec's dtype, a scalar whole, on the CPU, until the next read."""
        rows = part.shape[0] if part.shape else 1
        start, stop = (start, rows if stop is None else stop) if part.shape else (0, 1)
        width = prod(part.shape[1:])
        values = self.reader.elements(tensor, start * width, stop * width)
        same = torch_dtype(tensor).itemsize == part.dtype.itemsize
        values = values.view(part.dtype) if same else values.to(part.dtype)
        return values.view((stop - start, *part.shape[1:]) if part.shape else ())

    def _look_at(self, name: str, tensor: TensorInfo, part: torch.Tensor, shape: Shape) -> None:
        """Refuse scales that can't be, and take note of codes that are no numbers.

        While they are in the processor's caches this takes a hundredth of the time that decoding them does.
        """
        assert self.codec is not None
        if name == CODES:
            if self.notes is None or self.codes_stay:
                return
            condition = hold_no_number(part[: shape[0], ..., : shape[-1]])
            if condition is not None:
                self.notes.add_where(condition, f"{self.bundle.name} {_NO_NUMBERS}")
            return
        if self.notes is not None and part.ndim == 0 and not part:
            self.notes.add(f"{self.bundle.name} {_ALL_ZEROS}")
        odd = self.codec.odd_scales(name, part, shape)
        if odd:
            raise QuantisationError(
                f"{odd} scales of {self.bundle.name} that are not finite, negative or beyond all measure, in the "
                f"tensor {tensor.name}",
                expected="scales that are finite and not negative, since each multiplies many codes",
                hint="the file is damaged, or its producer failed on this layer: get another copy or another version",
                path=self.reader.path_of(tensor),
                items=[f"{tensor.name} {tensor.dtype} {list(tensor.shape)}"],
            )


_NO_NUMBERS = "holds codes that mean NaN or infinity: the file is damaged, and so are the model's outputs"
_ALL_ZEROS = "has a scale of 0, so that it is all zeros whatever its codes: the file may be damaged"
