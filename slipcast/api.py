"""The public functions: what is this file, what would loading it do, do it, write it otherwise; prove a family file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.found_pipeline import find_pipeline
from slipcast.registry.inspection import Inspection, identify_path, inspect_path
from slipcast.registry.settings import Settings, checkpoint_path, resolve_settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slipcast.engine.check.proof import CheckedFamily
    from slipcast.engine.convert import Converted
    from slipcast.engine.plan import Decision, Plan
    from slipcast.engine.report import Loaded
    from slipcast.engine.wanted import Scale, Spelling
    from slipcast.registry.claims import Layout


def inspect(path: str | Path, **settings: Any) -> Inspection:
    """Say what a checkpoint is. Imports no torch and reads no weight.

    Args:
        path: a .safetensors or .gguf file, an index of shards, a component's folder, a pipeline's folder, or a folder
            with one model in it.
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
        The plan; bytes are elements x item size over all parameters and buffers, ties once. A note names the settings
        given that bear on whole pipelines alone.

    Raises:
        SlipcastError: the checkpoint does not add up, or is in a format that can't be loaded.
    """
    layers = resolve_settings(settings, checkpoint=checkpoint_path(path))
    resolved = layers.values
    identified = identify_path(path, resolved)
    from slipcast.engine.idle_settings import idle_notes
    from slipcast.engine.planner import make_plan  # imports torch, which what is refused should not wait for

    planned = make_plan(identified.main, resolved, others=identified.beside)
    return planned.model_copy(update={"notes": (*planned.notes, *idle_notes(layers))})


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
        plan: a plan that was made before, which says all that it was made with but for the settings ``families`` and
            ``header_limit_mib``; without it one is made from the settings. With it, settings that bear on the plan are
            refused.
        progress: called with the bytes read so far and in all, after each chunk.
        cancelled: asked after each chunk; once it says True the load ends with ``Cancelled`` and leaves nothing.
        settings: as for ``plan``.

    Returns:
        The model in eval mode, every tensor of it real and on the plan's device, and the report.

    Raises:
        SlipcastError: as ``plan`` does; ``PlanMismatchError`` for a plan of another file; ``Cancelled``.
    """
    from slipcast.engine.described_device import refuse_described
    from slipcast.engine.without_collection import without_collection

    resolved = resolve(path, settings)
    if plan is not None:
        resolved = _settings_of_plan(plan, resolved, settings)
    refuse_described(resolved.device)
    with without_collection():
        return _load(path, resolved, plan, progress, cancelled)


def _load(
    path: str | Path,
    resolved: Settings,
    plan: Plan | None,
    progress: Callable[[int, int], None] | None,
    cancelled: Callable[[], bool] | None,
) -> Loaded:
    identified = identify_path(path, resolved)
    from slipcast.engine.planned_load import load_planned  # imports torch, which what is refused should not wait for
    from slipcast.engine.planner import prepare_load
    from slipcast.engine.saved_plan import check_saved_plan

    prepared = prepare_load(identified.main, resolved, others=identified.beside)
    if plan is not None:
        check_saved_plan(plan, prepared.plan)
    header = identified.main.header
    return load_planned(prepared.plan, header, take_model=prepared.take_model, progress=progress, cancelled=cancelled)


def pipeline(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **settings: Any,
) -> Any:
    """Make the diffusers pipeline of a denoiser: its text encoders, VAE, tokenizers and scheduler around it.

    Each part is taken from the setting ``companions``, the pipeline's folder, the same file, or what lies beside the
    file, and goes through the same plan and load, with a precision of its own. Nothing is downloaded.

    Args:
        path: a denoiser's file or folder, a file of several models, or a pipeline's folder.
        size: width and height in pixels of what is to be drawn, for which there must be memory; the pipeline's own if
            left out. The call draws what its own arguments say.
        progress: called with the bytes read so far and in all, after each chunk.
        cancelled: asked after each chunk; once it says True this ends with ``Cancelled`` and leaves nothing.
        settings: those of the denoiser, as for ``plan``, and ``companions``: a folder, or paths by the pipeline's own
            names of its parts.

    Returns:
        A pipeline of the class that the family names, such as diffusers itself would make; ``status`` says what became
        of each setting.

    Raises:
        CompanionError: parts are missing, or not what the pipeline needs, with what would satisfy each.
        SettingsError: the size is no pair of whole numbers, or no multiple of the family's.
        DeviceError: it does not fit the device at that size, with what would make it fit.
        SlipcastError: as ``load`` does.
    """
    from slipcast.engine.described_device import refuse_described
    from slipcast.engine.pipeline.request import checked_size, refuse_no_multiples

    resolved = resolve(path, settings)
    refuse_described(resolved.device)
    wanted = None if size is None else checked_size(size)
    found = find_pipeline(path, resolved)
    if wanted is not None:
        refuse_no_multiples(wanted, found.sampling.size_multiple)
    from slipcast.engine.pipeline.assemble import assemble  # imports torch, which what is refused should not wait for
    from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
    from slipcast.engine.without_collection import without_collection

    with without_collection():
        return assemble(make_pipeline_plan(path, resolved, wanted, found=found), progress=progress, cancelled=cancelled)


def status(pipe: Any) -> dict[str, Decision]:
    """What became of each setting of a pipeline: requested, engaged, reason.

    Args:
        pipe: what ``pipeline`` returned.

    Raises:
        CompanionError: slipcast did not make it.
    """
    from slipcast.engine.pipeline.assemble import pipeline_status

    return pipeline_status(pipe)


def convert(
    path: str | Path,
    out: str | Path,
    *,
    layout: Layout | None = None,
    format: str | None = None,
    spelling: Spelling | None = None,
    scale: Scale | None = None,
    prefix: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **settings: Any,
) -> Converted:
    """Write a checkpoint in another naming, or its weights in another format. What is not asked to change stays.

    Args:
        path: as for ``inspect``.
        out: a file whose name ends in ``.safetensors``; in the model's names also a folder, which gets the weights and
            a ``config.json``. It is there whole or not at all.
        layout: ``native``, as the family's own files name the tensors, or ``diffusers``, as the model class does; left
            out, the input's own.
        format: what to write the weights in: ``bf16``, ``fp16`` or ``fp32`` for all of them, or ``fp8_scaled``,
            ``mxfp8``, ``nvfp4``, ``int8`` or ``int8_convrot`` for those that the family lets be quantised. In a file
            that is quantised already the setting ``fp8`` with ``remainder`` decides about the others.
        spelling: how scales are called, ``comfy`` or, of fp8 alone, ``legacy``; left out, as the input has them.
        scale: how far one scale of fp8 or int8 reaches, ``tensor`` or ``row``.
        prefix: what to put before each name, one that the family knows.
        overwrite: whether to replace what lies at ``out``.
        progress: called with the bytes written so far and in all.
        cancelled: asked after each piece; once it says True the conversion ends with ``Cancelled``.
        settings: those of configs/defaults.yaml; here ``families``, ``family``, ``component``, ``unexpected``,
            ``header_limit_mib`` and ``fp8`` with ``remainder`` matter.

    Returns:
        What was written: files, names, formats, and what was left out, dequantised or came out otherwise.

    Raises:
        SlipcastError: as ``inspect`` does; ``SettingsError`` for options that do not go together;
            ``UnsupportedFileError`` for a place that can't be written to; ``AccountingError``, ``QuantisationError``
            and ``UnsupportedFormatError`` for weights that can't become what is asked for; ``Cancelled``.
    """
    from slipcast.engine.destination import destination
    from slipcast.engine.wanted import Wanted

    resolved = resolve(path, settings)
    wanted = Wanted(format, spelling, scale, resolved.fp8.remainder)
    identified = identify_path(path, resolved)
    destination(identified.main, Path(out), layout, prefix=prefix, overwrite=overwrite)
    from slipcast.engine.convert import convert as write  # imports torch, which what is refused should not wait for

    return write(
        identified.main,
        Path(out),
        layout,
        wanted=wanted,
        prefix=prefix,
        overwrite=overwrite,
        others=identified.beside,
        unexpected=resolved.unexpected,
        progress=progress,
        cancelled=cancelled,
    )


def check(*names: str | Path, headers: str | Path | None = None, **settings: Any) -> Iterator[CheckedFamily]:
    """Prove family files, one after another, as they are asked for.

    Args:
        names: ids of families, or family files, each of which is laid over the known families; all known families
            where none is named.
        headers: the folder of the recorded headers; that of the repository that slipcast runs from, if left out.
        settings: those of configs/defaults.yaml; here ``families`` matters.

    Returns:
        An iterator over the families: each has ``proofs``, which are ok, failed or skipped, and ``failed``. What
        refutes a family is in its proofs, a file that can't be read too; it is not raised.

    Raises:
        SettingsError: an id that no family has, or a folder of headers that is not there.
        FamilyFileError: one of the known family files can't be read.
    """
    folders = resolve_settings(settings).values.families
    from slipcast.engine.check.run import check_families  # imports torch, which a wrong setting should not wait for

    folder = None if headers is None else Path(headers)
    return check_families([str(name) for name in names], folders=folders, headers=folder)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype to feed a model, whatever its weights are stored in.

    Args:
        model: any module; a loaded one answers with the plan's compute dtype, also after ``.to(dtype)``.
    """
    from slipcast.engine.compute_dtype import compute_dtype as of

    return of(model)


def resolve(path: str | Path, settings: dict[str, Any]) -> Settings:
    """The settings for one checkpoint: every layer, and these on top.

    Raises:
        UnsupportedFileError: the path is none.
        SettingsError: a setting is unknown or has a wrong value.
    """
    return resolve_settings(settings, checkpoint=checkpoint_path(path)).values


def _settings_of_plan(plan: Plan, settings: Settings, given: Iterable[str]) -> Settings:
    """The settings with those that a saved plan was made with, if it can be one for here."""
    from slipcast.engine.saved_plan import refuse_unknown_family, settings_of

    refuse_unknown_family(plan, load_catalogue(settings.families))
    return settings_of(plan, settings, given)
