"""A saved measurement that later ones are compared with: a JSON file, and its pictures in safetensors beside it."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slipcast.engine.pipeline.measurement import Measurement, MemoryKind
from slipcast.engine.pipeline.pipeline_plan import PipelinePlan
from slipcast.engine.pipeline.request import LARGEST_SEED, MOST_STEPS, GenerationRequest
from slipcast.registry.errors import DeviceError, HeaderError, SettingsError, UnsupportedFileError
from slipcast.registry.new_files import new_file, refuse_place
from slipcast.registry.untrusted_files import open_regular, read_json_object

_PICTURES = "pictures"
_LIMIT_MIB = 1
_LIBRARIES = ("torch", "diffusers", "transformers")

_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RequestRecord(_Record):
    """What was drawn: the fields of a request that begins from noise, as the command line bounds them."""

    prompt: str
    negative_prompt: str | None = None
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    width: _Count | None = None
    height: _Count | None = None
    frames: _Count | None = None


class Reference(_Record):
    """A measurement as it is saved.

    Attributes:
        schema_version: of this record.
        family: id.
        pipeline: name of the class that drew.
        request: what was drawn.
        arguments: of the pipeline's call.
        device: torch's name of the device.
        machine: the device by its product's name.
        compute_dtype: torch's name of the denoiser's dtype.
        settings: setting -> what was engaged.
        versions: library -> version.
        seconds: duration of each generation.
        peak_bytes: the most memory during a generation.
        peak_of: memory of what.
        shape: of the pictures, ``[n, height, width, 3]``.
        sha256: of the pictures' bytes.
    """

    schema_version: Literal[1] = 1
    family: str
    pipeline: str
    request: RequestRecord
    arguments: Mapping[str, Any]
    device: str
    machine: str
    compute_dtype: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: Annotated[tuple[_Seconds, ...], Field(min_length=1, strict=False)]
    peak_bytes: Annotated[int, Field(ge=0)] | None
    peak_of: MemoryKind
    shape: Annotated[tuple[_Count, _Count, _Count, _Count], Field(strict=False)]
    sha256: str

    @property
    def median_seconds(self) -> float:
        """Median of the durations."""
        return statistics.median(self.seconds)


def record(plan: PipelinePlan, request: GenerationRequest, measured: Measurement) -> Reference:
    """A measurement as it is saved."""
    fields = {name: getattr(request, name) for name in RequestRecord.model_fields}
    count, height, width, channels = measured.pictures.shape
    return Reference(
        family=plan.found.family.id,
        pipeline=plan.pipeline,
        request=RequestRecord(**fields),
        arguments=dict(measured.arguments),
        device=plan.device,
        machine=measured.machine,
        compute_dtype=plan.compute_dtype,
        settings={name: decision.engaged for name, decision in measured.status.items()},
        versions={name: version(name) for name in _LIBRARIES},
        seconds=measured.seconds,
        peak_bytes=measured.peak_bytes,
        peak_of=measured.peak_of,
        shape=(count, height, width, channels),
        sha256=_digest(measured.pictures),
    )


def refuse_reference_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that a reference can't be saved under.

    Raises:
        UnsupportedFileError: it does not end in .json, something lies there, or there is no such folder.
    """
    if path.suffix != ".json":
        raise UnsupportedFileError(
            f"the name ends in {path.suffix or 'nothing'}",
            expected="a name that ends in .json; the pictures are written beside it, in .safetensors",
            hint="name the reference otherwise",
            path=path,
        )
    for file in (path, pictures_file(path)):
        refuse_place(file, overwrite=overwrite)


def pictures_file(path: Path) -> Path:
    """Where the pictures of a reference lie."""
    return path.with_suffix(".safetensors")


def save_reference(path: Path, reference: Reference, pictures: Tensor, *, overwrite: bool) -> None:
    """Write a reference, the pictures first.

    Raises:
        SlipcastError: a file can't be written.
    """
    with new_file(pictures_file(path), overwrite=overwrite) as file:
        file.write(save({_PICTURES: pictures.contiguous()}))
    with new_file(path, overwrite=overwrite) as file:
        file.write(reference.model_dump_json(indent=2).encode() + b"\n")


def load_reference(path: Path) -> Reference:
    """Read a reference without its pictures.

    Raises:
        HeaderError: the file is missing or no JSON.
        UnsupportedFileError: it is no reference.
    """
    try:
        content = read_json_object(path, limit_mib=_LIMIT_MIB)
    except HeaderError as error:
        raise HeaderError(
            error.found,
            expected="a file that 'slipcast bench --save' wrote",
            hint="check the path that --against names, or measure and save a reference with 'slipcast bench --save'",
            path=path,
        ) from error
    try:
        return Reference.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnsupportedFileError(
            f"no reference of slipcast bench: {where}: {first['msg']}",
            expected="a file that 'slipcast bench --save' wrote",
            hint="measure and save it again",
            path=path,
        ) from error


def load_pictures(path: Path, reference: Reference) -> Tensor:
    """Read the pictures of a reference, uint8 ``[n, height, width, 3]``.

    Raises:
        UnsupportedFileError: they are missing, or not those that were saved with it.
    """
    file = pictures_file(path)
    try:
        with open_regular(file):
            pass  # what opens it by its name would wait for the writer of a pipe
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(_PICTURES)
            if (part.get_dtype(), tuple(part.get_shape())) != ("U8", reference.shape):
                raise _other_pictures(file)
            pictures: Tensor = opened.get_tensor(_PICTURES)
    except (OSError, SafetensorError, HeaderError) as error:
        raise UnsupportedFileError(
            f"the pictures of the reference can't be read: {error}",
            expected="the file that was saved beside the reference",
            hint="put it there, or measure and save the reference again",
            path=file,
        ) from error
    if _digest(pictures) != reference.sha256:
        raise _other_pictures(file)
    return pictures


def refuse_other(path: Path, reference: Reference, plan: PipelinePlan, request: GenerationRequest, here: str) -> None:
    """Refuse a reference of another request, pipeline or machine, before anything is measured.

    Args:
        path: of the reference.
        reference: what was read there.
        plan: of the pipeline that is to be measured.
        request: what is to be drawn.
        here: the machine's name.

    Raises:
        DeviceError: it was measured on another machine.
        UnsupportedFileError: it is of another family or pipeline.
        SettingsError: it is of another request.
    """
    if reference.machine != here:
        raise DeviceError(
            f"a reference of {reference.machine}",
            expected=f"one that was measured on this device: {here}",
            hint="measure and save a reference here, and compare with that",
            path=path,
        )
    of, wanted = (reference.family, reference.pipeline), (plan.found.family.id, plan.pipeline)
    if of != wanted:
        raise UnsupportedFileError(
            f"a reference of {' with '.join(of)}",
            expected=f"one of {' with '.join(wanted)}",
            hint="name the reference of this pipeline, or save one",
            path=path,
        )
    asked = {name: getattr(request, name) for name in RequestRecord.model_fields}
    differing = [name for name, value in reference.request if asked[name] != value]
    if differing:
        raise SettingsError(
            f"a reference that was drawn with other values of {', '.join(differing)}",
            expected=", ".join(f"{name} {getattr(reference.request, name)!r}" for name in differing),
            hint="leave these options out, which takes them from the reference, or save another reference",
            path=path,
            field=differing[0],
        )


def _digest(pictures: Tensor) -> str:
    return hashlib.sha256(pictures.contiguous().numpy().data).hexdigest()


def _other_pictures(file: Path) -> UnsupportedFileError:
    return UnsupportedFileError(
        "other pictures than those that were saved with the reference",
        expected="the file that was saved beside the reference",
        hint="put it there, or measure and save the reference again",
        path=file,
    )
