"""The decisions on precision: the dtype to compute in, whether fp8 is engaged, and the precision of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipcast.engine.devices import Device
from slipcast.engine.kept_codes import FLOAT8_FORMATS
from slipcast.engine.plan import Decision
from slipcast.registry.family import Family, Precision
from slipcast.registry.keymap.place import Place, parse_place
from slipcast.registry.quantisation import Bundle

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
        dtype, reason = _family_dtype(precision, bundles)
    if dtype == "float16" and precision.fp16 == "unsafe":
        dtype, reason = "float32", "activations of this family overflow float16"
    if requested == "auto" and not device.computes(dtype):
        dtype, reason = "float32", f"{reason}, but {device.label} does not compute {dtype} natively"
    return Decision(requested=requested, engaged=dtype, reason=reason)


def _family_dtype(precision: Precision, bundles: Iterable[Bundle]) -> tuple[str, str]:
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


def decide_fp8(requested: str, family: Family, bundles: Iterable[Bundle]) -> Decision:
    """Whether weights are kept in fp8, and whether they are multiplied in it."""
    in_file = any(bundle.format in FLOAT8_FORMATS for bundle in bundles)
    support = family.precision.fp8.storage
    if requested == "off":
        engaged, reason = "off", "as requested"
    elif requested == "auto" and not in_file:
        engaged, reason = "off", "the file holds no fp8 weights"
    elif not support.supported:
        engaged, reason = "off", f"{family.id}: {support.reason}"
    elif requested == "auto":
        engaged, reason = "storage", "the file's fp8 weights are kept as they are"
    elif requested == "compute":
        engaged, reason = "storage", "fp8 compute is not available in this version"
    else:
        engaged, reason = "storage", "as requested"
    return Decision(requested=requested, engaged=engaged, reason=reason)


@dataclass(frozen=True, slots=True)
class Rules:
    """A family's precision rules, ready to be asked about module and parameter names.

    The one predicate for "does this layer stay in the compute dtype?" and "does this tensor stay in float32?".
    """

    keep: Mapping[str, tuple[Place, ...]]
    keep_fp32: tuple[Place, ...]

    @classmethod
    def of(cls, precision: Precision) -> Rules:
        """The rules of a family file's ``precision:`` section."""
        keep = {role: tuple(parse_place(place) for place in places) for role, places in precision.keep.items()}
        return cls(keep, tuple(parse_place(place) for place in precision.keep_fp32))

    def kept_role(self, path: str) -> str | None:
        """The role for which a module stays in the compute dtype, or None where it may be quantised."""
        names = tuple(path.split("."))
        return next((role for role, places in self.keep.items() if any(place.takes(names) for place in places)), None)

    def stays_fp32(self, name: str) -> bool:
        """Whether a tensor stays in float32 whatever the compute dtype."""
        names = tuple(name.split("."))
        return any(place.takes(names) for place in self.keep_fp32)
