"""Makes the plan: decides every dtype, every layer and every tensor before a byte of a weight is read."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from slipcast.engine.accounting import Accounts, account
from slipcast.engine.bounds import refuse_large_tables
from slipcast.engine.budget import growth_notes, predict_bytes, weigh_verdict
from slipcast.engine.build import build_to_plan, unknown_arguments
from slipcast.engine.codecs.base import Codec
from slipcast.engine.compile_decision import decide_compile
from slipcast.engine.devices import resolve_device
from slipcast.engine.file_codec import file_codec
from slipcast.engine.fp8_probe import probe_fp8
from slipcast.engine.fp8_products import number_obstacle
from slipcast.engine.model_tensors import model_tensors
from slipcast.engine.module_precision import ModuleChoices, ModuleChooser, WeightChoice
from slipcast.engine.plan import Bytes, Decision, FileTensor, Origin, Plan, Request, Target
from slipcast.engine.precision import Rules, decide_dtype, decide_fp8
from slipcast.engine.reading import Reading, decide_reading
from slipcast.engine.saved_quantisation import saved_quantisation
from slipcast.engine.targets import TargetMaker, refuse_other_kinds
from slipcast.registry.errors import UnsupportedFormatError
from slipcast.registry.header import Header, TensorInfo
from slipcast.registry.identify import Match
from slipcast.registry.quantisation import count_formats
from slipcast.registry.settings import Fp8Settings, Settings
from slipcast.registry.side_tensors import INPUT_SCALE

LOADABLE_FORMATS = frozenset({"plain", "fp8_scaled", "fp8_raw", "nvfp4", "mxfp8", "int8", "int8_convrot", "gguf"})

_LOADED_BY = {
    "bnb_nf4": "diffusers with bitsandbytes",
    "bnb_fp4": "diffusers with bitsandbytes",
    "bnb_int8": "diffusers with bitsandbytes",
    "torchao": "diffusers with torchao",
    "nunchaku": "the nunchaku package",
    "sdnq": "the sdnq package",
    "compressed_tensors": "the compressed-tensors package",
    "svdquant": "the nunchaku package",
    "awq": "the nunchaku package",
}


_UNKNOWN = "the file is damaged, or in a format that is not known: get another copy, or a bf16 or fp8 version"


def make_plan(match: Match, settings: Settings, *, others: Sequence[Match] = ()) -> Plan:
    """Plan the load of one identified model. Reads no weight; the model is built on the meta device.

    Args:
        match: the model.
        settings: device, dtype, fp8, mmap, unexpected and the rest.
        others: every model found in the same file, for what belongs to them.

    Raises:
        UnsupportedFormatError: a quantisation that can't be loaded.
        QuantisationError: scales or markers without a weight.
        AccountingError: tensors that do not add up to the model.
        ConfigError: the model class refuses its arguments.
        DeviceError: no such device.
    """
    return prepare_load(match, settings, others=others).plan


class PreparedLoad:
    """A plan whose load follows at once, and the model that it was made on, where no other has to be built.

    Attributes:
        plan: the plan.
    """

    def __init__(self, plan: Plan, model: nn.Module | None) -> None:
        self.plan = plan
        self._model = model

    def take_model(self) -> nn.Module | None:
        """Give the model away, once. It is None where the class computes something, which is not real yet."""
        model, self._model = self._model, None
        return model


def prepare_load(match: Match, settings: Settings, *, others: Sequence[Match] = ()) -> PreparedLoad:
    """Plan a load that follows at once. Arguments and errors as for ``make_plan``."""
    refuse_formats(match)
    saved = saved_quantisation(match.header)
    device, device_reason = resolve_device(settings.device)
    config, notes = _known_config(match)
    model, is_bare = build_to_plan(match.model, config)
    weights = sum(tensor.nbytes for bundle in match.bundles.values() for tensor in bundle.tensors)
    refuse_large_tables(model, weights, match.header.path, config)
    tensors = model_tensors(model)
    shapes = {
        name: tuple(tensor.shape) for name, tensor in chain(tensors.parameters.items(), tensors.persistent.items())
    }
    accounts = account(match, shapes, tensors.ties, others=others, unexpected=settings.unexpected)
    refuse_other_kinds(match, accounts, {**tensors.parameters, **tensors.persistent})
    dtype = decide_dtype(settings.dtype, match.family.precision, match.bundles.values(), device, saved.compute_dtype)
    fp8 = decide_fp8(settings.fp8.mode, match.family, match.bundles.values(), device, lambda: probe_fp8(device))
    classes = {type(module).__name__ for module in model.modules()}
    compile_, compiled = decide_compile(settings.compile, match.family.runtime.compile, classes, device, dtype.engaged)
    reading = decide_reading(settings, device, match.header)
    rules = Rules.of(match.family.precision)
    codecs = _codecs(match, accounts, saved.nvfp4_layout or match.family.precision.nvfp4_layout)
    tied = frozenset(chain.from_iterable(tensors.ties.items()))

    def planned(mode: str, wanted: Fp8Settings) -> tuple[ModuleChoices, tuple[Target, ...], Bytes]:
        chooser = ModuleChooser(match, accounts, codecs, tied, rules, saved, dtype.engaged, mode, wanted)
        modules = chooser.choose(model)
        maker = TargetMaker(
            match, accounts, codecs, modules.by_weight, saved, rules, dtype.engaged, device, settings.mmap
        )
        targets = tuple(maker.targets(tensors))
        return modules, targets, predict_bytes(targets, match, device, Reading.of(reading))

    modules, targets, bytes_ = planned(fp8.engaged, settings.fp8)
    fp8 = _as_engaged(fp8, modules)
    plan = Plan(
        origin=_origin(match, config),
        request=_request(settings),
        settings={
            "device": Decision(requested=settings.device, engaged=device.name, reason=device_reason),
            "dtype": dtype,
            "fp8": fp8,
            **({"fp8.remainder": modules.remainder} if modules.remainder is not None else {}),
            "compile": compile_,
            **reading,
        },
        device=device.name,
        compute_dtype=dtype.engaged,
        compiled=compiled,
        modules=modules.modules,
        targets=targets,
        tensors=tuple(_fates(match, targets, accounts, modules.by_weight)),
        bytes=bytes_,
        verdict=weigh_verdict(bytes_, device, settings, fp8, match.family, lambda other: planned("storage", other)[2]),
        notes=(*notes, *growth_notes(targets, match, fp8), *match.guesses, *match.everything.problems),
    )
    return PreparedLoad(plan, model if is_bare else None)


def _as_engaged(fp8: Decision, modules: ModuleChoices) -> Decision:
    """The decision on fp8 as it came out: what no layer could follow is not engaged, and says why."""
    if fp8.engaged == "off":
        return fp8
    coded = [module for module in modules.modules if module.codec is not None]
    if not coded:
        reasons = dict.fromkeys(module.reason for module in modules.modules if module.reason)
        return Decision(requested=fp8.requested, engaged="off", reason="; ".join(("no layer can be in fp8", *reasons)))
    if fp8.engaged == "compute" and all(module.products is None for module in coded):
        reasons = dict.fromkeys(module.reason for module in coded if module.reason)
        reason = "; ".join(("no layer can multiply in float8", *reasons))
        return Decision(requested=fp8.requested, engaged="storage", reason=reason)
    return fp8


def _codecs(match: Match, accounts: Accounts, hint: str | None) -> dict[str, Codec]:
    """The codec of each weight of the file that is used and in codes."""
    found = {name: file_codec(match.everything.weights[name], hint) for name in accounts.shapes}
    return {name: codec for name, codec in found.items() if codec is not None}


def refuse_formats(match: Match) -> None:
    """Refuse what can be recognised but not loaded.

    Raises:
        UnsupportedFormatError: it names the formats, how many weights are in each, and what would load them.
    """
    counts = count_formats(match.bundles.values())
    refused = {name: count for name, count in counts.items() if name not in LOADABLE_FORMATS}
    if refused:
        loaders = sorted({_LOADED_BY[name] for name in refused if name in _LOADED_BY})
        raise UnsupportedFormatError(
            "quantised weights in a format that is not supported yet: "
            + ", ".join(f"{name} ({count} weights)" for name, count in refused.items()),
            expected="weights in one of " + ", ".join(sorted(LOADABLE_FORMATS)),
            hint=f"load it with {' or '.join(loaders)}" if loaders else _UNKNOWN,
            path=match.header.path,
            items=match.everything.problems,
        )


def header_digest(header: Header) -> str:
    """Digest over the names, dtypes, shapes and byte ranges of a header's tensors."""
    digest = hashlib.sha256()
    for tensor in header.tensors.values():
        digest.update(repr((tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.start, tensor.stop)).encode())
    return digest.hexdigest()


def _known_config(match: Match) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments without those that only a folder's config.json has and the installed class does not know."""
    config = dict(match.config)
    ours = match.family.config_of(match.variant)
    unknown = [key for key in unknown_arguments(match.model, config) if key not in ours]
    for key in unknown:
        del config[key]
    return config, tuple(f"config.json's {key} is unknown to the installed class and passed over" for key in unknown)


def _origin(match: Match, config: dict[str, Any]) -> Origin:
    return Origin(
        family=match.family.id,
        family_digest=match.family.digest,
        variant=match.variant,
        layout=match.layout,
        prefix=match.prefix,
        component=match.name,
        header_digest=header_digest(match.header),
        model=match.model,
        config=config,
    )


def _request(settings: Settings) -> Request:
    return Request(
        family=settings.family,
        component=settings.component,
        device=settings.device,
        dtype=settings.dtype,
        fp8_mode=settings.fp8.mode,
        fp8_weights=settings.fp8.weights,
        fp8_remainder=settings.fp8.remainder,
        fp8_hints=settings.fp8.hints,
        fp8_least_features=settings.fp8.least_features,
        compile=settings.compile,
        mmap=settings.mmap,
        reader=settings.reader,
        unexpected=tuple(settings.unexpected),
        chunk_mib=settings.chunk_mib,
        threads=settings.threads,
        ahead_mib=settings.ahead_mib,
        device_reserve_mib=settings.device_reserve_mib,
    )


def _fates(
    match: Match, targets: Sequence[Target], accounts: Accounts, choices: Mapping[str, WeightChoice]
) -> Iterator[FileTensor]:
    """What becomes of each tensor of the file: of the bundles that links hold, then of the rest."""
    takers: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        for piece in target.pieces:
            takers[piece.source].append(target)
    spare = {piece.source for pieces in accounts.pieces.values() for piece in pieces}
    for bundle in match.everything.weights.values():
        taking = takers[bundle.name]
        folding = [target for target in taking if target.how in ("decode", "encode")]
        if not taking and bundle.name not in spare:
            continue
        if not taking:
            reason = "it is the same tensor as another, which is loaded"
            yield from (FileTensor(name=tensor.name, fate="dropped", reason=reason) for tensor in bundle.tensors)
            continue
        if folding and not bundle.is_plain:
            yield FileTensor(name=bundle.weight.name, fate="folded", reason=folding[0].reason)
        else:
            yield FileTensor(name=bundle.weight.name, fate="loaded")
        static = any(stored.name.endswith(f".{INPUT_SCALE}") for target in taking for stored in target.stored)
        for role, side in bundle.sides.items():
            if role == INPUT_SCALE and not static:
                why = _not_taken(side, [choices[target.name] for target in taking if target.name in choices])
                yield FileTensor(name=side.name, fate="dropped", reason=f"no product of its layer takes it: {why}")
            else:
                yield FileTensor(name=side.name, fate="side tensor", reason=f"{role} of {bundle.name}")
    yield from accounts.unused


def _not_taken(scale: TensorInfo, choices: Sequence[WeightChoice]) -> str:
    """Why no layer takes a scale of activations: what is wrong with it, or how the layers multiply."""
    reasons = (number_obstacle(scale), *(choice.products.reason for choice in choices))
    return "; ".join(dict.fromkeys(filter(None, reasons))) or "its products are in the compute dtype"
