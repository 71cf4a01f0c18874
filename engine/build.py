"""Builds model classes without their weights: on the meta device for a plan, with real buffers for a load."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slipcast.engine.bounds import MOST_TENSORS, BoundedResults, TooLargeError, refuse_large_numbers
from slipcast.engine.libraries import LIBRARIES, import_library, install_hint
from slipcast.engine.materialise import is_bare
from slipcast.registry.errors import ConfigError, FamilyFileError

_REGISTRATION = threading.Lock()
_MOVED = "_slipcast_on_meta"
_FILLING = frozenset({"uniform_", "normal_", "constant_", "kaiming_uniform_", "kaiming_normal_", "fill_", "zero_"})
"""Initialisers of ``torch.nn.init``, and methods of a tensor that others come down to. They return their tensor."""


def model_class(name: str) -> type[nn.Module]:
    """The class that a family file or a plan names, ``diffusers.Name`` or ``transformers.Name``.

    Only public classes of diffusers and transformers that are modules are ever imported, whatever the file says.

    Raises:
        FamilyFileError: another library, or no such class in the installed version.
    """
    library, _, attribute = name.partition(".")
    if attribute.isidentifier() and not attribute.startswith("_"):
        found = getattr(import_library(library), attribute, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    raise FamilyFileError(
        f"the model class {name!r}",
        expected="a model class of an installed library: " + " or ".join(f"{library}.Name" for library in LIBRARIES),
        hint=install_hint(
            "correct model: in the family file, or install the version of the library that has the class"
        ),
        field="model",
    )


def model_classes(library: str) -> list[str]:
    """The names of classes of models that an installed library has, for messages: none of them is imported."""
    endings = ("Model", "Model2D", "Model3D", "Encoder", "LM", "Generation", "Projection", "VAE", "DC")
    module = import_library(library)
    names = [] if module is None else dir(module)
    return [name for name in names if name.endswith(endings) or name.startswith("Autoencoder")]


def pipeline_parameters(name: str) -> frozenset[str] | None:
    """The arguments that calling a pipeline of diffusers takes; None where there is none of the name."""
    if not name.isidentifier() or name.startswith("_"):
        return None
    diffusers = importlib.import_module("diffusers")
    kinds = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    found = getattr(diffusers, name, None)
    if not isinstance(found, type) or not issubclass(found, kinds):
        return None
    return frozenset(inspect.signature(found.__call__).parameters)


def build_on_meta(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Build a model entirely on the meta device, in eval mode: names, shapes and dtypes, no memory.

    Raises:
        ConfigError: the class refuses its arguments, or would count or compute beyond reason by them.
    """
    with BoundedResults(), torch.device("meta"), _WithoutFilling():
        return _construct(name, config)


def build_to_plan(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, bool]:
    """Build a model as ``build_on_meta`` does, and say whether it is also what ``build_with_buffers`` would build.

    That is so where nothing that the constructor made is left but parameters and what a state dict holds: every tensor
    that it was given, whatever still refers to it, is watched.
    """
    with BoundedResults(), torch.device("meta"), _WithoutFilling() as mode:
        model = _construct(name, config)
    return model, is_bare(model, mode.left())


def build_with_buffers(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Build a model with its parameters on the meta device and everything that it computes itself real.

    Buffers, also non-persistent ones, and tensors that a module keeps in plain attributes (rotary tables) are
    computed in the constructor and found in no file, so they have to be made here.
    """
    with _parameters_on_meta(), _WithoutFilling():
        return _construct(name, config)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send each parameter to the meta device as soon as it is registered, before anything is written into it.

    Only in this thread: an application may build other models in other threads at the same time.
    """
    owner = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() == owner and parameter is not None:
            with torch._C.DisableTorchFunction():  # what follows is no call of the class's
                register(module, name, _on_meta(parameter))
        else:
            register(module, name, parameter)

    with _REGISTRATION:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without memory; always the same one, so that what is registered under two names stays tied."""
    if parameter.is_meta:
        return parameter
    found: nn.Parameter | None = getattr(parameter, _MOVED, None)
    if found is None:
        found = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        setattr(parameter, _MOVED, found)
    return found


class _WithoutFilling(TorchFunctionMode):
    """Leaves tensors on the meta device as they are, in this thread, where a class would fill them with first values.

    There is nothing to fill, and torch goes a long way to find that out, once for each parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[ReferenceType[torch.Tensor]] = []

    def left(self) -> list[torch.Tensor]:
        """The tensors on the meta device that calls of torch gave, and that are still there."""
        return [tensor for made in self._made if (tensor := made()) is not None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FILLING:  # by name, as transformers puts its own in the place of torch's
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.is_meta:
                self._made.append(ref(each))
        if len(self._made) > MOST_TENSORS:
            raise TooLargeError(f"it makes more than {MOST_TENSORS:,} tensors")
        return result


def unknown_arguments(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments that the installed version of a class does not know."""
    kind = model_class(name)
    if name.startswith("transformers."):
        return ()
    return tuple(sorted(config.keys() - inspect.signature(kind.__init__).parameters.keys()))


def _config_class(kind: Any) -> Any:
    return kind.config_class


def _refuse_text(kind: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse text for what is a number by default: constructors take it, and fail in a forward. Others check types."""
    for key, parameter in inspect.signature(kind.__init__).parameters.items():
        number = isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
        if number and isinstance(arguments.get(key), str):
            raise TypeError(f"{key} is {arguments[key]!r}, and by default the number {parameter.default}")


def _construct(name: str, config: Mapping[str, Any]) -> nn.Module:
    kind = model_class(name)
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    try:
        described = name.startswith("transformers.")
        if not described:
            _refuse_text(kind, arguments)
            refuse_large_numbers(name, arguments)
        model = kind(_config_class(kind)(**arguments)) if described else kind(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # whatever a class of another library raises
        raise ConfigError(
            f"{name} refuses its configuration: {type(error).__name__}: {error}",
            expected="arguments that the class accepts",
            hint="correct config: in the family file, or the config.json beside the weights",
            items=[f"{key}: {value}" for key, value in arguments.items()],
        ) from error
    return model.eval()
