"""The dtype that a model computes in, whatever its weights are stored in."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from slipcast.engine.codecs.base import is_plain_float
from slipcast.engine.layers import QuantisedModule


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the inputs that a model wants.

    Of a model with quantised layers it is the dtype that the first of them decodes to; of any other the floating dtype
    of most of its parameters' bytes, then of its buffers'. float8 is storage and never an answer.

    Returns:
        A floating dtype of at least 16 bits; torch's default dtype for a model without any such tensor.
    """
    for module in model.modules():
        if isinstance(module, QuantisedModule):
            return module.compute_dtype
    for tensors in (model.parameters(), model.buffers()):
        held: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            if is_plain_float(tensor.dtype):
                held[tensor.dtype] += tensor.nbytes
        if held:
            return held.most_common(1)[0][0]
    return torch.get_default_dtype()
