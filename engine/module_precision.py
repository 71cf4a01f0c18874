"""The one answer to "does this layer stay quantised?": cast, prediction, log line and report all read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from slipcast.engine.accounting import Accounts
from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.fp8_products import IN_COMPUTE_DTYPE, Products, choose_products
from slipcast.engine.kept_codes import CodedRows, kept_codec
from slipcast.engine.layers import layer_codec, quantisation_obstacle
from slipcast.engine.plan import Decision, Module
from slipcast.engine.precision import Rules
from slipcast.engine.saved_quantisation import SavedQuantisation
from slipcast.registry.identify import Match
from slipcast.registry.settings_model import Fp8Settings

_ENCODED: Mapping[str, Codec] = {"float8": Float8("row"), "nvfp4": NVFP4("comfy")}
"""What a plain weight is quantised to, by the setting fp8.weights."""


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """How one weight is kept.

    Attributes:
        codec: name of the codec, or None for the compute dtype.
        keep: whether the file's own codes and scales are taken as they are.
        reason: why.
        products: how the layer multiplies.
        full_precision: whether the producer of its codes marks it for products in full precision.
    """

    codec: str | None
    keep: bool
    reason: str
    products: Products = IN_COMPUTE_DTYPE
    full_precision: bool = False


@dataclass(frozen=True, slots=True)
class ModuleChoices:
    """The precision of every module.

    Attributes:
        modules: in the model's order.
        by_weight: name of each weight that a rule bears on -> the choice for it.
        remainder: what became of the setting fp8.remainder; None where fp8 is off.
    """

    modules: tuple[Module, ...]
    by_weight: Mapping[str, WeightChoice]
    remainder: Decision | None


@dataclass(frozen=True, slots=True)
class ModuleChooser:
    """What the choice rests on.

    Attributes:
        match: the identified checkpoint.
        accounts: which pieces of the file make which weight.
        codecs: the codec of each weight of the file that is in codes.
        tied: names of tensors that are one with another.
        rules: the family's precision rules.
        saved: what a config.json says of layers that slipcast quantised.
        compute_dtype: torch's name of the engaged compute dtype.
        fp8: the engaged fp8 mode: ``off``, ``keep``, ``storage`` or ``compute``.
        settings: for what happens in a quantised file to weights that are not, and for which layers multiply in float8.
    """

    match: Match
    accounts: Accounts
    codecs: Mapping[str, Codec]
    tied: frozenset[str]
    rules: Rules
    saved: SavedQuantisation
    compute_dtype: str
    fp8: str
    settings: Fp8Settings

    def choose(self, model: nn.Module) -> ModuleChoices:
        """Choose for every module of a model on the meta device."""
        modules: list[Module] = []
        by_weight: dict[str, WeightChoice] = {}
        for path, module in model.named_modules():
            choice = self._weight_choice(path, module)
            if choice is not None:
                by_weight[f"{path}.weight"] = choice
            modules += self._lines(path, module, choice)
        return ModuleChoices(tuple(modules), by_weight, self._remainder_decision())

    @property
    def _file_is_quantised(self) -> bool:
        return bool(self.codecs)

    @property
    def _encodes(self) -> bool:
        """Whether plain weights are quantised."""
        return self.fp8 in ("storage", "compute") and (
            self.settings.remainder == "quantise" or not self._file_is_quantised
        )

    @property
    def _encoded(self) -> Codec:
        """What plain weights are quantised to."""
        return _ENCODED[self.settings.weights]

    def _weight_choice(self, path: str, module: nn.Module) -> WeightChoice | None:
        """The choice for a module's weight, or None where nothing about it needs saying."""
        rows = [
            CodedRows(piece, self.match.everything.weights[piece.source], self.codecs.get(piece.source))
            for piece in self.accounts.pieces.get(f"{path}.weight", ())
        ]
        if not rows:
            return None
        in_codes = any(each.codec is not None for each in rows)
        if not in_codes and not (self._encodes and quantisation_obstacle(module, self._encoded) is None):
            return None
        reason = self.rules.stays_plain(path, self.tied)
        if reason:
            return WeightChoice(None, False, reason)
        return self._kept_choice(path, module, rows) if in_codes else self._new_choice(module, rows, reason="")

    def _kept_choice(self, path: str, module: nn.Module, rows: Sequence[CodedRows]) -> WeightChoice:
        if self.fp8 == "off":
            return WeightChoice(None, False, "dequantised: fp8 is off")
        codec, obstacle = kept_codec(module, rows, self.saved.codecs.get(path))
        if codec is None:
            if self._encodes and quantisation_obstacle(module, self._encoded) is None:
                return self._new_choice(module, rows, reason=f"quantised anew, as fp8.remainder asks: {obstacle}")
            return WeightChoice(None, False, f"dequantised: {obstacle}")
        return self._with_products(module, codec, rows, keep=True, reason="the file's codes and scales as they are")

    def _new_choice(self, module: nn.Module, rows: Sequence[CodedRows], reason: str) -> WeightChoice:
        """The choice for a weight that is to be quantised, from plain values or from codes that no layer keeps."""
        codec = layer_codec(module, self._encoded)
        if len(rows) > 1 and not codec.streams:
            return WeightChoice(None, False, f"{codec.name} needs all rows at once, which several tensors hold")
        return self._with_products(module, codec, rows, keep=False, reason=reason)

    def _with_products(
        self, module: nn.Module, codec: Codec, rows: Sequence[CodedRows], *, keep: bool, reason: str
    ) -> WeightChoice:
        bundles = [each.bundle for each in rows]
        marked = any(bundle.full_precision for bundle in bundles)
        if self.fp8 != "compute":
            return WeightChoice(codec.name, keep, reason, full_precision=marked)
        products = choose_products(module, codec, bundles, self.match.header, kept=keep, settings=self.settings)
        return WeightChoice(codec.name, keep, "; ".join(filter(None, (reason, products.reason))), products, marked)

    def _lines(self, path: str, module: nn.Module, choice: WeightChoice | None) -> Iterator[Module]:
        """The module's line of the plan. Tensors that hang on a container, beside modules, get their own."""
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        names = [f"{path}.{name}" if path else name for name in own]
        kind = type(module).__name__
        if choice is not None and choice.codec is not None:
            yield Module(
                path=path,
                kind=kind,
                precision=precision_of(choice.codec),
                codec=choice.codec,
                products="fp8" if choice.products.in_fp8 else None,
                activation_scale=self._activation_scale(choice.products),
                full_precision=choice.full_precision,
                reason=choice.reason,
            )
        elif path and names and next(module.children(), None) is None:
            reason = choice.reason if choice is not None else ""
            yield Module(path=path, kind=kind, precision=self._dtype_of(names[0]), reason=reason)
        else:
            for name in names:
                yield Module(path=name, kind="Parameter", precision=self._dtype_of(name))

    def _activation_scale(self, products: Products) -> Literal["row", "tensor", "static"] | None:
        if not products.in_fp8:
            return None
        return "static" if products.static_scale else self.match.family.precision.fp8.activation_scale

    def _dtype_of(self, name: str) -> str:
        return "float32" if self.rules.stays_fp32(name) else self.compute_dtype

    def _remainder_decision(self) -> Decision | None:
        if self.fp8 == "off":
            return None
        if self.fp8 == "keep":
            reason = "a file in other codes than fp8 stays as it is"
            return Decision(requested=self.settings.remainder, engaged="keep", reason=reason)
        if not self._file_is_quantised:
            reason = "the file is not quantised, so this has no bearing"
        elif self.settings.remainder == "keep":
            reason = "what the producer left unquantised stays so"
        else:
            reason = "as requested"
        return Decision(requested=self.settings.remainder, engaged=self.settings.remainder, reason=reason)


def precision_of(codec: str) -> str:
    """The word for a codec's precision, as plans list it: ``fp8``, ``int8``, ``mxfp8``, ``nvfp4`` or ``gguf``."""
    format_ = codec.partition("/")[0]
    return "fp8" if format_.startswith("float8") else format_
