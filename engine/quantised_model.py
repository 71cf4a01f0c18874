"""Models that tell others the truth about their quantised layers.

Two things are asked of a model's class rather than of its instances: ``model.dtype``, which pipelines read to make
inputs of the right dtype and which would say float8, and the JSON that ``save_pretrained`` writes. So a model with
quantised layers becomes an instance of a subclass of its own class, made once for each class, that differs in these
answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

from slipcast.engine.compute_dtype import compute_dtype
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.errors import QuantisationError, UnsupportedFormatError
from slipcast.registry.saved_layers import FULL_PRECISION

QUANT_METHOD = "slipcast"
CONFIG_VERSION = 1

Model = TypeVar("Model", bound=nn.Module)


def mark_quantised_(model: Model) -> Model:
    """Make a model report its compute dtype as ``model.dtype``, and its quantised layers in the config that it saves.

    The folder that ``save_pretrained`` writes then has a ``quantization_config`` that diffusers does not know, so that
    it refuses the folder rather than take codes for weights. Class name, module, config, ``isinstance``, pickling and
    ``copy.deepcopy`` stay what they were. Marking twice changes nothing.

    Returns:
        The model.
    """
    plain: Any = type(model)
    if not issubclass(plain, _Reporting):
        model.__class__ = _reporting_class(plain)
    return model


def quantization_config(model: nn.Module) -> dict[str, Any] | None:
    """What a saved model says of its quantised layers; None of a model that has none.

    ``modules`` maps the dotted path of each quantised layer to the name of its codec (see ``codec_named``); its weight
    lies in the state dict as ``path.weight`` and ``path.weight_scale``. ``full_precision_matrix_mult`` lists the layers
    that the producer of the file marked for products in full precision.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantisedModule)}
    if not layers:
        return None
    return description(
        str(compute_dtype(model)).removeprefix("torch."),
        {path: module.codec.name for path, module in layers.items()},
        [path for path, module in layers.items() if module.full_precision],
    )


def description(compute_dtype: str, codecs: Mapping[str, str], full_precision: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder.

    Args:
        compute_dtype: torch's name of the dtype to compute in.
        codecs: dotted path of each quantised layer -> the name of its codec.
        full_precision: paths of those that are marked for products in full precision.
    """
    precise = sorted(full_precision)
    return {
        "quant_method": QUANT_METHOD,
        "version": CONFIG_VERSION,
        "compute_dtype": compute_dtype,
        "modules": dict(codecs),
        **({FULL_PRECISION: precise} if precise else {}),
    }


class _Reporting(nn.Module):
    """What the subclasses answer otherwise than the classes that they are made of."""

    _plain_class: type[nn.Module]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return compute_dtype(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Refer to the plain class, which a pickle finds by its name; rebuilding makes the subclass again."""
        _, (_, *arguments), *state = cast("tuple[Any, ...]", super().__reduce_ex__(max(2, int(protocol))))
        return _rebuild, (self._plain_class, *arguments), *state


class _SavingReporting(_Reporting):
    """The same for a class that writes a config, as those of diffusers do."""

    def to_json_string(self) -> str:
        """The config as JSON, with the quantised layers."""
        plain: Any = super()
        config = json.loads(plain.to_json_string())
        described = quantization_config(self)
        if described is not None:
            config["quantization_config"] = described
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        """As the plain class does, but not in a format that casts every tensor to one dtype."""
        if options.get("use_flashpack"):
            raise UnsupportedFormatError(
                "a quantised model to be saved with FlashPack, which casts every tensor to one dtype",
                expected="a format that keeps codes and scales",
                hint="save it without use_flashpack",
            )
        plain: Any = super()
        return plain.save_pretrained(*arguments, **options)


class _Fusing(nn.Module):
    """The same for a class that fuses adapters into its weights."""

    def fuse_lora(self, *arguments: Any, **options: Any) -> Any:
        """As the plain class does, but not into codes: refused before any layer is scaled or merged.

        Raises:
            QuantisationError: a quantised layer has an adapter.
        """
        layers = [path for path, module in self.named_modules() if _adapts_codes(module)]
        if layers:
            raise QuantisationError(
                f"adapters to be fused into {len(layers)} quantised layers",
                expected="adapters that work beside quantised layers, whose codes stay as they are",
                hint="leave out fusing, without which adapters have their full effect; or load the model with fp8=off, "
                "which gives weights to fuse into",
                items=layers,
            )
        plain: Any = super()
        return plain.fuse_lora(*arguments, **options)


def _adapts_codes(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), QuantisedModule)


@cache
def _reporting_class(plain: Any) -> Any:
    answers: list[type[nn.Module]] = [_SavingReporting if hasattr(plain, "to_json_string") else _Reporting]
    if hasattr(plain, "fuse_lora"):
        answers.append(_Fusing)
    same = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain)(plain.__name__, (*answers, plain), {**same, "_plain_class": plain})


def _rebuild(plain: Any, *arguments: Any) -> Any:
    kind = _reporting_class(plain)
    return kind.__new__(kind, *arguments)
