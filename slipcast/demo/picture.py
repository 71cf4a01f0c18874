"""The demonstration's picture: one row of digits for each way of storing the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torch.nn import functional

_TILE, _GAP, _MARGIN = 108, 8, 28
_TITLE, _HEADING, _FOOT = 38, 22, 34
_TEXT = 18
_SMALL = 15
_CORNER = 10

_SHEET = "#f6f4ee"
_PAPER = "#fffdf8"
_INK = "#1d2b4f"
_WORDS = "#3a3a3a"
_FAINT = "#8b877c"


@dataclass(frozen=True)
class Row:
    """A row of the picture.

    Attributes:
        title: written above it.
        images: ``[n, 1, height, width]`` in [-1, 1]; -1 is the paper, 1 the pen.
    """

    title: str
    images: Tensor = field(repr=False)


Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""


def tile_box(row: int, column: int) -> Box:
    """Where an image of the picture lies, with a border of paper of one of its own pixels."""
    left = _MARGIN + column * (_TILE + _GAP)
    top = _MARGIN + _HEADING + row * (_TITLE + _TILE + _GAP) + _TITLE
    return left, top, left + _TILE, top + _TILE


def draw_picture(rows: Sequence[Row], labels: Sequence[str], foot: str) -> Image.Image:
    """Draw rows of equally many images below each other.

    Args:
        rows: from top to bottom.
        labels: one for each column, written above the first row.
        foot: a line below the last row.
    """
    _, _, right, bottom = tile_box(len(rows) - 1, len(labels) - 1)
    sheet = Image.new("RGB", (right + _MARGIN, bottom + _FOOT + _MARGIN), _SHEET)
    pen = ImageDraw.Draw(sheet)
    text, small = ImageFont.load_default(_TEXT), ImageFont.load_default(_SMALL)
    shape = Image.new("L", (_TILE, _TILE), 0)
    ImageDraw.Draw(shape).rounded_rectangle((0, 0, _TILE - 1, _TILE - 1), _CORNER, fill=255)
    for column, label in enumerate(labels):
        left, _, right, _ = tile_box(0, column)
        pen.text(((left + right) / 2, _MARGIN), label, _FAINT, small, anchor="mt")
    for number, row in enumerate(rows):
        left, top, _, _ = tile_box(number, 0)
        pen.text((left, top - _GAP), row.title, _WORDS, text, anchor="ls")
        for column, image in enumerate(row.images):
            sheet.paste(_enlarged(image[0]), tile_box(number, column), shape)
    pen.text((_MARGIN, bottom + _FOOT), foot, _FAINT, small, anchor="ls")
    return sheet


def _enlarged(image: Tensor) -> Image.Image:
    """An image ``[height, width]`` in the colours of paper and ink, enlarged; its edges fade into the border."""
    image = functional.pad(image, (1, 1, 1, 1), value=-1.0)
    height, width = image.shape
    values = ((image + 1) * 127.5).round().clamp(0, 255).int().flatten().tolist()
    small = Image.frombytes("L", (width, height), bytes(values))
    large = small.resize((_TILE, _TILE), Image.Resampling.BICUBIC)
    return ImageOps.colorize(large, _PAPER, _INK)


def to_picture(picture: Tensor) -> Image.Image:
    """A picture ``[3, height, width]`` in [-1, 1], in its own colours and size."""
    _, height, width = picture.shape
    values = ((picture / 2 + 0.5) * 255).round().clamp(0, 255).int().permute(1, 2, 0)
    return Image.frombytes("RGB", (width, height), bytes(values.flatten().tolist()))
