"""Plausible wrong edits of the facts of a family file: other names that exist, numbers that are off, flags turned."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipcast.engine.build import model_class
from slipcast.engine.check.pipeline_source import is_number, pipeline_source
from slipcast.engine.check.subject import Subject
from slipcast.registry.companions import is_class, kind_of_role
from slipcast.registry.family import Family
from support.mutations import Data, misspelt

Path = tuple[str | int, ...]
GONE = object()
_OTHERS = {
    "model": "diffusers.AutoencoderKLMochi",
    "tokenizer": "transformers.WhisperTokenizer",
    "scheduler": "diffusers.LCMScheduler",
}
_PIPELINES = ("FluxPipeline", "WanPipeline")


@dataclass(frozen=True)
class WrongFact:
    """A family file with one wrong fact.

    Attributes:
        kind: which fact, without the variant or role that it is of.
        path: its entry.
        what: what stands there instead.
        data: what the file holds.
    """

    kind: str
    path: Path
    what: str
    data: Data

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))} {self.what}"


def wrong_facts(data: Data, subject: Subject) -> Iterator[WrongFact]:
    """All of them for one file."""
    family = subject.family
    for place in [(), *(("variants", name) for name in data.get("variants", {}))]:
        here = _at(data, place)
        sampling = here.get("sampling") or {}
        joined = {**(data.get("sampling") or {}), **sampling}
        yield from _pipelines(data, (*place, "sampling"), sampling, joined)
        yield from _numbers(data, (*place, "sampling"), sampling)
        yield from _takes(data, (*place, "sampling", "takes"), sampling.get("takes") or {}, family)
        yield from _values(data, (*place, "sampling", "scheduler"), sampling.get("scheduler") or {}, "scheduler")
        yield from _values(data, (*place, "sampling", "arguments"), sampling.get("arguments") or {}, "arguments")
        yield from _companions(data, (*place, "companions"), here.get("companions") or {}, subject)
        for number, word in enumerate(here.get("guess_from_filename") or ()):
            yield _wrong(data, (*place, "guess_from_filename", number), misspelt(word, 0))
    yield from _runtime(data, subject)
    yield from _precision(data)
    yield from _other_files(data, subject)


def _wrong(data: Data, path: Path, value: Any, kind: str = "") -> WrongFact:
    """The file with another value in one entry, or without the entry."""
    changed = copy.deepcopy(data)
    around = _at(changed, path[:-1])
    if value is GONE:
        del around[path[-1]]
    else:
        around[path[-1]] = value
    names = [str(step) for step in path if isinstance(step, str)]
    bare = names[2:] if names[0] == "variants" else names
    return WrongFact(kind or ".".join(bare[:2]), path, "left out" if value is GONE else f"-> {value!r}", changed)


def _renamed(data: Data, path: Path, key: str) -> WrongFact:
    """The file with another key in one entry."""
    changed = copy.deepcopy(data)
    around = _at(changed, path[:-1])
    entries = {key if old == path[-1] else old: value for old, value in around.items()}
    around.clear()
    around.update(entries)
    kind = ".".join(str(step) for step in path[:-1] if isinstance(step, str)) + " name"
    return WrongFact(kind.split("sampling.")[-1], path, f"-> {key}", changed)


def _at(data: Any, path: Iterable[str | int]) -> Any:
    for step in path:
        data = data[step]
    return data


def _pipelines(data: Data, at: Path, said: Data, joined: Data) -> Iterator[WrongFact]:
    if not joined.get("pipeline"):
        return
    source = pipeline_source(joined["pipeline"])
    assert source is not None
    if said.get("pipeline"):
        yield from (_wrong(data, (*at, "pipeline"), name) for name in _PIPELINES if name != said["pipeline"])
        yield _wrong(data, (*at, "pipeline"), misspelt(said["pipeline"], 0))
    if said.get("image_to_image"):
        yield _wrong(data, (*at, "image_to_image"), "FluxInpaintPipeline")
        if "image" not in source.call:
            yield _wrong(data, (*at, "image_to_image"), joined["pipeline"])
    if said.get("denoiser"):
        yield _wrong(data, (*at, "denoiser"), GONE)
        yield _wrong(data, (*at, "denoiser"), "vae")
    if said.get("guidance_argument"):
        numbers = [
            name for name, value in source.call.items() if is_number(value) and name != said["guidance_argument"]
        ]
        yield from (_wrong(data, (*at, "guidance_argument"), name) for name in numbers[:3])
        yield from (_wrong(data, (*at, "guidance_argument"), n) for n in numbers[3:] if "cfg" in n or "guidance" in n)
        yield _wrong(data, (*at, "guidance_argument"), misspelt(said["guidance_argument"], 0))


_STEPS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "steps": lambda n: (n * 2, n + 5),
    "guidance": lambda n: (n * 2 or 3.0, n + 1.5),
    "latent_channels": lambda n: (n * 2, n // 2 or 1),
    "latent_scale": lambda n: (n * 2, n // 2),
    "size_multiple": lambda n: (n * 2, n // 2),
    "latent_frames": lambda n: (n * 2, n // 2, GONE),
    "frame_rate": lambda n: (n * 2, n - 1),
}


def _numbers(data: Data, at: Path, said: Data) -> Iterator[WrongFact]:
    for name, others in _STEPS.items():
        if said.get(name) is not None:
            yield from (_wrong(data, (*at, name), value) for value in others(said[name]))


def _takes(data: Data, at: Path, said: Data, family: Family) -> Iterator[WrongFact]:
    arguments = list(inspect.signature(model_class(family.model).__init__).parameters)[1:]
    for role, argument in said.items():
        yield _wrong(data, (*at, role), misspelt(argument, 0))
        yield from (_wrong(data, (*at, role), other) for other in arguments[:8:3] if other != argument)


def _values(data: Data, at: Path, said: Data, kind: str) -> Iterator[WrongFact]:
    for name, value in said.items():
        yield _renamed(data, (*at, name), misspelt(name, 0))
        if isinstance(value, bool):
            yield _wrong(data, (*at, name), not value, f"{kind} flag")
        elif is_number(value):
            yield _wrong(data, (*at, name), value * 2 or 1, f"{kind} number")
            yield _wrong(data, (*at, name), "fast", f"{kind} kind")
        elif isinstance(value, str):
            yield _wrong(data, (*at, name), misspelt(value, 0), f"{kind} word")


def _companions(data: Data, at: Path, said: Data, subject: Subject) -> Iterator[WrongFact]:
    for role, companion in said.items():
        yield _renamed(data, (*at, role), misspelt(role, 0))
        if is_class(companion):
            if companion != _OTHERS[kind_of_role(role)]:
                yield _wrong(data, (*at, role), _OTHERS[kind_of_role(role)], "companion class")
            yield _wrong(data, (*at, role), misspelt(companion, 1), "companion class misspelt")
            continue
        id_, _, variant = companion.partition("/")
        yield _wrong(data, (*at, role), misspelt(id_, 0), "companion family misspelt")
        known = subject.catalogue
        alike = [other for other in known if known[other].kind == known[id_].kind and known[other].title != id_]
        others = [other for other in alike if other != id_ and not other.endswith("-text")]
        yield from (_wrong(data, (*at, role), other, "companion family") for other in others[::4])
        if variant:
            yield _wrong(data, (*at, role), f"{id_}/{variant}x", "companion variant misspelt")
            more = [name for name in known[id_].variants if name != variant]
            yield from (_wrong(data, (*at, role), f"{id_}/{name}", "companion variant") for name in more[:2])


def _runtime(data: Data, subject: Subject) -> Iterator[WrongFact]:
    runtime = data.get("runtime") or {}
    built = subject.built[0].model
    at: Path = ("runtime", "compile", "blocks")
    blocks = (runtime.get("compile") or {}).get("blocks") or []
    inside = {type(module).__name__ for module in built.modules() if any(module.children())} - {type(built).__name__}
    for number, block in enumerate(blocks):
        for other in sorted(inside - {*blocks, "ModuleList"})[:3]:
            yield _wrong(data, (*at, number), other)
        yield _wrong(data, (*at, number), misspelt(block, 0))
    if len(blocks) > 1:
        yield _wrong(data, (*at[:-1], "blocks"), blocks[1:])
    if blocks:
        yield _wrong(data, ("runtime", "compile"), {"unsupported": "they differ"})
    at = ("runtime", "offload", "blocks")
    lists = [name for name, module in built.named_modules() if isinstance(module, nn.ModuleList)]
    said = (runtime.get("offload") or {}).get("blocks") or []
    for number, name in enumerate(said):
        yield from (_wrong(data, (*at, number), other) for other in [each for each in lists if each not in said][:3])
        yield _wrong(data, (*at, number), misspelt(name, 0))
    if len(said) > 1:
        yield _wrong(data, at, said[1:])
        yield _wrong(data, at, said[:-1])
    for name in ("activation_bytes_per_token", "decode_bytes_per_pixel", "encode_bytes_per_pixel"):
        if runtime.get(name) is not None:
            yield from (_wrong(data, ("runtime", name), runtime[name] * factor) for factor in (10, 0.1))
    if runtime.get("frames_at_once") is not None:
        yield from (_wrong(data, ("runtime", "frames_at_once"), runtime["frames_at_once"] * by) for by in (2, 4))


def _precision(data: Data) -> Iterator[WrongFact]:
    precision = data.get("precision") or {}
    at: Path = ("precision",)
    if "fp16" in precision:
        yield _wrong(data, (*at, "fp16"), "safe" if precision["fp16"] == "unsafe" else "unsafe")
    if precision.get("compute") == "checkpoint":
        yield _wrong(data, (*at, "compute"), "float16")
    if precision:
        others = [name for name in ("float16", "float32") if name != precision.get("compute_default")]
        yield from (_wrong(data, (*at, "compute_default"), name) for name in others)
        yield _wrong(data, (*at, "nvfp4_layout"), "comfy")
    for number, place in enumerate(precision.get("keep_fp32") or ()):
        yield _wrong(data, (*at, "keep_fp32", number), misspelt(place, 1))
        rest = [other for other in precision["keep_fp32"] if other != place]
        yield _wrong(data, (*at, "keep_fp32"), rest, "precision.keep_fp32 one left out")
    fp8 = precision.get("fp8") or {}
    for field, value in ((name, fp8[name]) for name in ("storage", "compute") if name in fp8):
        if value == "supported":
            yield _wrong(data, (*at, "fp8", field), {"unsupported": "it fails"}, f"fp8 {field} refused")
            yield _wrong(data, (*at, "fp8", field), {"not_applicable": "little"}, f"fp8 {field} refused")
        else:
            yield _wrong(data, (*at, "fp8", field), "supported", f"fp8 {field} claimed")
    if fp8:
        yield _wrong(data, (*at, "fp8", "activation_scale"), "tensor")


def _other_files(data: Data, subject: Subject) -> Iterator[WrongFact]:
    known = subject.catalogue
    for number, prefix in enumerate(data.get("prefixes") or ()):
        if prefix:
            yield _wrong(data, ("prefixes", number), misspelt(prefix, 0), "prefixes")
    for prefix, id_ in (data.get("contains") or {}).items():
        changed = _renamed(data, ("contains", prefix), misspelt(prefix, 0))
        yield changed
        yield _wrong(data, ("contains", prefix), misspelt(id_, 0), "contains family misspelt")
        alike = [other for other in known if known[other].kind == known[id_].kind and other != id_]
        yield from (_wrong(data, ("contains", prefix), other, "contains family") for other in alike[:6:2])
    for name, naming in (data.get("namings") or {}).items():
        for number, architecture in enumerate(naming.get("architectures") or ()):
            path = ("namings", name, "architectures", number)
            yield _wrong(data, path, misspelt(architecture, 0), "architectures misspelt")
            yield _wrong(data, path, "falcon", "architectures other")
    for id_, serves in (data.get("serves") or {}).items():
        yield _renamed(data, ("serves", id_), misspelt(id_, 0))
        yield _wrong(data, ("serves", id_, "inside"), misspelt(serves["inside"], 0), "serves inside")
        for number, layer in enumerate(serves.get("identity") or ()):
            yield _wrong(data, ("serves", id_, "identity", number), misspelt(layer, 0), "serves identity")
