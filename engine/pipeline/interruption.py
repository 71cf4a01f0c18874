"""Ends a pipeline's call between the forward passes of its models: what works for pipelines of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slipcast.registry.errors import Cancelled


def refuse_cancelled(cancelled: Callable[[], bool] | None, done: str) -> None:
    """Go on, unless the caller has cancelled.

    Args:
        cancelled: asked; None never says so.
        done: what is done so far, as a clause.

    Raises:
        Cancelled: it said True.
    """
    if cancelled is not None and cancelled():
        raise Cancelled(
            f"the generation was cancelled {done}",
            expected="to be left to its end",
            hint="generate again, if the picture is still wanted",
        )


@contextmanager
def interruptible(pipe: Any, cancelled: Callable[[], bool] | None) -> Iterator[None]:
    """A block in which a pipeline's call ends with ``Cancelled`` before the next forward pass of one of its models.

    Raising is what every pipeline obeys. The flag ``_interrupt`` that many have leaves the rest of a call to run, the
    decoding of the picture too, and several do not look at it.

    Args:
        pipe: the pipeline.
        cancelled: asked before each forward pass; None never says so.
    """

    def ask(module: nn.Module, _: Any) -> None:
        refuse_cancelled(cancelled, f"before a forward pass of {type(module).__name__}")

    models = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    hooks = [model.register_forward_pre_hook(ask) for model in models] if cancelled is not None else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
