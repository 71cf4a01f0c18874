"""The real handwritten digits, and a classifier that says which digit an image shows.

The digits are scikit-learn's copy of the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998): 1797 images of 8 x 8 pixels with values 0 to 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipcast.registry.errors import SlipcastError

if TYPE_CHECKING:
    from sklearn.svm import SVC

IMAGE_SIZE = 16
PICTURE_SIZE = 64
DIGITS = 10

_BRIGHTEST = 16.0
_HOLD_OUT_EVERY = 5


def real_digits() -> tuple[Tensor, Tensor]:
    """The real digits at the size that the demonstration draws.

    Returns:
        Images ``[1797, 1, 16, 16]``, float32 in [-1, 1] (-1 is the paper, 1 the pen), enlarged from 8 x 8 by bicubic
        interpolation, and their labels ``[1797]``, int64.
    """
    return _digits_of_size(IMAGE_SIZE)


def enlarged_digits() -> tuple[Tensor, Tensor]:
    """As `real_digits`, at the size that the demonstration's pipeline draws: images ``[1797, 1, 64, 64]``."""
    return _digits_of_size(PICTURE_SIZE)


def as_recognised(pictures: Tensor) -> Tensor:
    """The pictures of the pipeline as the classifier takes them.

    Args:
        pictures: ``[n, channels, height, width]`` in [-1, 1], height and width multiples of 16.

    Returns:
        The mean of the channels, each pixel the mean of those that it covers, ``[n, 1, 16, 16]`` in [-1, 1].
    """
    grey = pictures.float().clamp(-1, 1).mean(dim=1, keepdim=True)
    return torch.nn.functional.adaptive_avg_pool2d(grey, IMAGE_SIZE)


def _digits_of_size(size: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / (_BRIGHTEST / 2) - 1
    enlarged = torch.nn.functional.interpolate(images, size=(size, size), mode="bicubic")
    return enlarged.clamp(-1, 1), torch.from_numpy(labels).long()


def held_out(labels: Tensor) -> Tensor:
    """Which of the real digits the recogniser never sees: every fifth, as a bool mask of the shape of ``labels``."""
    return torch.arange(len(labels)) % _HOLD_OUT_EVERY == 0


def train_recogniser() -> SVC:
    """Train the classifier on four fifths of the real digits (`held_out` names the rest); takes under a second.

    Returns:
        A support vector classifier with a radial kernel on the 256 pixels of an image; the same at every call.
    """
    from sklearn.svm import SVC

    images, labels = real_digits()
    seen = ~held_out(labels)
    return SVC(kernel="rbf", C=10.0, gamma="scale").fit(images[seen].flatten(1).numpy(), labels[seen].numpy())


def count_recognised(classifier: SVC, images: Tensor, digits: Sequence[int]) -> int:
    """How many images show the digit that they should.

    Args:
        classifier: what `train_recogniser` returned.
        images: ``[n, 1, 16, 16]`` in [-1, 1], any floating dtype and device.
        digits: the ``n`` digits that were asked for.

    Raises:
        SlipcastError: there are not as many images as digits.
    """
    if len(images) != len(digits):
        raise SlipcastError(
            f"{len(images)} images for {len(digits)} digits",
            expected="one digit for each image",
            hint="give the digits that the images were drawn for",
        )
    return sum(found == digit for found, digit in zip(recognised_digits(classifier, images), digits, strict=True))


def recognised_digits(classifier: SVC, images: Tensor) -> tuple[int, ...]:
    """Which digit each image is taken for.

    Args:
        classifier: what `train_recogniser` returned.
        images: ``[n, 1, 16, 16]`` in [-1, 1], any floating dtype and device.
    """
    return tuple(int(digit) for digit in classifier.predict(images.detach().float().cpu().flatten(1).numpy()))
