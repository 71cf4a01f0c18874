"""Models that come to the device while they work: their weights lie on the host, and are copied there and let go again.

Nothing is copied back: weights do not change in a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

HOOK = "_hf_hook"
"""Where diffusers looks for what brings a model to its device."""


class Turns:
    """Models of which one at a time is on the device."""

    def __init__(self) -> None:
        self.present: Visitor | None = None


class Visitor:
    """Brings one model to the device for each forward.

    Attributes:
        execution_device: where it computes; diffusers' pipelines read it off a model's ``_hf_hook``.
    """

    def __init__(self, model: nn.Module, device: torch.device, turns: Turns | None) -> None:
        self.execution_device = device
        self._turns = turns
        self._homes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._visits = 0
        self._computing = False
        self._handles = (
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        )
        setattr(model, HOOK, self)

    @contextmanager
    def visit(self, model: nn.Module) -> Iterator[None]:
        """Let the model be on the device."""
        self._visits += 1
        try:
            self._bring(model)
            yield
        finally:
            self._visits -= 1
            self._leave_unused()

    def pre_forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Diffusers calls this before encoding and decoding, which ``visit`` is around already."""
        return args, kwargs

    def detach_hook(self, model: nn.Module) -> nn.Module:
        """Leave the model to whoever places it next."""
        self.leave()
        for handle in self._handles:
            handle.remove()
        return model

    def leave(self) -> None:
        """Let go of what is on the device."""
        for tensor, home in self._homes:
            tensor.data = home
        self._homes = []

    def _before(self, model: nn.Module, *_: Any) -> None:
        self._computing = True
        self._bring(model)

    def _after(self, *_: Any) -> None:
        """A forward has ended, or has failed, be it before it began. One that the keyboard interrupts calls no hook."""
        self._computing = False
        self._leave_unused()

    def _bring(self, model: nn.Module) -> None:
        if self._turns is not None and self._turns.present is not self:
            if self._turns.present is not None:
                self._turns.present.leave()
            self._turns.present = self
        if self._homes:
            return
        try:
            for tensor in _tensors(model):
                self._homes.append((tensor, tensor.data))
                tensor.data = tensor.data.to(self.execution_device, non_blocking=True)
        except BaseException:  # half of it is of no use, also where it would stay
            self.leave()
            raise

    def _leave_unused(self) -> None:
        if self._turns is None and not self._visits and not self._computing:
            self.leave()


def visit_(model: nn.Module, device: torch.device, turns: Turns | None = None) -> Visitor:
    """Let a model come to the device for each forward, in place.

    Args:
        model: with its weights on the host.
        device: where it computes.
        turns: shared by models of which each stays until another one works; None: it leaves after each forward.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):  # systems bound what may be page-locked; the rest is copied as it lies
            for tensor in _tensors(model):
                tensor.data = tensor.data.pin_memory()
    return Visitor(model, device, turns)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
