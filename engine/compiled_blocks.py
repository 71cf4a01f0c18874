"""Compiles the repeated blocks of a model one class at a time, in place, and says what came of it.

A block's ``forward`` is replaced on the instance, so hooks that are installed later, for offloading or casting, run
around what is compiled and not in it. Names in the state dict and the class stay as they are. Copies and pickles of a
compiled model are not compiled.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from slipcast.engine.plan import Plan

Mode = Literal["blocks", "max"]
State = Literal["waiting", "compiled", "eager"]

logger = logging.getLogger("slipcast")

_LIMITS: dict[str, Any] = {"recompile_limit": 64, "accumulated_recompile_limit": 4096}
"""Torch's own, 8 and 256, hold for all models of a process together, and blocks differ in the layers that they hold."""


@dataclass(frozen=True, slots=True)
class ClassStatus:
    """How the blocks of one class run.

    Attributes:
        state: ``waiting`` for the first forward, in which they are compiled; ``compiled``; or ``eager``.
        blocks: how many there are.
        reason: why they run eagerly; else empty.
    """

    state: State
    blocks: int
    reason: str = ""


class CompiledBlocks:
    """The compiled blocks of a model. What it says is up to date, also of what failed in a forward after the load."""

    def __init__(self, classes: Sequence[_BlockClass]) -> None:
        self._classes = tuple(classes)

    @property
    def status(self) -> dict[str, ClassStatus]:
        """How the blocks of each class run, by the class's name."""
        return {each.kind.__name__: each.status for each in self._classes}

    def to_dict(self) -> dict[str, Any]:
        """The status as plain data."""
        return {name: asdict(status) for name, status in self.status.items()}


def compile_blocks_(
    model: nn.Module, blocks: Sequence[str], mode: Mode, *, backend: str | Callable[..., Any] = "inductor"
) -> CompiledBlocks:
    """Let the repeated blocks of a model be compiled, in place, when each is first called.

    Each block becomes one graph without breaks. In the mode ``blocks`` the graph holds for all sizes of inputs: another
    width or height compiles nothing anew. In the mode ``max`` kernels are chosen by measurement, for each size anew.
    Where a class can't be compiled, its blocks run as before, which is logged as a warning once.

    Args:
        model: on any device, with its weights in place. Install hooks for offloading afterwards.
        blocks: names of the blocks' classes. Of blocks within blocks the outer ones are compiled.
        mode: ``blocks`` or ``max``.
        backend: as for ``torch.compile``.

    Returns:
        What says how each class of blocks runs.
    """
    found: dict[type[nn.Module], list[nn.Module]] = {}
    for block in _outermost(model, frozenset(blocks)):
        found.setdefault(type(block), []).append(block)
    classes = []
    for kind, members in found.items():
        compiled = torch.compile(kind.forward, fullgraph=True, backend=backend, **_options(mode, backend))
        group = _BlockClass(kind, len(members), compiled)
        hooked = sum(_is_hooked(block) for block in members)
        if hooked:
            group.give_up(f"hooks have replaced the forward of {hooked} blocks; compile before hooks are installed")
        else:
            for block in members:
                block.forward = _CompiledForward(block, group)
        classes.append(group)
    return CompiledBlocks(classes)


def _options(mode: Mode, backend: str | Callable[..., Any]) -> dict[str, Any]:
    if backend != "inductor":
        return {"dynamic": mode == "blocks"}
    from slipcast.engine.computed_once import ComputedOnce  # it imports the compiler

    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if mode == "max" else {}
    return {"dynamic": mode == "blocks", "options": {**options, "post_grad_custom_pre_pass": ComputedOnce()}}


def compile_planned_(model: nn.Module, plan: Plan) -> CompiledBlocks | None:
    """Let the blocks be compiled that a plan names; None where it names none."""
    mode = plan.settings["compile"].engaged
    return compile_blocks_(model, plan.compiled, "max" if mode == "max" else "blocks") if plan.compiled else None


def _outermost(module: nn.Module, names: frozenset[str]) -> Iterator[nn.Module]:
    if type(module).__name__ in names:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, names)


def _is_hooked(block: nn.Module) -> bool:
    own = vars(block).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(block).forward


class _BlockClass:
    """The blocks of one class in one model: they are compiled together, and run eagerly together once that fails."""

    def __init__(self, kind: type[nn.Module], blocks: int, compiled: Callable[..., Any]) -> None:
        self.kind = kind
        self.compiled = compiled
        self.status = ClassStatus("waiting", blocks)

    def run(self, block: nn.Module, first: bool, *args: Any, **kwargs: Any) -> Any:
        """A forward of a block, compiled unless that has failed."""
        if self.status.state == "eager":
            return self.kind.forward(block, *args, **kwargs)
        try:
            result = self._run_compiled(block, first, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            result = self.kind.forward(block, *args, **kwargs)  # a fault of the block or its inputs comes out here
            self.give_up(_in_one_line(failure))
            return result
        if self.status.state == "waiting":
            self.status = ClassStatus("compiled", self.status.blocks)
        return result

    def _run_compiled(self, block: nn.Module, first: bool, args: Any, kwargs: Any) -> Any:
        """Torch's settings for compiling are set where it compiles, as setting them takes time in each call."""
        if not first:
            try:
                return self.compiled(block, *args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                pass
        with _compiling():
            return self.compiled(block, *args, **kwargs)

    def give_up(self, reason: str) -> None:
        """Run these blocks eagerly from now on."""
        self.status = ClassStatus("eager", self.status.blocks, reason)
        logger.warning("%s is not compiled and runs eagerly: %s", self.kind.__name__, reason)


@contextmanager
def _compiling() -> Iterator[None]:
    """Torch's settings while blocks are compiled, restored afterwards.

    Two sizes that are equal by chance, as of a square picture, must not be taken for one.
    """
    import torch._dynamo
    from torch.fx.experimental import _config

    symbols: Any = _config
    with torch._dynamo.config.patch(_LIMITS), symbols.patch(use_duck_shape=False):
        yield


class _CompiledForward:
    """The forward of one block. It does not keep the block alive, and a copy of it is the plain forward."""

    __slots__ = ("_block", "_called", "_group", "_kind")

    def __init__(self, block: nn.Module, group: _BlockClass) -> None:
        self._block, self._kind, self._group = weakref.ref(block), type(block), group
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, self._called = not self._called, True
        return self._group.run(self._owner(), first, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_forward, (self._owner(),)

    def _owner(self) -> nn.Module:
        block = self._block()
        assert block is not None, "who calls a block's forward holds the block"
        return block


def _plain_forward(block: nn.Module) -> MethodType:
    return MethodType(type(block).forward, block)


def _in_one_line(failure: Exception) -> str:
    """The first line of what a failure says; of one in a compiler, of what that says."""
    cause = getattr(failure, "inner_exception", failure)
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
