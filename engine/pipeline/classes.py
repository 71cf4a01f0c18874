"""The classes that parts of a pipeline are made of: public ones of diffusers and transformers, of the kind that fits.

Names of classes also come from files that nobody vouches for; no name is imported that is not one of these.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from slipcast.engine.libraries import LIBRARIES, import_library, install_hint
from slipcast.registry.errors import CompanionError

_PLAIN = (bool, int, float, str)


def pipeline_class(name: str) -> Any:
    """A pipeline of diffusers, modular ones included.

    Raises:
        CompanionError: the installed version has none of the name.
    """
    diffusers = importlib.import_module("diffusers")
    return _public(f"diffusers.{name}", (diffusers.DiffusionPipeline, diffusers.ModularPipeline), "a pipeline")


def is_modular(kind: type) -> bool:
    """Whether a pipeline is put together of blocks, and takes its parts after it is made."""
    return issubclass(kind, importlib.import_module("diffusers").ModularPipeline)


def scheduler_class(name: str) -> Any:
    """A scheduler, by ``diffusers.Name``.

    Raises:
        CompanionError: it is none.
    """
    return _public(name, (importlib.import_module("diffusers").SchedulerMixin,), "a scheduler")


def processor_class(name: str) -> Any:
    """A tokenizer or another processor of inputs, by ``transformers.Name``.

    Raises:
        CompanionError: it is none.
    """
    what = "a tokenizer or processor"
    transformers = import_library("transformers")
    if transformers is None:
        raise _no_class(name, what)
    kinds = (
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        transformers.image_processing_base.ImageProcessingMixin,
    )
    return _public(name, kinds, what)


def own_arguments(kind: type) -> Mapping[str, inspect.Parameter]:
    """What the constructor of a pipeline takes, by name."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def needs_chat_template(kind: Any) -> bool:
    """Whether a pipeline's class puts its prompts into a tokenizer's chat template as it encodes them."""
    encoders = (
        function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if "encode_prompt" in name or "prompt_embeds" in name
    )
    return any("apply_chat_template" in function.__code__.co_names for function in encoders)


def takes_value(kind: Any, name: str, value: Any) -> bool:
    """Whether a plain value of an untrusted file may go to a pipeline's constructor as one of its arguments.

    Parts are no plain values: those without a default, and those that the class calls optional; None leaves one empty.

    Args:
        kind: the pipeline's class.
        name: of one of its arguments.
        value: for it.
    """
    if value is None:
        return True
    default = own_arguments(kind)[name].default
    if default is inspect.Parameter.empty or name in getattr(kind, "_optional_components", ()):
        return False
    if default is None:
        return all(isinstance(item, _PLAIN) for item in (value if isinstance(value, list | tuple) else [value]))
    number = isinstance(default, int | float) and not isinstance(default, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) if number else type(value) is type(default)


def part_names(kind: Any) -> frozenset[str]:
    """What parts a pipeline has, with its arguments that are none."""
    return frozenset(kind()._component_specs if is_modular(kind) else own_arguments(kind))


def _public(name: str, kinds: tuple[type, ...], what: str) -> Any:
    library, _, attribute = name.partition(".")
    if attribute.isidentifier() and not attribute.startswith("_"):
        found = getattr(import_library(library), attribute, None)
        if isinstance(found, type) and issubclass(found, kinds):
            return found
    raise _no_class(name, what)


def _no_class(name: str, what: str) -> CompanionError:
    return CompanionError(
        f"the class {name!r}",
        expected=f"{what} of " + " or ".join(LIBRARIES),
        hint=install_hint(
            "install the version of the library that has the class, and what it needs, such as torchvision; or name "
            "another folder by the setting companions"
        ),
    )
