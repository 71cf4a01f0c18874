"""The decisions on precision: the dtype to compute in, whether fp8 is engaged, and the precision of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from slipcast.engine.devices import Device
from slipcast.engine.fp8_probe import Probe
from slipcast.engine.plan import Decision
from slipcast.registry.family import Family
from slipcast.registry.keymap.place import Place, parse_place
from slipcast.registry.precision import Precision
from slipcast.registry.quantisation import Bundle

FLOAT8_FORMATS = frozenset({"fp8_scaled", "fp8_raw"})
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def decide_dtype(
    requested: str, precision: Precision, bundles: Iterable[Bundle], device: Device, saved: str | None
) -> Decision:
    """The dtype that the model computes in.

    ``auto`` asks the family file, which mostly asks the checkpoint. A dtype named outright is taken, but float16 never
    where the family says that its activations overflow.

    Args:
        requested: auto, or torch's name of a dtype.
        precision: the family's rules.
        bundles: the file's weights.
        device: where the model goes.
        saved: the compute dtype that a config.json names, where slipcast saved the model.
    """
    if requested != "auto":
        dtype, reason = requested, "as requested"
    elif saved is not None:
        dtype, reason = saved, "the model computed in it when it was saved"
    else:
        dtype, reason = family_dtype(precision, bundles)
    if dtype == "float16" and precision.fp16 == "unsafe":
        dtype, reason = "float32", "activations of this family overflow float16"
    if requested == "auto" and not device.computes(dtype):
        halves = dtype == "bfloat16" and precision.fp16 == "safe" and device.computes("float16")
        reason = f"{reason}, but {device.label} does not compute {dtype} natively"
        dtype = "float16" if halves else "float32"
    return Decision(requested=requested, engaged=dtype, reason=reason)


def family_dtype(precision: Precision, bundles: Iterable[Bundle]) -> tuple[str, str]:
    """The dtype that a family, or the file that it is asked of, is to be computed in on any device, and why."""
    if precision.compute != "checkpoint":
        return precision.compute, "the family's compute dtype"
    held: Counter[str] = Counter()
    for bundle in bundles:
        if bundle.is_plain and len(bundle.shape) >= 2 and bundle.weight.dtype in TORCH_NAMES:
            held[bundle.weight.dtype] += bundle.weight.nbytes
    if not held:
        return precision.compute_default, "the family's default: the file has no unquantised matrix"
    most = TORCH_NAMES[held.most_common(1)[0][0]]
    if most == "float32":
        return precision.compute_default, "the family's default: the file's unquantised matrices are float32"
    return most, f"most bytes of the file's unquantised matrices are {most}"


def decide_fp8(
    requested: str, family: Family, bundles: Iterable[Bundle], device: Device, probe: Callable[[], Probe]
) -> Decision:
    """What is done about fp8.

    Engaged is ``off`` (every weight in the compute dtype), ``keep`` (codes of other formats stay as they are),
    ``storage`` (weights in float8, products in the compute dtype) or ``compute`` (products in float8 as well).

    Args:
        requested: auto, off, storage or compute.
        family: for whether fp8 suits it.
        bundles: the file's weights.
        device: where the model goes.
        probe: whether the device multiplies in float8; asked only where that is wanted.
    """
    formats = {bundle.format for bundle in bundles} - {"plain"}
    others = ", ".join(sorted(formats - FLOAT8_FORMATS))
    in_fp8 = bool(formats & FLOAT8_FORMATS)
    compute = family.precision.fp8.compute
    if requested == "off":
        engaged, reason = "off", "as requested"
    elif others and not in_fp8:
        engaged, reason = "keep", f"the file's weights are quantised already ({others}) and stay as they are"
    elif requested == "auto" and not in_fp8:
        engaged, reason = "off", "the file holds no fp8 weights"
    elif obstacle := family_obstacle(family):
        engaged, reason = "off", obstacle
    elif not device.float8:
        engaged, reason = "off", f"torch has no float8 on {device.label}"
    elif requested == "auto":
        engaged, reason = "storage", "the file's fp8 weights are kept as they are"
    elif requested == "compute" and not compute.supported:
        engaged, reason = "storage", f"{family.id}: {compute.reason}"
    elif requested == "compute" and not (probed := probe()).ok:
        engaged, reason = "storage", f"the device does not multiply in float8: {probed.reason}"
    else:
        engaged, reason = requested, "as requested" if requested == "storage" else f"as requested: {probed.reason}"
    return Decision(requested=requested, engaged=engaged, reason=reason)


def family_obstacle(family: Family) -> str:
    """Why no weight of a family is brought into codes, as its file says it of fp8 storage, or ""."""
    storage = family.precision.fp8.storage
    return "" if storage.supported else f"{family.id}: {storage.reason}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A family's precision rules, ready to be asked about module and parameter names.

    The one predicate for "does this layer stay as it is?" and "does this tensor stay in float32?".

    Attributes:
        keep: places of modules, each with why they are kept.
        keep_fp32: places of modules and tensors that stay in float32.
    """

    keep: tuple[tuple[Place, str], ...]
    keep_fp32: tuple[Place, ...]

    @classmethod
    def of(cls, precision: Precision) -> Rules:
        """The rules of a family file's ``precision:`` section."""
        keep = tuple(
            (parse_place(place), _kept_because(role, place, precision))
            for role, places in precision.keep.items()
            for place in places
        )
        return cls(keep, tuple(parse_place(place) for place in precision.keep_fp32))

    def stays_plain(self, path: str, tied: Collection[str]) -> str:
        """Why the weight of a module is never brought into codes, or "" where it may be.

        Args:
            path: the module's, in the model's names.
            tied: names of tensors that are one with another.
        """
        names = tuple(path.split("."))
        kept = next((reason for place, reason in self.keep if place.takes(names)), "")
        if kept:
            return kept
        if self.stays_fp32(f"{path}.weight"):
            return "the family keeps it in float32"
        return "its weight is also another module's" if f"{path}.weight" in tied else ""

    def stays_fp32(self, name: str) -> bool:
        """Whether a tensor stays in float32 whatever the compute dtype."""
        names = tuple(name.split("."))
        return any(place.takes(names) for place in self.keep_fp32)


def _kept_because(role: str, place: str, precision: Precision) -> str:
    """A sentence on why modules are kept: the role, and what the family file says of them."""
    kept = f"the family keeps {'it' if role == 'other' else 'its ' + role.replace('_', ' ')} unquantised"
    places = precision.keep[role]
    if isinstance(places, Mapping):
        return f"{kept}: {places[place]}"
    return f"{kept}: the forward looks at its weight's dtype" if place in precision.forward_needs else kept
