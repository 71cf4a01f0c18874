"""A load builds its class once, and first values of parameters, which the file replaces, are never made."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slipcast
from slipcast.engine import build, loader
from slipcast.engine.build import build_on_meta, build_to_plan, build_with_buffers
from slipcast.engine.materialise import meta_tensors
from slipcast.engine.planner import make_plan, prepare_load
from slipcast.registry.inspection import identify_path
from slipcast.registry.settings import resolve_settings
from support.isolation import isolate
from support.recorded import recorded, write_checkpoint
from support.tiny_z_image import tiny_tensors, write_native

QWEN = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 20,
}  # fmt: skip
ON_META = {"transformers.Qwen3Model": QWEN, "diffusers.AutoencoderKL": {}, "transformers.CLIPTextModel": {}}
HEADERS = {"z-image-turbo--comfy-bf16": False, "wan2.1-vace-1.3b--native": True, "te-qwen3-0.6b--hf": True}
"""Recorded headers, and whether the class computes tables."""


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


class _Operations(TorchDispatchMode):
    """Counts what is done to tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ON_META)
@pytest.mark.parametrize("builder", [build_on_meta, build_with_buffers])
def test_parameters_get_no_first_values(builder: Callable[..., nn.Module], name: str) -> None:
    with _Operations() as operations:
        model = builder(name, ON_META[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not operations.seen.keys() & {"uniform_", "normal_", "uniform", "normal", "fill_", "zero_"}


class _Filled(nn.Module):
    """Fills a parameter and what it computes in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        nn.init.normal_(self.layer.weight)
        shared = nn.Parameter(torch.empty(2))
        self.first = shared
        self.second = shared
        self.register_buffer("filled", torch.empty(3).fill_(2))
        self.register_buffer("constant", nn.init.constant_(torch.empty(3), 3.0))
        self.register_buffer("drawn", nn.init.normal_(torch.empty(2000)), persistent=False)
        self.register_buffer("uniform", nn.init.kaiming_uniform_(tensor=torch.empty(200, 9)))
        with torch.device("cpu"):
            self.table = torch.empty(4).zero_()
        with torch.no_grad():
            self.constant[0] = 4
        self.layer.weight.data.uniform_(-1, 1).clamp_(0, 1)


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "model_class", lambda _: _Filled)


@pytest.mark.usefixtures("_known")
def test_what_a_class_fills_itself_is_filled() -> None:
    model = build_with_buffers("diffusers.Filled", {})
    assert model.filled.tolist() == [2, 2, 2]
    assert model.constant.tolist() == [4, 3, 3]
    assert model.table.tolist() == [0, 0, 0, 0]
    assert model.drawn.std().item() == pytest.approx(1, rel=0.1)
    assert model.uniform.abs().max().item() == pytest.approx((6 / 9) ** 0.5, rel=0.05)
    assert set(meta_tensors(model)) == {"layer.weight", "layer.bias", "first", "second"}


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("builder", [build_on_meta, build_with_buffers])
def test_a_parameter_under_two_names_stays_one(builder: Callable[..., nn.Module]) -> None:
    model = builder("diffusers.Filled", {})
    assert model.first is model.second
    assert model.first.requires_grad


def test_other_threads_fill_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those on the meta device, as whoever counts their operations would see."""
    seen: list[Counter[str]] = []

    def elsewhere() -> None:
        with _Operations() as operations:
            nn.init.normal_(torch.empty(3, device="meta"))
        seen.append(operations.seen)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    monkeypatch.setattr(build, "model_class", lambda _: Slow)
    build_with_buffers("diffusers.Slow", {})
    assert seen[0]["normal_"] == 1


class _Hidden(nn.Module):
    """A layer, and what else the constructor is asked to make."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("stored", torch.ones(2))
        table = torch.arange(4).float()
        if what == "buffer":
            self.register_buffer("made", table, persistent=False)
        elif what == "attribute":
            self.made = [table]
        elif what == "closure":
            self.made = lambda: table
        elif what == "part":
            parts = torch.meshgrid(table, table, indexing="ij")
            self.made = lambda: parts
        elif what == "parameter":
            self.made = [nn.Parameter(table, requires_grad=False)]


@pytest.mark.parametrize(
    ("what", "bare"),
    [("", True), ("buffer", False), ("attribute", False), ("closure", False), ("part", False), ("parameter", False)],
)
def test_a_model_for_a_plan_serves_a_load_where_its_class_computes_nothing(
    monkeypatch: pytest.MonkeyPatch, what: str, bare: bool
) -> None:
    monkeypatch.setattr(build, "model_class", lambda _: _Hidden)
    assert build_to_plan("diffusers.Hidden", {"what": what})[1] is bare


@pytest.mark.parametrize(("name", "computes"), HEADERS.items())
def test_a_prepared_load_builds_again_what_computes(tmp_path: Path, name: str, computes: bool) -> None:
    path = write_checkpoint(recorded(name), tmp_path / "model.safetensors")
    settings = resolve_settings({"device": "cpu"}).values
    identified = identify_path(path, settings)
    prepared = prepare_load(identified.main, settings, others=identified.beside)
    assert prepared.plan == make_plan(identified.main, settings, others=identified.beside)
    assert (prepared.take_model() is None) is computes
    assert prepared.take_model() is None


def test_a_load_builds_its_class_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_native(tmp_path / "tiny.safetensors", tiny_tensors())
    plan = slipcast.plan(path, device="cpu")
    built: list[str] = []
    construct = build._construct
    monkeypatch.setattr(build, "_construct", lambda name, config: built.append(name) or construct(name, config))
    for given in (None, plan):
        built.clear()
        slipcast.load(path, plan=given, **({} if given else {"device": "cpu"}))
        assert built == [plan.origin.model]


@pytest.mark.parametrize(("settings", "threads"), [({}, 1), ({"mmap": False}, 3), ({"fp8": "storage"}, 3)])
def test_threads_are_started_where_there_is_work_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], threads: int
) -> None:
    path = write_native(tmp_path / "tiny.safetensors", tiny_tensors())
    started: list[int] = []
    workers = loader.workers
    monkeypatch.setattr(loader, "workers", lambda count: started.append(count) or workers(count))
    slipcast.load(path, device="cpu", dtype="bfloat16", threads=3, **settings)
    assert started == [threads]


def test_a_tensor_is_found_wherever_a_module_keeps_it() -> None:
    class Tagged(list):  # type: ignore[type-arg]
        """A container that is more than a list."""

    meta = torch.empty(1, device="meta")
    model = nn.Module()
    model.plain = [1, "a", None, {}, (), torch.empty(1)]
    model.deep = {"a": [(), OrderedDict(b=(0, {"c": meta}))]}
    model.tagged = Tagged([meta])
    model.inner = nn.Module()
    model.inner.alone = meta
    model.inner._forward_hooks[0] = (meta,)
    assert set(meta_tensors(model)) == {
        "deep.a.1.b.1.c", "tagged.0", "inner.alone", "inner._forward_hooks.0.0",
    }  # fmt: skip
