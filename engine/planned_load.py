"""One planned load from start to end: read, measured, compiled where that is wanted, reported and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from slipcast.engine import loader
from slipcast.engine.compiled_blocks import compile_planned_
from slipcast.engine.devices import resolve_device
from slipcast.engine.measure import Peaks
from slipcast.engine.plan import Plan
from slipcast.engine.report import Loaded, make_report
from slipcast.registry.header import Header

logger = logging.getLogger("slipcast")


def load_planned(
    plan: Plan,
    header: Header,
    *,
    take_model: Callable[[], nn.Module | None] = lambda: None,
    progress: loader.Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Loaded:
    """Do what a plan says.

    Args:
        plan: of the model.
        header: of the file that the plan was made for.
        take_model: gives the model that the plan was made on, which nobody else may hold; None has it built.
        progress: called with the bytes read so far and in all, after each chunk.
        cancelled: asked after each chunk; once it says True the load ends with ``Cancelled`` and leaves nothing.

    Raises:
        SlipcastError: whatever reading raises.
    """
    device, _ = resolve_device(plan.request.device)
    with Peaks(device) as peaks:
        model, notes = loader.execute(plan, header, take_model=take_model, progress=progress, cancelled=cancelled)
    report = make_report(plan, model, peaks, notes, compile_planned_(model, plan))
    logger.info("%s", report.summary())
    for note in notes:
        logger.warning("%s", note)
    return Loaded(model, report)
