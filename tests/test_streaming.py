"""Blocks that come to the device one by one: the same bits, two at a time, and nothing left behind. All on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.hooks.group_offloading import _get_group_onload_device, _is_group_offload_enabled
from peft import LoraConfig
from torch import Tensor, nn

from slipcast.engine.check.small_model import run
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import QUANTISED_CLASSES, quantise_module_
from slipcast.engine.policy import streaming
from slipcast.engine.policy.parts import blocks_of, layers_of
from slipcast.engine.policy.streaming import Streamer, Unit, stream_, streamer_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.runtime import Offload
from support.tiny_pipelines import model_of

CPU = torch.device("cpu")
DENOISERS = ("sdxl", "sd-1", "sd-2", "sdxl-refiner", "z-image", "flux-1", "wan")


class Block(nn.Module):
    """A layer with a buffer, which fails where it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))
        self.failing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.failing:
            raise ArithmeticError
        return self.layer(x) + self.shift


class Model(nn.Module):
    """Blocks in another order than they are declared in, and layers around them."""

    def __init__(self, width: int = 32, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = nn.ModuleList(Block(width) for _ in range(count))
        self.early = nn.ModuleList(Block(width) for _ in range(2))
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.early, *self.late):
            x = block(x)
        return self.head(x) * self.scale

    def rest(self) -> int:
        """Bytes of a buffer for what is in no block."""
        return room(self.embed) + room(self.head) + 512


BLOCKS = Offload(blocks=("late", "early"))
ORDER = ("early.0", "early.1", "late.0", "late.1", "late.2", "late.3")


class Streams:
    """Streams on which copies are late: bytes arrive when the computing stream waits for them, before it is nonsense.

    Attributes:
        log: what was begun: copies of units by their number, and waits of the copying stream for the computing one.
        most: the most bytes of buffers that were alive when a copy began, its own among them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.most = 0
        self.names: dict[int, str] = {}
        self._side: Streams.Side | None = None
        self._copies: list[Callable[[], Any]] = []
        self._buffers: list[weakref.ref[torch.UntypedStorage]] = []
        plain = Unit.sent_to

        def late(unit: Unit, device: torch.device) -> Tensor:
            right = plain(unit, device)
            buffer = torch.full_like(right, 0xFF)  # not a number, in every float
            self._copies.append(lambda: buffer.copy_(right))
            self.log.append(self.names.get(id(unit), "rest"))
            self._buffers.append(weakref.ref(buffer.untyped_storage()))
            self.most = max(self.most, self.held())
            return buffer

        monkeypatch.setattr(Unit, "sent_to", late)

    class Side:
        def __init__(self, streams: Streams) -> None:
            self._streams = streams

        def wait_stream(self, _: Any) -> None:
            self._streams.log.append("order")

        def record_event(self) -> list[Callable[[], Any]]:
            event, self._streams._copies = self._streams._copies, []
            return event

    class Compute:
        def wait_event(self, event: list[Callable[[], Any]]) -> None:
            for copy in event:
                copy()

    def Stream(self, _: torch.device) -> Side:  # noqa: N802 - as torch.cuda has it
        self._side = self.Side(self)
        return self._side

    def current_stream(self, _: torch.device) -> Compute:
        return self.Compute()

    @contextmanager
    def stream(self, side: Side) -> Iterator[None]:
        assert side is self._side
        yield

    def held(self) -> int:
        return sum(storage.nbytes() for each in self._buffers if (storage := each()) is not None)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(
            tensor.view(torch.uint8) if tensor.ndim else tensor,
            other[name].view(torch.uint8) if tensor.ndim else other[name],
        )
        for name, tensor in one.items()
    )


def room(module: nn.Module) -> int:
    """Bytes of a buffer for a module's tensors."""
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in (*module.parameters(), *module.buffers()))


def offload_of(family: str) -> Offload:
    offload = load_catalogue()[family].runtime.offload
    assert offload is not None
    return offload


def tiny(family: str, *, fp8: bool) -> nn.Module:
    """A family's small model in float32, or with fp8 layers in its blocks."""
    model: nn.Module = model_of(family).float()
    for path in blocks_of(model, offload_of(family)) if fp8 else ():
        for layer in list(model.get_submodule(path).modules()):
            if type(layer) in QUANTISED_CLASSES and layer.weight.numel() >= 256:
                quantise_module_(layer, Float8("row"), torch.float32)
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("free", [None, 0])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", DENOISERS)
def test_streamed_denoisers_give_the_bits_of_diffusers_alone(
    family: str, fp8: bool, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "host_free", lambda: free)  # 0: nothing is moved into a buffer
    streams = Streams(monkeypatch)
    described = load_catalogue()[family].tiny
    assert described is not None
    model = tiny(family, fp8=fp8)
    expected, before = run(model, described.inputs), tensors(model)
    blocks = blocks_of(model, offload_of(family))
    streamer = Streamer(model, blocks, CPU, streams)
    sizes = sorted(unit.nbytes for unit in streamer._units)
    for _ in range(3):
        assert torch.equal(run(model, described.inputs), expected)
        assert streamer.held_bytes == streams.held() == 0
    assert len(blocks) == len(sizes)
    assert max(sizes) < streams.most <= streamer._rest.nbytes + sum(sizes[-2:])
    streamer.remove()
    assert same(tensors(model), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_one_block_computes_while_the_next_one_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = Model()
    x = torch.randn(2, 32)
    expected = model(x)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU, streams)
    paths = blocks_of(model, BLOCKS)
    streams.names.update({id(unit): path for unit, path in zip(streamer._units, paths, strict=True)})
    block, held = room(model.late[0]), []
    for path in ("embed", *paths):

        def note(*_: Any, path: str = path) -> None:
            streams.log.append(f"{path} computed")
            held.append(streams.held())

        model.get_submodule(path).register_forward_hook(note)
    for expect_order in (False, True, True):
        streams.log.clear()
        assert torch.equal(model(x), expected)
        begun = [entry for entry in streams.log if entry != "order"]
        if expect_order:  # known from the first forward
            first, second, *others = ORDER
            wanted = ["rest", first, "embed computed", second]
            for path, after in zip(ORDER, [*others, None, None], strict=True):
                wanted += [f"{path} computed", *([after] if after else [])]
            assert begun == wanted
    assert streams.most == 2 * block + model.rest()
    assert held[-7:] == [model.rest() + block] * 6 + [model.rest()], "only the next one is there"
    copies = [n for n, entry in enumerate(streams.log) if entry in (*ORDER, "rest")]
    assert all(streams.log[n - 1] == "order" for n in copies), "no copy begins before what has been computed"


def test_a_copy_waits_for_what_still_reads_old_blocks_also_where_one_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = Model()
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU, streams)
    seen: list[int] = []
    model.head.register_forward_hook(lambda *_: streams.log.append("head computed"))
    plain = Unit.leave
    monkeypatch.setattr(Unit, "leave", lambda unit: (seen.append(streams.log[-1] == "order"), plain(unit)))
    model(torch.randn(2, 32))
    assert len(seen) == 7
    assert all(seen)
    assert streamer.held_bytes == 0


def test_other_orders_and_left_out_blocks_only_cost_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = Model()
    x = torch.randn(2, 32)

    def orders() -> Iterator[list[nn.Module]]:
        blocks = [*model.early, *model.late]
        yield blocks
        yield blocks[::-1]
        yield blocks[:3]
        yield [blocks[0], blocks[0], blocks[2], blocks[0]]
        yield []
        yield blocks

    def forward(x: Tensor, blocks: list[nn.Module]) -> Tensor:
        for block in blocks:
            x = block(x)
        return model.head(x) * model.scale

    model.forward = forward  # type: ignore[assignment,method-assign]
    expected = [model(x, blocks) for blocks in orders()]
    Streamer(model, blocks_of(model, BLOCKS), CPU, streams)
    for blocks, plain in zip(orders(), expected, strict=True):
        assert torch.equal(model(x, blocks), plain)
        assert streams.held() == 0
    assert streams.most <= 2 * room(model.late[0]) + model.rest()


def test_a_failing_block_leaves_the_model_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = Model()
    x = torch.randn(2, 32)
    expected, before = model(x), tensors(model)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU, streams)
    for block in (model.early[0], model.late[1], model.late[3]):
        block.failing = True
        with pytest.raises(ArithmeticError):
            model(x)
        block.failing = False
        assert streamer.held_bytes == streams.held() == 0
        assert same(tensors(model), before)
        assert torch.equal(model(x), expected)


def test_memory_that_runs_out_leaves_the_model_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    x = torch.randn(2, 32)
    expected, before = model(x), tensors(model)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU)
    plain, count = Unit.sent_to, 0
    for failing in range(1, 8):
        count = 0

        def short(unit: Unit, device: torch.device) -> Tensor:
            nonlocal count
            count += 1
            if count == failing:  # noqa: B023 - called in this round
                raise torch.OutOfMemoryError
            return plain(unit, device)

        monkeypatch.setattr(Unit, "sent_to", short)
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
        monkeypatch.setattr(Unit, "sent_to", plain)
        assert streamer.held_bytes == 0
        assert same(tensors(model), before)
        assert torch.equal(model(x), expected)


def test_a_forward_that_is_interrupted_from_the_keyboard_leaves_nothing_after_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    model = Model()
    x = torch.randn(2, 32)
    expected, before = model(x), tensors(model)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU, streams)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for block in (model.early[0], model.late[1]):
        handle = block.layer.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):  # torch ends no hook
            model(x)
        handle.remove()
        streams.most = 0
        assert torch.equal(model(x), expected)
        assert streams.most <= 2 * room(model.late[0]) + model.rest()
        assert streamer.held_bytes == streams.held() == 0
        assert same(tensors(model), before)


@pytest.mark.parametrize("free", [None, 0])
def test_data_that_tensors_get_on_the_host_stay_theirs(free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "host_free", lambda: free)
    streams = Streams(monkeypatch)
    model, plain = Model(), Model()
    x = torch.randn(2, 32)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU, streams)

    def double(each: Model) -> None:
        for layer in (each.early[1].layer, each.late[2].layer, each.head):
            layer.weight.data = layer.weight.data * 2

    def transpose(each: Model) -> None:
        each.late[0].layer.weight.data = each.late[0].layer.weight.data.t().contiguous()

    changes: tuple[Callable[[Model], object], ...] = (double, transpose, nn.Module.double, nn.Module.bfloat16)
    for change in changes:
        change(model)
        change(plain)
        given = x.to(plain.scale.dtype)
        for _ in range(2):
            assert torch.equal(model(given), plain(given))
            assert same(tensors(model), tensors(plain))
    streamer.remove()
    assert same(tensors(model), tensors(plain))


def test_an_adapter_that_is_merged_while_blocks_are_streamed_stays_merged() -> None:
    described = load_catalogue()["z-image"].tiny
    assert described is not None
    model, plain = tiny("z-image", fp8=False), tiny("z-image", fp8=False)
    stream_(model, blocks_of(model, offload_of("z-image")), CPU, whole_blocks=True)
    for each in (model, plain):
        torch.manual_seed(0)
        each.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))  # type: ignore[operator]
        each.requires_grad_(False)
        each.fuse_lora(safe_fusing=True)  # type: ignore[operator]
    assert streamer_of(model) is not None
    assert torch.equal(run(model, described.inputs), run(plain, described.inputs))


def test_what_may_not_be_page_locked_is_sent_from_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    x = torch.randn(2, 32)
    expected, before, plain = model(x), tensors(model), torch.empty

    def bounded(*shape: Any, pin_memory: bool | None = None, **options: Any) -> Tensor:
        if pin_memory is not None:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*shape, **options)

    monkeypatch.setattr(torch, "empty", bounded)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU)
    assert torch.equal(model(x), expected)
    assert streamer.held_bytes == 0
    assert same(tensors(model), before)


def test_a_model_without_blocks_comes_as_a_whole() -> None:
    model = Model()
    x = torch.randn(2, 32)
    expected = model(x)
    streamer = Streamer(model, (), CPU)
    assert torch.equal(model(x), expected)
    assert streamer.held_bytes == 0


def test_the_state_is_right_before_during_and_after_a_forward() -> None:
    model = Model()
    before = tensors(model)
    stream_(model, blocks_of(model, BLOCKS), CPU, whole_blocks=True)
    seen = []
    model.late[1].register_forward_hook(lambda *_: seen.append(same(tensors(model), before)))
    model(torch.randn(2, 32))
    assert seen == [True]
    assert same(dict(model.state_dict()), before)
    with torch.no_grad():
        model.late[2].layer.weight.mul_(2)  # what is changed on the host, is changed
        model.head.weight.mul_(2)
    changed = Model()
    changed.load_state_dict(before)
    with torch.no_grad():
        changed.late[2].layer.weight.mul_(2)
        changed.head.weight.mul_(2)
    x = torch.randn(2, 32)
    assert torch.equal(model(x), changed(x))
    model.load_state_dict(before)
    changed.load_state_dict(before)
    assert torch.equal(model(x), changed(x))


def test_parts_of_a_model_that_are_called_by_themselves_come_too(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    model = model_of("t5-xxl").requires_grad_(False)
    tokens = torch.arange(12).reshape(1, 12)
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: model.encoder(tokens)[0],
        lambda: model.get_input_embeddings()(tokens),
        lambda: model.encoder.final_layer_norm(torch.ones(1, 3, model.config.d_model, dtype=torch.bfloat16)),
        lambda: model(tokens)[0],
    )
    expected = [call() for call in calls]
    streamer = Streamer(model, layers_of(model), CPU, streams)
    for call, plain in zip(calls * 2, expected * 2, strict=True):
        assert torch.equal(call(), plain)
        assert streamer.held_bytes == streams.held() == 0


def test_tensors_of_every_kind_cross_as_they_are() -> None:
    base = torch.randn(4, 6)
    kinds = [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        base.t(),
        base[:, ::2],
        torch.randn(1, 5).expand(3, 5),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.randn(3).to(torch.complex64),
        torch.randn(16, 4).to(torch.float8_e4m3fn),
        torch.randint(0, 255, (7,), dtype=torch.uint8),
    ]
    expected = [tensor.clone() for tensor in kinds]
    unit = Unit(kinds, pinned=False)
    buffer = unit.sent_to(CPU)
    for there in (True, False):
        unit.enter(buffer) if there else unit.leave()
        for tensor, plain in zip(kinds, expected, strict=True):
            assert (tensor.dtype, tensor.shape) == (plain.dtype, plain.shape)
            assert torch.equal(
                tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor,
                plain.float() if tensor.dtype == torch.float8_e4m3fn else plain,
            )
            inside = tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert inside == there or not tensor.numel()
            assert not tensor.numel() or (tensor.storage_offset() * tensor.element_size()) % 512 == 0
    assert kinds[0].is_contiguous(memory_format=torch.channels_last)
    assert kinds[1].stride() == (1, 6)


def test_a_tensor_of_two_blocks_lies_beside_them() -> None:
    model = Model()
    model.late[1].layer.weight = model.late[0].layer.weight
    x = torch.randn(2, 32)
    expected = model(x)
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU)
    assert torch.equal(model(x), expected)
    assert streamer._rest.nbytes == model.rest() + model.late[0].layer.weight.nbytes
    assert model.late[1].layer.weight is model.late[0].layer.weight


def test_diffusers_knows_where_the_model_computes_and_adapters_take_it_over() -> None:
    model = tiny("z-image", fp8=False)
    blocks = blocks_of(model, offload_of("z-image"))
    streamer = stream_(model, blocks, CPU, whole_blocks=True)
    assert _is_group_offload_enabled(model)
    assert _get_group_onload_device(model) == CPU
    assert streamer_of(model) is streamer
    described = load_catalogue()["z-image"].tiny
    assert described is not None
    plain = tiny("z-image", fp8=False)
    assert torch.equal(run(model, described.inputs), run(plain, described.inputs))
    for each in (model, plain):
        torch.manual_seed(0)
        each.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))  # type: ignore[operator]
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading

    _maybe_remove_and_reapply_group_offloading(model)
    assert streamer_of(model) is None
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert _is_group_offload_enabled(model)
    assert torch.equal(run(model, described.inputs), run(plain, described.inputs))


def test_what_is_streamed_goes_with_its_model() -> None:
    import gc

    model = Model()
    streamer = weakref.ref(stream_(model, blocks_of(model, BLOCKS), CPU, whole_blocks=True))
    weight = weakref.ref(model.late[0].layer.weight)
    model(torch.randn(2, 32))
    del model
    gc.collect()
    assert streamer() is None
    assert weight() is None


def test_inputs_are_brought_to_the_device() -> None:
    model = Model()
    streamer = Streamer(model, blocks_of(model, BLOCKS), CPU)
    streamer._device = torch.device("meta")
    given = {"x": torch.ones(2), "many": [torch.ones(1), {"deep": torch.ones(1)}], "flag": True, "none": None}
    _, moved = streamer._bring_inputs(model, (), given)
    assert moved["x"].device.type == moved["many"][0].device.type == moved["many"][1]["deep"].device.type == "meta"
    assert moved["flag"] is True
    assert moved["none"] is None
