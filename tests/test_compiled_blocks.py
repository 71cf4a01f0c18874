"""Compiled blocks: the same results, no new graph for new sizes, and eager blocks with a warning where it fails."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental import _config as symbols

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.compiled_blocks import CompiledBlocks, compile_blocks_
from slipcast.engine.computed_once import ComputedOnce
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.layers import quantise_module_
from support.number_formats import relative_l2

CODECS = [Float8("row"), Float8("tensor"), Int8("row"), Int8(rotation=16), MXFP8(), NVFP4("comfy")]
WIDTH = 64


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A block on a picture ``[B, H, W, C]``, with a table of its size as models have it for positions."""

    def __init__(self, gain: int = 1) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), gain

    def forward(self, given: Tensor, table: Tensor | None = None) -> Tensor:
        mixed = self.inner(given) * self.gain
        return given + torch.nn.functional.gelu(mixed if table is None else mixed * table)


class Other(Block):
    """A block of another class."""


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block(), Block(), Other()])

    def forward(self, given: Tensor) -> Tensor:
        table = torch.linspace(0, 1, given.shape[2]).view(-1, 1)
        for block in self.blocks:
            given = block(given, table)
        return given


def model(*blocks: nn.Module) -> Model:
    torch.manual_seed(0)
    return Model(*blocks).eval()


def picture(height: int = 4, width: int = 4) -> Tensor:
    return torch.randn(1, height, width, WIDTH, generator=torch.Generator().manual_seed(height * 99 + width))


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here\nand a second line")


def states(compiled: CompiledBlocks) -> dict[str, tuple[str, int]]:
    return {name: (status.state, status.blocks) for name, status in compiled.status.items()}


def test_blocks_of_a_class_become_one_graph_for_all_sizes() -> None:
    plain = model()
    fast, counter = copy.deepcopy(plain), CompileCounterWithBackend("aot_eager")
    compiled = compile_blocks_(fast, ["Block", "Other"], "blocks", backend=counter)
    assert states(compiled) == {"Block": ("waiting", 2), "Other": ("waiting", 1)}
    for number, size in enumerate([(4, 4), (4, 4), (4, 6), (7, 6), (64, 64), (9, 3)]):
        assert relative_l2(fast(picture(*size)), plain(picture(*size))) < 1e-6
        if number == 1:
            graphs = counter.frame_count
    assert counter.frame_count == graphs == 2
    assert states(compiled) == {"Block": ("compiled", 2), "Other": ("compiled", 1)}
    assert compiled.to_dict()["Block"] == {"state": "compiled", "blocks": 2, "reason": ""}


@pytest.mark.slow
def test_inductor_gives_the_same_results() -> None:
    plain = model()
    fast = copy.deepcopy(plain)
    compiled = compile_blocks_(fast, ["Block"], "blocks")
    results = [fast(picture(*size)) for size in [(4, 4), (4, 6)]]
    if any("Compiler" in status.reason for status in compiled.status.values()):
        pytest.skip("no compiler")
    assert states(compiled) == {"Block": ("compiled", 2)}
    for result, size in zip(results, [(4, 4), (4, 6)], strict=True):
        assert relative_l2(result, plain(picture(*size))) < 1e-6


def test_max_compiles_for_each_size_with_measured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = torch.compile

    def spying(function: Any, **options: Any) -> Any:
        asked.append(dict(options))
        return real(function, fullgraph=True, dynamic=options["dynamic"], backend=counter)

    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", spying)
    fast = model()
    compile_blocks_(fast, ["Block"], "max")
    (options,) = (each.pop("options") for each in asked)
    assert asked == [{"fullgraph": True, "backend": "inductor", "dynamic": False}]
    assert isinstance(options.pop("post_grad_custom_pre_pass"), ComputedOnce)
    assert options == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    for size in [(4, 4), (4, 6), (4, 4)]:
        fast(picture(*size))
    assert counter.frame_count == 2


@pytest.mark.parametrize("codec", [*CODECS, "compute", "tensor compute"], ids=str)
def test_quantised_layers_are_compiled_without_a_break(codec: Codec | str) -> None:
    plain = model(Block(), Block())
    for block in plain.blocks:
        own = codec if isinstance(codec, Codec) else Float8("row")
        layer: Any = quantise_module_(block.inner, own, torch.float32)
        if isinstance(codec, str):
            enable_compute_(layer, input_scale=None, per_tensor=codec.startswith("tensor"))
    fast, counter = copy.deepcopy(plain), CompileCounterWithBackend("aot_eager")
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend=counter)
    graphs = []
    for size in [(4, 4), (4, 4), (4, 6), (7, 6)]:
        assert relative_l2(fast(picture(*size)), plain(picture(*size))) < 1e-6
        graphs.append(counter.frame_count)
    assert states(compiled) == {"Block": ("compiled", 2)}
    assert len(set(graphs)) == 1
    assert all(type(block.inner) is not nn.Linear and isinstance(block.inner, nn.Linear) for block in fast.blocks)


def test_a_class_that_fails_runs_eagerly_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    plain = model()
    fast = copy.deepcopy(plain)
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend=broken)
    with caplog.at_level(logging.WARNING, "slipcast"):
        for _ in range(2):
            assert torch.equal(fast(picture()), plain(picture()))
    (record,) = [record for record in caplog.records if record.name == "slipcast"]
    assert record.getMessage().startswith("Block is not compiled and runs eagerly: ")
    assert "no compiler here" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert states(compiled) == {"Block": ("eager", 2)}
    assert "no compiler here" in compiled.status["Block"].reason


def test_a_class_that_fails_leaves_others_compiled() -> None:
    class Breaking(Block):
        def forward(self, given: Tensor, table: Tensor | None = None) -> Tensor:
            return super().forward(given, table) * float(given.sum().item() * 0 + 1 if print() is None else 0)

    fast = model(Block(), Breaking())
    compiled = compile_blocks_(fast, ["Block", "Breaking"], "blocks", backend="eager")
    fast(picture())
    assert states(compiled) == {"Block": ("compiled", 1), "Breaking": ("eager", 1)}


def test_a_wrong_input_is_the_block_s_own_error_and_no_failure_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    fast = model()
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend="eager")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fast.blocks[0](torch.ones(2, WIDTH + 1))
    assert states(compiled) == {"Block": ("waiting", 2)}
    fast(picture())
    assert states(compiled) == {"Block": ("compiled", 2)}
    assert not [record for record in caplog.records if record.name == "slipcast"]


def test_running_out_of_memory_is_not_tried_again() -> None:
    calls: list[int] = []

    def full(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(1)
            raise torch.OutOfMemoryError("out of memory")

        return run

    fast = model()
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend=full)
    with pytest.raises(torch.OutOfMemoryError):
        fast(picture())
    assert calls == [1]
    assert states(compiled) == {"Block": ("waiting", 2)}


def test_more_kinds_of_blocks_than_torch_takes_are_compiled_and_its_flags_restored() -> None:
    flags = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    duck = symbols.use_duck_shape
    fast, counter = model(*map(Block, range(2, 14))), CompileCounterWithBackend("eager")
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend=counter)
    fast(picture())
    assert states(compiled) == {"Block": ("compiled", 12)}
    assert counter.frame_count > flags["recompile_limit"]
    for gain, block in enumerate(fast.blocks):  # kinds that come after the first forward too
        block.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        block.gain = gain + 20
    before = counter.frame_count
    fast(picture())
    assert states(compiled) == {"Block": ("compiled", 12)}
    assert counter.frame_count > before
    assert {name: getattr(torch._dynamo.config, name) for name in flags} == flags
    assert symbols.use_duck_shape is duck


def test_names_and_classes_stay_and_copies_are_plain() -> None:
    plain = model()
    fast, counter = copy.deepcopy(plain), CompileCounterWithBackend("eager")
    compile_blocks_(fast, ["Block"], "blocks", backend=counter)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert list(map(type, fast.modules())) == list(map(type, plain.modules()))
    fast(picture())
    graphs = counter.frame_count
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            copied.blocks[0].inner.weight.mul_(2)
        assert not torch.equal(copied(picture(5, 5)), fast(picture(5, 5)))
        copied.blocks[0].inner.weight.data.mul_(0.5)
        assert torch.equal(copied(picture(5, 5)), plain(picture(5, 5)))
        again = compile_blocks_(copied, ["Block"], "blocks", backend=counter)
        assert states(again) == {"Block": ("waiting", 2)}
    assert counter.frame_count == graphs


def test_a_compiled_block_is_freed_as_soon_as_it_is_let_go() -> None:
    fast = model()
    compile_blocks_(fast, ["Block"], "blocks", backend="eager")
    fast(picture())
    weight = weakref.ref(fast.blocks[0].inner.weight)
    gc.disable()
    try:
        del fast
        assert weight() is None
    finally:
        gc.enable()


def test_hooks_that_come_later_run_around_the_compiled_block() -> None:
    plain = model()
    fast, counter = copy.deepcopy(plain), CompileCounterWithBackend("eager")
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend=counter)
    seen: list[str] = []

    def hooked(block: nn.Module, forward: Callable[..., Tensor], *given: Tensor) -> Tensor:
        block.to("cpu")  # as offloading does; no graph could hold it
        seen.append("replaced")
        return forward(*given)

    for block in list(fast.blocks)[:2]:
        block.register_forward_pre_hook(lambda *_: print(end="") or seen.append("before"))
        block.forward = partial(hooked, block, block.forward)
    assert torch.equal(fast(picture()), plain(picture()))
    assert seen == ["before", "replaced"] * 2
    assert states(compiled) == {"Block": ("compiled", 2)}
    assert counter.frame_count == 1


def test_blocks_with_a_replaced_forward_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    fast = model()
    own = fast.blocks[0].forward
    fast.blocks[0].forward = lambda *given: own(*given) * 2
    expected = fast(picture())
    with caplog.at_level(logging.WARNING, "slipcast"):
        compiled = compile_blocks_(fast, ["Block"], "blocks", backend="eager")
    assert compiled.status["Block"].state == "eager"
    assert "hooks have replaced the forward of 1 blocks" in compiled.status["Block"].reason
    assert len([record for record in caplog.records if record.name == "slipcast"]) == 1
    assert torch.equal(fast(picture()), expected)


def test_of_nested_blocks_the_outer_ones_are_compiled() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, given: Tensor, table: Tensor) -> Tensor:
            return self.block(given, table)

    fast = model(Outer(), Block())
    compiled = compile_blocks_(fast, ["Block", "Outer"], "blocks", backend="eager")
    assert states(compiled) == {"Outer": ("waiting", 1), "Block": ("waiting", 1)}
    fast(picture())
    assert states(compiled) == {"Outer": ("compiled", 1), "Block": ("compiled", 1)}


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_may_come_after_compiling(quantised: bool) -> None:
    peft = pytest.importorskip("peft")
    plain = model()
    if quantised:
        for block in plain.blocks:
            quantise_module_(block.inner, Float8("row"), torch.float32)
    fast = copy.deepcopy(plain)
    compiled = compile_blocks_(fast, ["Block"], "blocks", backend="aot_eager")
    before = fast(picture())
    config = peft.LoraConfig(r=4, target_modules=["inner"], init_lora_weights=False)
    for each in (plain, fast):
        torch.manual_seed(1)
        peft.inject_adapter_in_model(config, each)
    expected = plain(picture())
    assert relative_l2(expected, before) > 0.01
    assert relative_l2(fast(picture()), expected) < 1e-6
    assert states(compiled) == {"Block": ("compiled", 2)}
    for each in (plain, fast):
        for module in each.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                module.enable_adapters(False)
    assert relative_l2(fast(picture(4, 6)), plain(picture(4, 6))) < 1e-6
    assert relative_l2(fast(picture()), before) < 1e-6
