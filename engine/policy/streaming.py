"""Brings the blocks of a model to the device one by one: one computes while the bytes of the next one arrive.

On the host the tensors of a block lie one after another in one page-locked buffer, which crosses the bus in one copy,
on a stream of its own; the host waits for none of it. At most two blocks are on the device, beside what is in no block;
after a forward nothing is. Nothing is copied back: weights do not change in a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING, GroupOffloadingConfig, GroupOffloadingType
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from slipcast.engine.policy.snapshot import host_free

_ALIGNMENT = 512
"""Bytes between which tensors begin, as torch's allocator would place them: kernels are chosen by it."""
_HOST_RESERVE = 2**30
"""Bytes of the host's memory that are left alone."""
_STREAMS = frozenset({"cuda", "xpu"})
"""Kinds of devices that compute and copy at the same time."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a buffer: an offset in bytes, and what is read from there."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in a buffer of bytes."""
        own = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return own.as_strided(self.shape, self.strides, own.storage_offset())


class Unit:
    """Tensors that come to the device together.

    Attributes:
        nbytes: bytes of a buffer that holds them.
    """

    def __init__(self, tensors: Sequence[Tensor], *, pinned: bool) -> None:
        """Move the tensors into one buffer on the host, if the host has room for it beside where they lie.

        Args:
            tensors: on the host; their ``data`` is exchanged.
            pinned: whether the buffer is page-locked.
        """
        self._tensors, self._pinned = tuple(tensors), pinned
        self._settle()

    def _settle(self) -> None:
        self.nbytes = 0
        self._places = tuple(self._placed())
        with DisableTorchFunctionSubclass():
            self._homes = tuple(tensor.data.cpu() for tensor in self._tensors)
            self._host = self._room()
            if self._host is not None:
                self._homes = self._filled(self._host)
            self._pointers = tuple(home.data_ptr() for home in self._homes)
        self.leave()

    def _room(self) -> Tensor | None:
        """A buffer on the host; None where there is no room for it, or not for so much that is page-locked."""
        free = host_free()
        if free is not None and free <= 2 * self.nbytes + _HOST_RESERVE:  # page-locked sizes become powers of two
            return None
        try:
            return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError:  # systems bound what may be page-locked
            return None

    def _is_changed(self) -> bool:
        """Whether somebody has given a tensor other data, as casts and merged adapters do; not where it only moved."""
        return any(
            tensor.data_ptr() != pointer and (tensor.device == home.device or tensor.dtype != home.dtype)
            for tensor, home, pointer in zip(self._tensors, self._homes, self._pointers, strict=True)
        )

    def _placed(self) -> Iterator[_Place]:
        for tensor in self._tensors:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            dense = extent == tensor.numel()  # contiguous, or channels-last
            strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            yield _Place(self.nbytes, tensor.nbytes, tensor.dtype, tuple(tensor.shape), strides)
            self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _filled(self, buffer: Tensor) -> tuple[Tensor, ...]:
        own = tuple(place.of(buffer) for place in self._places)
        for target, home in zip(own, self._homes, strict=True):
            target.copy_(home, non_blocking=True)
        return own

    def sent_to(self, device: torch.device) -> Tensor:
        """A new buffer on a device that the bytes are on their way to, on the current stream.

        The tensors are on the host. Of those that got other data since, the new data are sent from now on.
        """
        with DisableTorchFunctionSubclass():
            if self._is_changed():
                self._settle()
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            if self._host is not None:
                buffer.copy_(self._host, non_blocking=True)
            else:
                self._filled(buffer)
        return buffer

    def enter(self, buffer: Tensor) -> None:
        """Let the tensors be those in a buffer."""
        with DisableTorchFunctionSubclass():
            for tensor, place in zip(self._tensors, self._places, strict=True):
                tensor.data = place.of(buffer)

    def leave(self) -> None:
        """Let the tensors be those on the host."""
        with DisableTorchFunctionSubclass():
            for tensor, home in zip(self._tensors, self._homes, strict=True):
                tensor.data = home


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A buffer on the device, and what says that its bytes are there."""

    buffer: Tensor
    event: Any


class Streamer:
    """Brings a model's blocks to the device while it computes.

    Which block follows which is learned as they run; at first they are taken to run in the model's order. A wrong guess
    costs a copy, nothing else.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], device: torch.device, backend: Any = None) -> None:
        """Move the weights to where they are copied from, and install the hooks.

        Args:
            model: on the host.
            blocks: paths of the modules that come one by one; none lies in another.
            device: where the model computes.
            backend: torch's module for the streams of such devices; None: the device's own, where it has streams.
        """
        if backend is None and device.type in _STREAMS:
            backend = getattr(torch, device.type)
        self._device, self._backend = device, backend
        self._side = None if backend is None else backend.Stream(device)
        modules = [model.get_submodule(path) for path in blocks]
        owned = _owned(model, modules)
        rest = owned.pop()
        pinned = device.type in _STREAMS
        self._units = [Unit(tensors, pinned=pinned) for tensors in owned]
        self._rest = Unit(rest, pinned=pinned)
        self._rest_arrival: _Arrival | None = None
        self._arrivals: dict[int, _Arrival] = {}
        self._running: list[int] = []
        self._depth = 0
        self._last: int | None = None
        self._following: dict[int | None, int | None] = {n: n + 1 for n in range(len(modules) - 1)}
        self._following[None] = 0 if modules else None
        self._handles = [model.register_forward_pre_hook(self._bring_inputs, with_kwargs=True)]
        for module in _around(model, modules):
            self._handles += self._hooks(module, None)
        for number, module in enumerate(modules):
            self._handles += self._hooks(module, number)
        disable: Any = torch.compiler.disable
        self._handles.append(model.register_forward_pre_hook(disable(self._recover), prepend=True))

    def _hooks(self, module: nn.Module, number: int | None) -> Iterator[Any]:
        def before(*_: Any) -> None:
            self._enter(number)

        def after(*_: Any) -> None:
            self._exit(number)

        disable: Any = torch.compiler.disable  # whoever compiles the whole model has it broken here
        yield module.register_forward_pre_hook(disable(before), prepend=True)
        yield module.register_forward_hook(disable(after), always_call=True)

    @property
    def held_bytes(self) -> int:
        """Bytes that are on the device, or on their way to it."""
        arrivals = [*self._arrivals.values(), *filter(None, [self._rest_arrival])]
        return sum(arrival.buffer.nbytes for arrival in arrivals)

    def remove(self) -> None:
        """Leave the model on the host to whoever places it next."""
        self.leave()
        for handle in self._handles:
            handle.remove()

    def leave(self) -> None:
        """Let go of all that is on the device."""
        self._order()
        for number in self._running:
            self._units[number].leave()
        self._rest.leave()
        self._arrivals, self._rest_arrival, self._running = {}, None, []
        self._depth, self._last = 0, None

    def _recover(self, *_: Any) -> None:
        """The model begins: let go of what is left of a forward that the keyboard interrupted, which ends no hook."""
        if self._depth:
            self.leave()

    def _enter(self, number: int | None) -> None:
        """A module begins: one of those around the blocks (None), or a block."""
        self._depth += 1
        if self._depth == 1:
            self._rest_arrival = self._sent(self._rest)
            self._prefetch(self._following[None])
            self._wait(self._rest_arrival)
            self._rest.enter(self._rest_arrival.buffer)
        if number is None:
            return
        for other in [other for other in self._arrivals if other not in (number, *self._running)]:
            del self._arrivals[other]
        self._prefetch(number)
        self._wait(self._arrivals[number])
        self._units[number].enter(self._arrivals[number].buffer)
        self._running.append(number)
        self._following[self._last] = number
        self._last = number
        self._prefetch(self._following.get(number))

    def _exit(self, number: int | None) -> None:
        """A module has ended, or has failed."""
        if not self._depth:
            return  # another hook failed before the module began
        if number is not None and number in self._running:
            self._order()
            self._running.remove(number)
            if number not in self._running:
                self._units[number].leave()
                del self._arrivals[number]
        self._depth -= 1
        if not self._depth:
            if self._last is not None:
                self._following[self._last] = None
            self.leave()

    def _prefetch(self, number: int | None) -> None:
        if number is not None and number not in self._arrivals:
            self._arrivals[number] = self._sent(self._units[number])

    def _sent(self, unit: Unit) -> _Arrival:
        """Begin to copy. What is allocated on the side stream takes the place of blocks that have been computed."""
        self._order()
        with nullcontext() if self._side is None else self._backend.stream(self._side):
            buffer = unit.sent_to(self._device)
            return _Arrival(buffer, None if self._side is None else self._side.record_event())

    def _order(self) -> None:
        """Let copies that begin from now on wait for what has been computed until now, and still reads old blocks."""
        if self._side is not None:
            self._side.wait_stream(self._backend.current_stream(self._device))

    def _wait(self, arrival: _Arrival) -> None:
        if arrival.event is not None:
            self._backend.current_stream(self._device).wait_event(arrival.event)

    def _bring_inputs(self, _: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        """Pipelines place inputs on the device that they take an encoder to be on."""
        return _moved(inputs, self._device), _moved(named, self._device)


class _Placed(ModelHook):
    """Tells diffusers that a model's blocks are streamed, and where it computes; adapters have it removed and replaced.

    Attributes:
        config: by which diffusers' own group offloading takes over where layers are added.
    """

    def __init__(self, streamer: Streamer, config: GroupOffloadingConfig) -> None:
        super().__init__()
        self.streamer, self.config = streamer, config

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Diffusers calls this as it removes the hook."""
        self.streamer.remove()
        return module


def stream_(model: nn.Module, blocks: Sequence[str], device: torch.device, *, whole_blocks: bool) -> Streamer:
    """Let a model's blocks come to a device one by one, in place.

    Args:
        model: with its weights on the host.
        blocks: paths of its blocks, or of its layers.
        device: where it computes.
        whole_blocks: whether they are blocks; only tells diffusers how it would move them itself.
    """
    streamer = Streamer(model, blocks, device)
    config = GroupOffloadingConfig(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type=GroupOffloadingType.BLOCK_LEVEL if whole_blocks else GroupOffloadingType.LEAF_LEVEL,
        non_blocking=False,
        record_stream=False,
        low_cpu_mem_usage=False,
        num_blocks_per_group=1,
    )
    HookRegistry.check_if_exists_or_initialize(model).register_hook(_Placed(streamer, config), _GROUP_OFFLOADING)
    return streamer


def streamer_of(model: nn.Module) -> Streamer | None:
    """What streams a model's blocks; None where nothing of ours does."""
    registry = getattr(model, "_diffusers_hook", None)
    hook = None if registry is None else registry.get_hook(_GROUP_OFFLOADING)
    return hook.streamer if isinstance(hook, _Placed) else None


def _owned(model: nn.Module, modules: Sequence[nn.Module]) -> list[list[Tensor]]:
    """The tensors of each module, each once, and at the end those of the model that are in none or in several."""
    users: dict[int, list[int]] = {}
    for number, module in enumerate(modules):
        for tensor in {id(tensor): tensor for tensor in _tensors(module)}.values():
            users.setdefault(id(tensor), []).append(number)
    inside = {id(part) for module in modules for part in module.modules()}
    for part in model.modules():
        if id(part) not in inside:
            for tensor in _tensors(part, recurse=False):
                users.setdefault(id(tensor), []).append(len(modules))
    owned: list[list[Tensor]] = [[] for _ in range(len(modules) + 1)]
    for tensor in {id(tensor): tensor for tensor in _tensors(model)}.values():
        numbers = users[id(tensor)]
        owned[numbers[0] if len(numbers) == 1 else len(modules)].append(tensor)
    return owned


def _around(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules outside the blocks that hold tensors of their own or blocks, each of which somebody may call."""
    inside = {id(part) for module in modules for part in module.modules()}
    outside = [part for part in model.modules() if id(part) not in inside]
    return [
        part
        for part in outside
        if part is model
        or any(True for _ in _tensors(part, recurse=False))
        or any(id(below) in inside for below in part.modules())
    ]


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device) if value.ndim else value
    if type(value) is dict:
        return {name: _moved(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
