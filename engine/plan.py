"""The plan: what becomes of every tensor of a file, where every tensor of the model comes from, and the bytes.

A plan is a frozen value that is printed, saved as JSON and executed. It decides everything; the loader only obeys.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from slipcast.registry.errors import PlanMismatchError
from slipcast.registry.keymap.operations import OPERATIONS

PLAN_VERSION = 1

_OPERATION = rf"^({'|'.join(OPERATIONS)})(/[1-9][0-9]{{0,6}})?$"

Fate = Literal["loaded", "folded", "side tensor", "other component", "dropped"]
Kind = Literal["parameter", "buffer"]
How = Literal["copy", "encode", "keep", "decode", "tie", "computed"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Decision(_Frozen):
    """What became of a request: of a setting, or of what the file asks for.

    Attributes:
        requested: what was asked.
        engaged: what is done.
        reason: why.
    """

    requested: str
    engaged: str
    reason: str


class Stored(_Frozen):
    """One tensor of the loaded model.

    Attributes:
        name: its name in the model's state dict, or the dotted path of a non-persistent buffer.
        kind: parameter or buffer.
        dtype: torch's name ("bfloat16", "float8_e4m3fn").
        shape: as stored.
        nbytes: elements x item size.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Piece(_Frozen):
    """Rows of a weight in the file that become rows of a tensor of the model.

    Attributes:
        source: name of the weight's bundle in the file.
        source_rows: first and one past the last row of the file's tensor; None where all of it is meant, in any shape.
        operation: what the file's tensor is of the model's; loading inverts it.
        target_rows: the rows of the model's tensor; None where the piece is all of it.
        codec: name of the codec that decodes the file's codes; None of plain values.
        shape: the logical shape of the file's weight.
    """

    source: str
    source_rows: tuple[int, int] | None = None
    operation: Annotated[str, StringConstraints(pattern=_OPERATION)] | None = None
    target_rows: tuple[int, int] | None = None
    codec: str | None = None
    shape: tuple[int, ...] = ()


class Target(_Frozen):
    """One tensor that the model class has, and how it comes to be.

    Attributes:
        name: its name in the model.
        shape: the model's (logical) shape.
        how: ``copy`` (cast at most), ``encode`` (quantise), ``keep`` (the file's codes and scales as they are),
            ``decode`` (dequantise in float32, then cast once), ``tie`` (another's tensor), ``computed`` (made by the
            class).
        mapped: whether its values, of a kept weight its codes, are a view of the mapped file instead of a copy.
        codec: name of the codec of a quantised weight, else None.
        stored: the tensors that it is kept in; a quantised weight has codes and scales, a tie none of its own.
        pieces: where its values come from.
        tied_to: the tensor that it is, for a tie.
        reason: why, where that is not plain.
    """

    name: str
    shape: tuple[int, ...]
    how: How
    mapped: bool = False
    codec: str | None = None
    stored: tuple[Stored, ...] = ()
    pieces: tuple[Piece, ...] = ()
    tied_to: str | None = None
    reason: str = ""


class Module(_Frozen):
    """The precision of one module that owns tensors.

    Attributes:
        path: dotted path in the model; the tensor's own name for one that hangs on no leaf module.
        kind: the class's name.
        precision: ``fp8``, ``int8``, ... for quantised weights, else the dtype of its tensors.
        codec: the codec of its weight, or None.
        products: ``fp8`` where it multiplies in float8; None where it multiplies in the compute dtype.
        activation_scale: of such products: ``row`` (each row of an input its own), ``tensor`` (one for an input) or
            ``static`` (the checkpoint's).
        full_precision: whether its producer marks a quantised layer for products in full precision.
        reason: why, where a rule decided it.
    """

    path: str
    kind: str
    precision: str
    codec: str | None = None
    products: Literal["fp8"] | None = None
    activation_scale: Literal["row", "tensor", "static"] | None = None
    full_precision: bool = False
    reason: str = ""


class FileTensor(_Frozen):
    """What becomes of one tensor of the file."""

    name: str
    fate: Fate
    reason: str = ""


class Bytes(_Frozen):
    """Predicted bytes.

    Attributes:
        resident: elements x item size over all parameters and buffers, ties once.
        device_peak: the most that the device holds of them at a time while loading.
        host_peak_anonymous: the most host memory that is not a view of the file, on top of what the process has.
        read: bytes read from the file.
    """

    resident: int
    device_peak: int
    host_peak_anonymous: int
    read: int


class Remedy(_Frozen):
    """Settings with which the weights fit a device that is too small for them.

    Attributes:
        settings: dotted name -> value.
        device_peak: bytes at the peak of a load with them.
    """

    settings: dict[str, str]
    device_peak: int


class Verdict(_Frozen):
    """Whether the weights fit the device, and which settings make them fit where they do not, best first."""

    fits: bool
    needed: int
    available: int
    advice: str
    remedies: tuple[Remedy, ...] = ()


class Origin(_Frozen):
    """What the plan was made of; a load from a saved plan checks that it still is so.

    Attributes:
        family: id of the family.
        family_digest: digest of the family file.
        variant: the variant, or None.
        layout: whose names the file bears.
        prefix: the file's prefix.
        component: folder of the component in a pipeline folder, or its prefix in a file of several models.
        header_digest: digest over the file's names, dtypes, shapes and byte ranges.
        model: the model class.
        config: its constructor arguments.
    """

    family: str
    family_digest: str
    variant: str | None
    layout: str | None
    prefix: str
    component: str
    header_digest: str
    model: str
    config: dict[str, Any]


class Request(_Frozen):
    """The settings that a plan was made with, as they were asked for; see configs/defaults.yaml."""

    family: str | None
    component: str | None
    device: str
    dtype: str
    fp8_mode: str
    fp8_weights: str
    fp8_remainder: str
    fp8_hints: str
    fp8_least_features: int
    compile: str
    mmap: bool
    reader: str
    unexpected: tuple[str, ...]
    chunk_mib: int | None
    threads: int | None
    ahead_mib: int | None
    device_reserve_mib: int


class Plan(_Frozen):
    """Everything that a load does.

    Attributes:
        version: of this format.
        origin: what it was made of.
        request: the settings that it was made with.
        settings: each setting that bears on the load: requested, engaged, reason.
        device: torch's name of the device.
        compute_dtype: torch's name of the dtype that the model computes in.
        compiled: names of the classes whose blocks are compiled when they are first called.
        modules: precision of each module.
        targets: where each tensor of the model comes from, in the model's order.
        tensors: what becomes of each tensor of the file.
        bytes: predicted.
        verdict: whether the weights fit, where the device's memory is known.
        notes: what a user should know besides.
    """

    version: int = PLAN_VERSION
    origin: Origin
    request: Request
    settings: dict[str, Decision]
    device: str
    compute_dtype: str
    compiled: tuple[str, ...] = ()
    modules: tuple[Module, ...]
    targets: tuple[Target, ...]
    tensors: tuple[FileTensor, ...]
    bytes: Bytes
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> dict[str, str]:
        """Tensors of the file that nobody loads, with the reason."""
        return {tensor.name: tensor.reason for tensor in self.tensors if tensor.fate == "dropped"}

    @property
    def folded(self) -> dict[str, str]:
        """Quantised weights of the file that are dequantised, also where they are quantised anew, with the reason."""
        return {tensor.name: tensor.reason for tensor in self.tensors if tensor.fate == "folded"}

    @property
    def synthesised(self) -> dict[str, str]:
        """Tensors of the model that no tensor of the file gives, with the reason."""
        return {target.name: target.reason for target in self.targets if target.how in ("tie", "computed")}

    @property
    def precisions(self) -> dict[str, int]:
        """Number of modules of each precision."""
        return dict(Counter(module.precision for module in self.modules).most_common())

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data: the contract of ``slipcast plan --json``, and what ``from_json`` reads."""
        data = self.model_dump(mode="json")
        data["modules"] = {module.path: module.precision for module in self.modules}
        data["module_details"] = [module.model_dump(mode="json") for module in self.modules]
        for name in ("dropped", "folded", "synthesised"):
            data[name] = getattr(self, name)
        return data

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Read a plan that ``to_json`` wrote.

        Raises:
            PlanMismatchError: not a plan, or one of another version.
        """
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, dict) else None
            raise PlanMismatchError(
                "no plan: it does not say its version" if version is None else f"a plan of version {version!r}",
                expected=f"a plan of version {PLAN_VERSION}, as 'slipcast plan PATH --json' prints it",
                hint="make the plan again with this version",
            )
        fields = {key: value for key, value in data.items() if key in cls.model_fields}
        fields["modules"] = data.get("module_details")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise PlanMismatchError(
                f"a plan with {error.error_count()} wrong fields",
                expected="a plan as 'slipcast plan PATH --json' prints it",
                hint="make the plan again",
                items=[".".join(map(str, problem["loc"])) + ": " + problem["msg"] for problem in error.errors()],
            ) from error
