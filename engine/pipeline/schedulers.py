"""Schedulers of configurations that nobody vouches for: values are checked, and tried on a few numbers, before use."""

from __future__ import annotations

import inspect
import math
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slipcast.engine.pipeline.classes import scheduler_class
from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError
from slipcast.registry.untrusted_files import read_json_object
from slipcast.registry.validation import did_you_mean

_FILE = "scheduler_config.json"
_LIMIT_MIB = 4
_LARGEST_COUNT = 100_000
"""The longest table that a configuration may ask for; published schedulers have 1000 steps."""
_STEPS = 4
_TABLES = ("betas", "alphas_cumprod", "sigmas", "timesteps")


def make_scheduler(companion: Companion) -> Any:
    """The scheduler of a folder, a file or a family's arguments.

    Raises:
        CompanionError: it is no scheduler, or its configuration has values that no scheduler can have.
        HeaderError: the file is missing, or no JSON.
    """
    kind = scheduler_class(companion.class_name)
    config = _config(companion)
    _refuse_values(kind, config, companion)
    return kind(**config) if companion.path is None else kind.from_config(config)


def check_scheduler(companion: Companion) -> None:
    """Refuse a configuration with which the scheduler fails, or gives values that are not finite.

    Beside the values' types, a few steps on random numbers are tried. Where a class's own defaults don't pass such a
    trial, it says nothing, and nothing is refused by it.

    Args:
        companion: the scheduler.

    Raises:
        CompanionError: it names the file, the key, the value and what is expected.
        HeaderError: the file is missing, or no JSON.
    """
    kind = scheduler_class(companion.class_name)
    config = _config(companion)
    _refuse_values(kind, config, companion)
    known = {key: value for key, value in config.items() if key in _arguments(kind)}
    trouble = _trouble(kind, known)
    if trouble is None:
        return
    needed = {key: known[key] for key, argument in _arguments(kind).items() if _is_needed(argument) and key in known}
    if _trouble(kind, needed) is not None:
        return
    suspects = sorted(
        (key for key in known if key not in needed), key=lambda key: isinstance(known[key], bool)
    )  # switches come last
    guilty = next((key for key in suspects if _is_cured(kind, known, key)), None)
    if guilty is None:
        items = [f"{key}: {_short(value)}" for key, value in known.items()]
        raise _refusal(companion, f"values with which {kind.__name__} {trouble}", "values that go together", items)
    default = _arguments(kind)[guilty].default
    raise _refusal(
        companion,
        f"{guilty} is {_short(known[guilty])}, with which {kind.__name__} {trouble}",
        f"a value that works, as the class's own {guilty}: {_short(default)}",
    )


def _config(companion: Companion) -> dict[str, Any]:
    """What a scheduler is made of, by name."""
    file = _file(companion)
    if file is None:
        return dict(companion.arguments)
    return read_json_object(file, limit_mib=_LIMIT_MIB, constants=True)  # published files have -Infinity


def _file(companion: Companion) -> Path | None:
    path = companion.path
    return path / _FILE if path is not None and path.is_dir() else path


def _arguments(kind: Any) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(kind.__init__).parameters
    return {name: value for name, value in parameters.items() if name != "self" and value.kind != value.VAR_KEYWORD}


def _is_needed(argument: inspect.Parameter) -> bool:
    return argument.default is argument.empty


def _refuse_values(kind: Any, config: Mapping[str, Any], companion: Companion) -> None:
    """Refuse keys that no scheduler has, and values of another type or of no bound."""
    arguments = _arguments(kind)
    for key, value in config.items():
        if key.startswith("_"):
            continue
        if key not in arguments:
            _refuse_unknown(kind, key, value, companion)
            continue
        expected = _expected(arguments[key], value)
        if expected is not None:
            raise _refusal(companion, f"{key} is {_short(value)}", expected)


def _refuse_unknown(kind: Any, key: str, value: Any, companion: Companion) -> None:
    """Refuse what no scheduler knows; what another one does is passed over, as files were saved by related classes."""
    import diffusers

    for name in dir(diffusers):
        other = getattr(diffusers, name) if name.endswith("Scheduler") else None
        if isinstance(other, type) and key in inspect.signature(other.__init__).parameters:  # type: ignore[misc]
            return
    known = list(_arguments(kind))
    raise _refusal(
        companion,
        f"{key} is {_short(value)}, and no scheduler has such a key",
        f"keys of {kind.__name__}: {', '.join(known)}",
        hint=did_you_mean(key, known, "remove the key, or install the version of diffusers that knows it"),
    )


def _expected(argument: inspect.Parameter, value: Any) -> str | None:
    """What is expected in place of a value; None where it will do."""
    default, annotation = argument.default, argument.annotation
    options = typing.get_args(annotation)
    if value is None:
        fits = default is None or isinstance(default, bool) or type(None) in options
        return None if fits else f"a value like {_short(default)}"
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > _LARGEST_COUNT:
        return f"at most {_LARGEST_COUNT:,} values"
    for number in numbers:
        if isinstance(number, int) and abs(number) > _LARGEST_COUNT:
            return f"a whole number up to {_LARGEST_COUNT:,}"
        if isinstance(number, float) and not math.isfinite(number) and number != default:
            return "a finite number"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if annotation is int and type(value) is not int:
        return "a whole number"
    if isinstance(default, int | float):
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a text"
    if isinstance(default, list | tuple):
        return None if isinstance(value, list) else "a list"
    return None if isinstance(value, bool | int | float | str | list) else "a plain value"


def _is_cured(kind: Any, config: Mapping[str, Any], key: str) -> bool:
    """Whether a scheduler works without a key's value."""
    return _trouble(kind, {name: value for name, value in config.items() if name != key}) is None


def _trouble(kind: Any, config: Mapping[str, Any]) -> str | None:
    """What a scheduler of a configuration does wrong, as a clause; None where it works."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return next(_faults(kind, config), None)
    except Exception as error:  # whatever a class of another library raises
        return f"fails: {type(error).__name__}: {str(error)[:300]}"


def _faults(kind: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a scheduler's tables, then with what it makes of random numbers in a few steps."""
    random = torch.Generator().manual_seed(0)
    for shift in _shifts(kind, config):
        scheduler = kind(**config)
        yield from _table_faults(scheduler)
        scheduler.set_timesteps(_STEPS, **shift)
        yield from _table_faults(scheduler)
        sample = torch.randn(1, 4, 8, 8, generator=random)
        for timestep in scheduler.timesteps:
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(sample, timestep)
            output = torch.randn(sample.shape, generator=random)
            sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
        if not bool(sample.isfinite().all()):
            yield "makes latents that are not finite"


def _shifts(kind: Any, config: Mapping[str, Any]) -> list[dict[str, float]]:
    """The arguments of a schedule that depends on the picture's size, as pipelines make them, at both ends; or none."""
    defaults = {name: value.default for name, value in _arguments(kind).items()}
    values = {**defaults, **config}
    if not values.get("use_dynamic_shifting") or "mu" not in inspect.signature(kind.set_timesteps).parameters:
        return [{}]
    lengths = [values.get(f"{end}_image_seq_len") for end in ("base", "max")]
    if None not in lengths and lengths[0] == lengths[1]:
        raise ValueError("a shift between two equal lengths")
    ends = [values.get(f"{end}_shift") for end in ("base", "max")]
    return [{"mu": mu} for mu in ends if mu is not None] or [{"mu": 1.0}]


def _table_faults(scheduler: Any) -> Iterator[str]:
    for name in _TABLES:
        table = getattr(scheduler, name, None)
        if not isinstance(table, torch.Tensor):
            continue
        if not bool(table.isfinite().all()):
            yield f"makes {name} that are not finite"
        if name != "timesteps" and bool((table < 0).any()):
            yield f"makes {name} below zero"
        if name == "betas" and bool((table > 1).any()):
            yield f"makes {name} above one"
        if name == "sigmas" and not bool(table.any()):
            yield f"makes {name} that are all zero"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refusal(
    companion: Companion, found: str, expected: str, items: list[str] | None = None, *, hint: str | None = None
) -> CompanionError:
    told = companion.path is not None
    otherwise = "correct it, or download the folder again, or name another by the setting companions."
    return CompanionError(
        f"as the {companion.role}: {found}",
        expected=expected,
        hint=hint or (f"{otherwise}{companion.role}" if told else "correct sampling.scheduler in the family file"),
        path=_file(companion),
        items=items or (),
        roles=(companion.role,),
    )
