"""The public functions: what is this file, what would loading it do, and do it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipcast.registry.inspection import Identified, Inspection, identify_path, inspect_path
from slipcast.registry.settings import Settings, resolve_settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slipcast.engine.plan import Plan
    from slipcast.engine.report import Loaded

logger = logging.getLogger("slipcast")


def inspect(path: str | Path, **settings: Any) -> Inspection:
    """Say what a checkpoint is. Imports no torch and reads no weight.

    Args:
        path: a .safetensors file, an index of shards, a component's folder or a pipeline's folder.
        settings: those of configs/defaults.yaml; here ``families``, ``family``,
            ``component`` and ``header_limit_mib`` matter.

    Returns:
        Family, variant, layout, prefix, formats with counts, components, sizes in bytes, and the evidence.

    Raises:
        SlipcastError: the path can't be read, or no family or more than one claims it.
    """
    return inspect_path(path, resolve(path, settings))


def plan(path: str | Path, **settings: Any) -> Plan:
    """Say what loading a checkpoint would do, to the byte. Reads no weight and takes no memory for one.

    Args:
        path: as for ``inspect``.
        settings: those of configs/defaults.yaml, among them ``device`` ("auto", "cpu", "cuda:0", or a card that is not
            there, "cuda:8.6,12GiB"), ``dtype`` ("auto" or a torch dtype's name) and ``fp8`` ("auto" keeps what the file
            has; "off"; "storage"; "compute").

    Returns:
        The plan; bytes are elements x item size over all parameters and buffers, ties once.

    Raises:
        SlipcastError: the checkpoint does not add up, or is in a format that can't be loaded.
    """
    resolved = resolve(path, settings)
    return _plan(identify_path(path, resolved), resolved)


def load(
    path: str | Path,
    *,
    plan: Plan | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **settings: Any,
) -> Loaded:
    """Load a checkpoint into a ready model.

    Args:
        path: as for ``inspect``.
        plan: a plan that was made before; without it one is made from the settings. With it, settings that bear on the
            plan are refused.
        progress: called with the bytes read so far and in all, after each chunk.
        cancelled: asked after each chunk; once it says True the load ends with ``LoadCancelled`` and leaves nothing.
        settings: as for ``plan``.

    Returns:
        The model in eval mode, every tensor of it real and on the plan's device, and the report.

    Raises:
        SlipcastError: as ``plan`` does; ``PlanMismatchError`` for a plan of another file; ``LoadCancelled``.
    """
    from slipcast.engine.devices import resolve_device
    from slipcast.engine.loader import execute
    from slipcast.engine.measure import Peaks
    from slipcast.engine.report import Loaded, make_report
    from slipcast.engine.saved_plan import check_saved_plan, refuse_absent_device, settings_of

    resolved = resolve(path, settings)
    identified = identify_path(path, resolved)
    if plan is None:
        plan = _plan(identified, resolved)
    else:
        check_saved_plan(plan, _plan(identified, settings_of(plan, resolved)), settings.keys())
    device, _ = resolve_device(plan.request.device)
    refuse_absent_device(device)
    with Peaks(device) as peaks:
        model = execute(plan, identified.main.header, progress=progress, cancelled=cancelled)
    report = make_report(plan, model, peaks)
    logger.info("%s", report.summary())
    return Loaded(model, report)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype to feed a model, whatever its weights are stored in.

    Args:
        model: any module; a loaded one answers with the plan's compute dtype, also after ``.to(dtype)``.
    """
    from slipcast.engine.compute_dtype import compute_dtype as of

    return of(model)


def resolve(path: str | Path, settings: dict[str, Any]) -> Settings:
    """The settings for one checkpoint: every layer, and these on top."""
    return resolve_settings(settings, checkpoint=Path(path)).values


def _plan(identified: Identified, settings: Settings) -> Plan:
    from slipcast.engine.planner import make_plan

    return make_plan(identified.main, settings, others=identified.beside)
