"""What is to be drawn, held against what any pipeline could draw. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from slipcast.engine.policy.sizes import AskedSize
from slipcast.registry.errors import SettingsError
from slipcast.registry.validation import did_you_mean, shown

LARGEST_SEED = 2**63 - 1
MOST_STEPS = 10_000

_WHOLE = {
    "steps": (1, MOST_STEPS, "a whole number from 1 to 10,000"),
    "seed": (0, LARGEST_SEED, "a whole number from 0 to 2**63 - 1"),
    "frames": (1, None, "a whole number from 1 on"),
    "width": (None, None, "a whole number of pixels"),
    "height": (None, None, "a whole number of pixels"),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is to be drawn; what is None is left to the family's facts, then to the pipeline.

    Attributes:
        prompt: what is to be seen.
        negative_prompt: what is not to be seen.
        steps: number of denoising steps, from 1 to 10,000.
        guidance: strength of guidance, finite and not negative.
        seed: of the noise, from 0 to 2**63 - 1.
        width: in pixels, a multiple of the family's; one that is not positive counts as None.
        height: likewise. Where one of the two is None, it is the picture's to start from, or the pipeline's own.
        frames: number of frames of a video.
        image: a PIL picture to start from.
        strength: how far to go from it, above 0 and up to 1.

    Raises:
        SettingsError: a value is of another type or out of its range.
    """

    prompt: str
    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    image: Any = None
    strength: float | None = None

    def __post_init__(self) -> None:
        _refuse_other(self.prompt, "prompt", isinstance(self.prompt, str), "a text", "say what is to be seen")
        negative = self.negative_prompt
        _refuse_other(negative, "negative_prompt", negative is None or isinstance(negative, str), "a text or None")
        for name in _WHOLE:
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("width", "height"):
            if (pixels := getattr(self, name)) is not None and pixels <= 0:
                object.__setattr__(self, name, None)
        for name in ("guidance", "strength"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        _refuse_other(self.image, "image", self.image is None or _is_picture(self.image), "a PIL picture", _OPEN)
        if self.strength is not None and self.image is None:
            raise SettingsError(
                f"a strength of {self.strength} without a picture to start from",
                expected="a strength only beside a picture, from which it says how far to go",
                hint="leave it out, or give a picture to start from",
                field="strength",
            )

    @property
    def size(self) -> AskedSize:
        """What is asked for, of which a plan makes what is drawn."""
        picture = None if self.image is None else (self.image.width, self.image.height)
        return AskedSize(self.width, self.height, self.frames, picture)


_OPEN = "open the file with PIL.Image.open"


def make_request(**asked: Any) -> GenerationRequest:
    """A request of keywords.

    Raises:
        SettingsError: one of them is no field of a request, or its value can't be drawn.
    """
    known = [field.name for field in dataclasses.fields(GenerationRequest)]
    for name in asked:
        if name not in known:
            raise SettingsError(
                f"unknown field {name!r} of a generation",
                expected=f"one of {', '.join(known)}",
                hint=did_you_mean(name, known, "leave it out; settings belong to the load"),
                field=name,
            )
    return GenerationRequest(**asked)


def checked_size(size: Any) -> AskedSize:
    """The size that a pair of width and height in pixels gives; one that is not positive counts as not given.

    Raises:
        SettingsError: it is no pair of whole numbers.
    """
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise _wrong("size", size, "a pair of width and height in pixels, as (1024, 768)")
    width, height = (_whole(name, side) for name, side in zip(("width", "height"), size, strict=True))
    return AskedSize(width, height)


def with_default_size(request: GenerationRequest, size: AskedSize | None) -> GenerationRequest:
    """A request with the width and the height of a size where it has none itself, and no picture to start from.

    Args:
        request: what is to be drawn.
        size: what is drawn where nobody says otherwise; None: what the pipeline draws by itself.
    """
    if size is None or request.image is not None:
        return request
    width = request.width if request.width is not None else size.width
    height = request.height if request.height is not None else size.height
    return dataclasses.replace(request, width=width, height=height)


def refuse_no_multiple(name: str, pixels: int, multiple: int | None) -> None:
    """Refuse a width or height that the family can't draw.

    Raises:
        SettingsError: it is no multiple of the family's.
    """
    if multiple and pixels % multiple:
        below = max(pixels // multiple, 1) * multiple
        raise SettingsError(
            f"a {name} of {pixels} pixels",
            expected=f"a multiple of {multiple}",
            hint=f"give {below} or {below + multiple}",
            field=name,
        )


def refuse_no_multiples(size: AskedSize, multiple: int | None) -> None:
    """Refuse a size of which a side is given that the family can't draw.

    Raises:
        SettingsError: a side is no multiple of the family's.
    """
    for name, pixels in (("width", size.width), ("height", size.height)):
        if pixels is not None and pixels > 0:
            refuse_no_multiple(name, pixels, multiple)


def _whole(name: str, value: Any) -> int | None:
    least, most, expected = _WHOLE[name]
    if value is None and name != "seed":
        return None
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise _wrong(name, value, expected)
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise _wrong(name, value, expected)
    return number


def _number(name: str, value: Any) -> float | None:
    expected = "a finite number from 0 on" if name == "guidance" else "a number above 0 and up to 1"
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(name, value, expected)
    number = float(value)
    if number < 0 or (name == "strength" and not 0 < number <= 1):
        raise _wrong(name, value, expected)
    return number


def _is_picture(image: Any) -> bool:
    from PIL import Image

    return isinstance(image, Image.Image)


def _refuse_other(value: Any, name: str, right: bool, expected: str, hint: str | None = None) -> None:
    if not right:
        raise _wrong(name, value, expected, hint)


def _wrong(name: str, value: Any, expected: str, hint: str | None = None) -> SettingsError:
    found = f"{name} is {'None' if value is None else shown(value)}"
    return SettingsError(found, expected=expected, hint=hint or f"give {name} such a value", field=name)
