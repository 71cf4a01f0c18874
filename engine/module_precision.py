"""The one answer to "does this layer stay quantised?": cast, prediction, log line and report all read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from slipcast.engine.accounting import Accounts
from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import layer_codec, quantisation_obstacle
from slipcast.engine.plan import Decision, Module, Piece
from slipcast.engine.precision import FLOAT8_FORMATS, Rules
from slipcast.registry.identify import Match
from slipcast.registry.quantisation import Bundle

_ENCODED = Float8("row")

OWN_METHOD = "slipcast"
"""The ``quant_method`` under which ``save_pretrained`` of a loaded model describes itself."""


@dataclass(frozen=True, slots=True)
class ModuleChoices:
    """The precision of every module.

    Attributes:
        modules: in the model's order.
        by_weight: name of each weight that a rule bears on -> its module's choice.
        decisions: settings that the choice has decided besides.
    """

    modules: tuple[Module, ...]
    by_weight: Mapping[str, WeightChoice]
    decisions: Mapping[str, Decision] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """How one weight is kept.

    Attributes:
        codec: the codec, or None for the compute dtype.
        keep: whether the file's own codes and scales are taken as they are.
        reason: why.
    """

    codec: str | None
    keep: bool
    reason: str


def choose_modules(
    model: nn.Module, match: Match, accounts: Accounts, rules: Rules, compute_dtype: str, fp8: str, remainder: str
) -> ModuleChoices:
    """Choose for every module of a model.

    Args:
        model: on the meta device.
        match: the identified checkpoint.
        accounts: which pieces of the file make which weight.
        rules: the family's precision rules.
        compute_dtype: torch's name of the engaged compute dtype.
        fp8: the engaged fp8 mode, ``off`` or ``storage``.
        remainder: what happens in a quantised file to weights that are not: ``keep`` or ``quantise``.
    """
    quantised_file = any(bundle.format in FLOAT8_FORMATS for bundle in match.bundles.values())
    encodes = fp8 != "off" and (not quantised_file or remainder == "quantise")
    own = (match.header.config or {}).get("quantization_config", {}).get("quant_method") == OWN_METHOD
    modules: list[Module] = []
    by_weight: dict[str, WeightChoice] = {}
    for path, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        weight = f"{path}.weight"
        pieces = accounts.pieces.get(weight, ())
        bundles = [match.everything.weights[piece.source] for piece in pieces]
        choice = _choose(path, module, pieces, bundles, rules, fp8 != "off", encodes, own)
        if choice is not None:
            by_weight[weight] = choice
        modules += _module(path, module, choice, rules, compute_dtype)
    decisions = {}
    if fp8 != "off":
        decisions["fp8.remainder"] = _remainder_decision(remainder, quantised_file)
    return ModuleChoices(tuple(modules), by_weight, decisions)


def _choose(
    path: str,
    module: nn.Module,
    pieces: Sequence[Piece],
    bundles: Sequence[Bundle],
    rules: Rules,
    keeps: bool,
    encodes: bool,
    own: bool,
) -> WeightChoice | None:
    """The choice for one module's weight, or None where nothing about it needs saying."""
    in_codes = any(not bundle.is_plain for bundle in bundles)
    role = rules.kept_role(path)
    if role is not None and (in_codes or (encodes and quantisation_obstacle(module, _ENCODED) is None)):
        return WeightChoice(None, False, f"the family keeps its {role.replace('_', ' ')} in the compute dtype")
    if in_codes:
        if not keeps:
            return WeightChoice(None, False, "dequantised: fp8 is off")
        codec = layer_codec(module, _kept_codec(bundles))
        obstacle = _obstacle(module, codec, pieces, bundles, own)
        if obstacle:
            return WeightChoice(None, False, f"dequantised: {obstacle}")
        return WeightChoice(codec.name, True, "the file's codes and scales as they are")
    if encodes and bundles and quantisation_obstacle(module, _ENCODED) is None:
        return WeightChoice(layer_codec(module, _ENCODED).name, False, "")
    return None


def _obstacle(module: nn.Module, codec: Codec, pieces: Sequence[Piece], bundles: Sequence[Bundle], own: bool) -> str:
    """Why a weight can't keep the file's codes, or ""."""
    if any(bundle.format not in FLOAT8_FORMATS for bundle in bundles):
        return "quantised and plain rows make one weight"
    if any(bundle.weight.dtype != "F8_E4M3" for bundle in bundles):
        return "its codes are e5m2, which no layer keeps"
    if (obstacle := quantisation_obstacle(module, codec)) is not None:
        return obstacle
    if type(module) is not nn.Linear and not own:
        return f"a {type(module).__name__} does not keep codes of another producer"
    if any(piece.operation is not None for piece in pieces):
        return f"the key map's {pieces[0].operation} breaks its scale"
    if any(bundle.granularity == "block" for bundle in bundles):
        return "its scales are block-wise"
    return ""


def _kept_codec(bundles: Sequence[Bundle]) -> Codec:
    """Rows joined from several tensors need a scale for each row; one tensor keeps the reach of its scale."""
    if all(bundle.format == "fp8_raw" for bundle in bundles):
        return Float8("none")
    if len(bundles) == 1 and bundles[0].granularity == "tensor":
        return Float8("tensor")
    return Float8("row")


def _module(
    path: str, module: nn.Module, choice: WeightChoice | None, rules: Rules, compute_dtype: str
) -> list[Module]:
    """The module's line of the plan; tensors that hang on a container, beside other modules, get lines of their own."""
    kind = type(module).__name__
    if any(True for _ in module.children()) or not path:
        names = [f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)]
        return [Module(path=name, kind="Parameter", precision=_dtype_of(name, rules, compute_dtype)) for name in names]
    if choice is not None and choice.codec is not None:
        return [Module(path=path, kind=kind, precision="fp8", codec=choice.codec, reason=choice.reason)]
    name = next(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))
    return [
        Module(
            path=path,
            kind=kind,
            precision=_dtype_of(name, rules, compute_dtype),
            reason=choice.reason if choice else "",
        )
    ]


def _dtype_of(name: str, rules: Rules, compute_dtype: str) -> str:
    return "float32" if rules.stays_fp32(name) else compute_dtype


def _remainder_decision(remainder: str, quantised_file: bool) -> Decision:
    if not quantised_file:
        return Decision(
            requested=remainder, engaged="quantise", reason="the file is not quantised, so all of it is the remainder"
        )
    reason = "what the producer left unquantised stays so" if remainder == "keep" else "as requested"
    return Decision(requested=remainder, engaged=remainder, reason=reason)
