"""Random blocks of GGUF's tensor types."""

from __future__ import annotations

import numpy as np
import torch

from slipcast.engine.codecs.gguf_blocks import BLOCK_TYPES

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Bytes of a block at which a float16 scale or offset stands."""


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random codes and sub-block scales under random, finite float16 scales."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, BLOCK_TYPES[kind].nbytes), np.uint8)
    for first in HALVES.get(kind, ()):
        blocks[:, first : first + 2] = random.normal(0, 0.01, (count, 1)).astype(np.float16).view(np.uint8)
    if kind not in HALVES:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        values = torch.randn(count, 1, generator=torch.Generator().manual_seed(seed))
        blocks = values.to(dtype).view(torch.uint8).numpy()
    return blocks
