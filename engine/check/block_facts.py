"""Proofs of what a file says of running the model: the repeated blocks, and the orders of magnitude of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from slipcast.engine.build import model_class
from slipcast.engine.check.fact import Fact, judged
from slipcast.engine.check.header_proofs import why_nothing_built
from slipcast.engine.check.proof import Outcome, skipped
from slipcast.engine.check.subject import Built, Subject
from slipcast.engine.check.vae_shapes import shapes_of_match
from slipcast.registry.keymap.place import Place, parse_place

_SOME, _MUCH = 0.01, 0.1
"""What part of a model's parameters a list of blocks holds at least, and one that has to be named."""
_LEAST, _MOST = 0.5, 6.0
"""How many times what its widest layer takes and gives in 16 bits a model's activations come to at their peak, as
measured: 0.7 to 4.4 times. Ten times as many, or as few, are outside."""
_BYTES = 2
_SIMPLE = 6
"""How many modules something has at most, itself included, that is no block."""
_LISTS = "its lists of blocks"
_REPEATED = "the class's repeated blocks"


def prove_blocks(subject: Subject) -> Outcome:
    """What is compiled or moved block by block are the repeated blocks; what was measured is of the right order."""
    if not subject.built:
        return skipped(why_nothing_built(subject))
    return judged(subject, (*_compiled(subject), *_moved(subject), *_measured(subject), *_of_vae(subject)))


def _compiled(subject: Subject) -> Iterator[Fact]:
    """That the classes to compile are those that repeat: that the class declares, or that its outermost lists hold."""
    compiled = subject.family.runtime.compile
    declared, by = _declared(subject)
    where = ("runtime", "compile", "blocks")
    if compiled is None:
        return
    if not compiled.blocks:
        repeated = getattr(model_class(subject.family.model), "_repeated_blocks", None)
        against = f"{subject.family.model} says that {', '.join(repeated)} repeat" if repeated else ""
        said = "no blocks to compile"
        yield Fact(where[:2], said, "" if repeated else "the reason that the file gives", against, final=bool(repeated))
        return
    for number, name in enumerate(compiled.blocks):
        if name in declared:
            yield Fact((*where, number), name, by)
        else:
            against = f"{' or '.join(sorted(declared)) or 'no class'} repeats, by {by}"
            yield Fact((*where, number), name, against=against, final=True)
    for name in sorted(declared - set(compiled.blocks)) if by != _LISTS else ():
        yield Fact(where, f"nothing of {name}", against=f"it repeats too, by {by}")


def _declared(subject: Subject) -> tuple[set[str], str]:
    """The classes of the repeated blocks, and what shows them."""
    kind = model_class(subject.family.model)
    inside = {type(module).__name__ for built in subject.built for module in built.model.modules()}
    lists = [blocks for built in subject.built for _, blocks in _lists(built)]
    held = {type(block).__name__ for blocks in lists for block in blocks}
    repeated = set(getattr(kind, "_repeated_blocks", None) or ()) & inside
    if repeated:
        return (repeated & held or repeated), _REPEATED
    unsplit = set(getattr(kind, "_no_split_modules", None) or ()) & held
    if unsplit:
        return unsplit, "the class's modules that are not split"
    return {type(blocks[0]).__name__ for blocks in lists if _is_one_kind(blocks)}, _LISTS


def _is_one_kind(blocks: list[nn.Module]) -> bool:
    return len(blocks) > 1 and len({type(block) for block in blocks}) == 1


def _lists(built: Built) -> Iterator[tuple[str, list[nn.Module]]]:
    """The outermost lists of a model's modules, by their paths."""
    outer: list[str] = []
    for path, module in built.model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{name}.") for name in outer):
            outer.append(path)
            yield path, list(module)


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _moved(subject: Subject) -> Iterator[Fact]:
    """That the lists to move block by block hold the model's blocks, none inside another, and all that repeat."""
    offload = subject.family.runtime.offload
    if offload is None:
        return
    where = ("runtime", "offload", "blocks")
    compiled = set(subject.family.runtime.compile.blocks) if subject.family.runtime.compile is not None else set()
    declared = compiled | _declared(subject)[0]
    places = [parse_place(text) for text in offload.blocks]
    for number, place in enumerate(places):
        fits = any(_holds_blocks(built, place, declared) for built in subject.built)
        against = f"no list there holds the model's blocks: {', '.join(sorted(declared))}"
        yield Fact((*where, number), str(place), "the model's lists" if fits else "", against, final=not fits)
    examples = [case.built for case in subject.cases if case.built is not None]
    missing = {
        path
        for built in subject.built
        for path, blocks in _lists(built)
        if not any(_covers(place, path) for place in places)
        and (_kinds_inside(blocks) & compiled or (built in examples and len(blocks) > 1 and _is_much(built, blocks)))
    }
    for path in sorted(missing):
        yield Fact(where, f"nothing of {path}", against="it holds blocks of the model too")


def _holds_blocks(built: Built, place: Place, declared: set[str]) -> bool:
    """Whether lists at a place hold blocks, or what lies beside these and is as large, and lie inside no block."""
    modules = dict(built.model.named_modules())
    found = [path for path, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
    at = [path for path in found if place.takes(tuple(path.split("."))) and path.count(".") + 1 == len(place.segments)]
    inside = [path for path in at if any(type(modules[above]).__name__ in declared for above in _above(path))]
    blocks = [block for path in at for block in modules[path].children()]
    several = len(blocks) > 1 and any(sum(1 for _ in block.modules()) > _SIMPLE for block in blocks)
    whole = _size([built.model])
    return bool(at) and not inside and (bool(_kinds_inside(blocks) & declared) or (several and _is_some(blocks, whole)))


def _above(path: str) -> Iterator[str]:
    """The paths of the modules around one."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _covers(place: Place, path: str) -> bool:
    """Whether a place is this list, or lies in it."""
    segments = tuple(path.split("."))
    return len(place.segments) >= len(segments) and Place(place.segments[: len(segments)]).takes(segments)


def _kinds_inside(blocks: Iterable[nn.Module]) -> set[str]:
    return {type(module).__name__ for block in blocks for module in block.modules()}


def _is_much(built: Built, blocks: Iterable[nn.Module]) -> bool:
    return _size(blocks) >= _MUCH * _size([built.model])


def _is_some(blocks: Iterable[nn.Module], whole: int) -> bool:
    return _size(blocks) >= _SOME * whole


def _measured(subject: Subject) -> Iterator[Fact]:
    """That a denoiser's measured activations are of the order of what its widest layer takes and gives."""
    said = subject.family.runtime.activation_bytes_per_token
    if said is None:
        return
    where = ("runtime", "activation_bytes_per_token")
    widest = max((_widest(case.built.model) for case in subject.cases if case.built is not None), default=0)
    yield _order(where, said, widest)


def _order(where: tuple[str, ...], said: float, widest: float) -> Fact:
    text = f"{where[-1]} {said:g}"
    if not widest:
        return Fact(where, text)
    if _LEAST * widest <= said <= _MOST * widest:
        return Fact(where, text, "the widest layer")
    against = f"the widest layer alone takes and gives {widest:g}; {_LEAST:g} to {_MOST:g} times that were measured"
    return Fact(where, text, against=against, final=True)


def _widest(model: nn.Module) -> int:
    """Bytes in 16 bits that the widest linear layer takes and gives for each token."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inside = [layer for layer in layers if layer.in_features >= 64]
    return max(((layer.in_features + layer.out_features) * _BYTES for layer in inside), default=0)


def _of_vae(subject: Subject) -> Iterator[Fact]:
    """That what a VAE takes for each pixel is of the order of its widest layer, and how many frames it works on."""
    runtime = subject.family.runtime
    match = next((case.match for case in subject.cases if case.match is not None), None)
    shapes = shapes_of_match(match) if match is not None and subject.family.kind == "vae" else None
    for name, widest in (("decode_bytes_per_pixel", "decoding"), ("encode_bytes_per_pixel", "encoding")):
        said = getattr(runtime, name)
        if said is not None:
            yield _order(("runtime", name), said, getattr(shapes, widest, 0))
    if runtime.frames_at_once is not None:
        shown = shapes.frames_at_once if shapes is not None else None
        text, by = f"frames_at_once {runtime.frames_at_once}", "its encoder" if shown == runtime.frames_at_once else ""
        against = f"its encoder takes {shown}" if shown is not None else ""
        yield Fact(("runtime", "frames_at_once"), text, by, against, final=shown is not None)
