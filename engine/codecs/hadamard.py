"""The rotation that ConvRot applies to groups of columns before they are quantised.

The matrix is the Kronecker power of a regular 4 x 4 Hadamard matrix, divided by the root of its size: symmetric and its
own inverse. Outliers of a column are spread over their group, so that one scale fits all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipcast.engine.codecs.constants import kept

GROUPS = (256, 64, 16)
_REGULAR = ((1.0, 1.0, 1.0, -1.0), (1.0, 1.0, -1.0, 1.0), (1.0, -1.0, 1.0, 1.0), (-1.0, 1.0, 1.0, 1.0))


def rotation_group(columns: int) -> int:
    """The largest group of 256, 64 and 16 columns that divides so many, or 0 where none does."""
    return next((group for group in GROUPS if columns % group == 0), 0)


@kept
def signs(group: int, device: torch.device) -> Tensor:
    """The matrix for groups of 4, 16, 64, ... columns times the root of its size: entries 1 and -1, float32."""
    four = torch.tensor(_REGULAR, device=device)
    matrix = four
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, four)
    return matrix


def rotated_signs(rows: Tensor, group: int) -> Tensor:
    """Each group of columns of a float32 matrix times ``signs``: the rotation but for the division by ``sqrt(group)``.

    Of integers below 2**8 the result is exact, also where a GPU rounds the factors of float32 products to 11 bits; but
    not in bfloat16, to which autocast would switch.
    """
    with torch.autocast(rows.device.type, enabled=False):
        return (rows.reshape(rows.shape[0], -1, group) @ signs(group, rows.device)).flatten(1)
