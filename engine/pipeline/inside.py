"""Models that a pipeline wants inside another class, whose further layers no file of theirs has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from slipcast.engine.build import build_on_meta
from slipcast.engine.compute_dtype import compute_dtype
from slipcast.engine.layers import QuantisedModule
from slipcast.engine.plan import Plan
from slipcast.engine.quantised_model import mark_quantised_
from slipcast.registry.companions import Companion

if TYPE_CHECKING:
    from slipcast.engine.pipeline.pipeline_plan import PlannedPart


def put_inside(model: nn.Module, part: PlannedPart) -> nn.Module:
    """The model that a pipeline needs: the loaded one, or the class that it serves as, with it inside.

    Args:
        model: as it was loaded.
        part: what it is, and whether it serves as another.
    """
    if part.companion.serves is None or part.plan is None:
        return model
    around = build_on_meta(part.companion.class_name, part.plan.origin.config)
    around.set_submodule(part.companion.serves.inside, model)
    dtype = compute_dtype(model)
    for name in part.companion.serves.identity:
        layer = around.get_submodule(name)
        identity = torch.eye(*layer.weight.shape, dtype=dtype, device=part.plan.device)  # type: ignore[misc]
        layer.weight = nn.Parameter(identity, requires_grad=False)
    quantised = any(isinstance(module, QuantisedModule) for module in model.modules())
    return mark_quantised_(around.eval()) if quantised else around.eval()


def bytes_around(part: Companion, plan: Plan) -> int:
    """Bytes of the layers that such a class adds."""
    if part.serves is None:
        return 0
    around = build_on_meta(part.class_name, plan.origin.config)
    size: int = getattr(torch, plan.compute_dtype).itemsize
    added = [around.get_submodule(name) for name in part.serves.identity]
    return sum(parameter.numel() * size for layer in added for parameter in layer.parameters())
