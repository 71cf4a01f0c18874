"""One plain layer of each kind that can be quantised, with an input for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]

LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 16), (3, 5, 24)),
    "linear without bias": (lambda: nn.Linear(16, 16, bias=False), (4, 16)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3, padding=1, padding_mode="reflect"), (2, 8, 10)),
    "conv2d": (lambda: nn.Conv2d(8, 12, (3, 2), stride=2, groups=4), (2, 8, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, dilation=2), (1, 4, 5, 5, 5)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(8, 6, 3, stride=2, output_padding=1), (2, 8, 7)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(8, 12, 3, groups=2, padding=1), (2, 8, 5, 5)),
    "conv transpose 3d": (lambda: nn.ConvTranspose3d(4, 4, 2, bias=False), (1, 4, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(20, 16, padding_idx=3), (2, 6)),
}


def plain_layer(kind: str, seed: int = 0) -> nn.Module:
    """A new layer with random weights of uneven rows."""
    layer = LAYERS[kind][0]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.mul_(torch.logspace(-2, 2, parameter.shape[0]).reshape(-1, *[1] * (parameter.ndim - 1)))
    return layer.eval()


def layer_input(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input that the layer takes."""
    shape = LAYERS[kind][1]
    generator = torch.Generator().manual_seed(1)
    if kind == "embedding":
        return torch.randint(0, 20, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)
