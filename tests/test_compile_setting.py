"""The setting ``compile``: what the plan decides, and what a load with it gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import slipcast
from slipcast.engine import compile_decision, compiled_blocks
from slipcast.engine.compile_decision import decide_compile
from slipcast.engine.compiled_blocks import compile_blocks_
from slipcast.engine.devices import resolve_device
from slipcast.engine.plan import Plan
from slipcast.registry.errors import PlanMismatchError, SettingsError
from slipcast.registry.runtime import Compile
from support.fp8_compute import fp8_of, multiplying
from support.isolation import isolate
from support.number_formats import relative_l2
from support.tiny_z_image import tiny_tensors, write_native

BLOCKS = Compile(blocks=("ABlock", "BBlock"))
WORKING, NO_COMPILER = "sh", "no-compiler-of-this-name"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("CXX", WORKING)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_native(tmp_path / "m.safetensors", tiny_tensors())


def decided(
    requested: str = "blocks", declared: Compile | None = BLOCKS, device: str = "cpu", dtype: str = "float32"
) -> tuple[str, str, tuple[str, ...]]:
    decision, blocks = decide_compile(requested, declared, {"ABlock", "Linear"}, resolve_device(device)[0], dtype)
    assert decision.requested == requested
    return decision.engaged, decision.reason, blocks


@pytest.mark.parametrize("mode", ["blocks", "max"])
def test_blocks_that_the_model_has_are_compiled(mode: str) -> None:
    assert decided(mode) == (mode, "as requested: ABlock", ("ABlock",))


def test_off_is_off_and_the_default(path: Path) -> None:
    assert decided("off") == ("off", "as requested", ())
    assert decided("auto") == ("off", "neither this setting nor speed asks for it", ())
    plan = slipcast.plan(path, device="cpu")
    assert (plan.settings["compile"].requested, plan.settings["compile"].engaged) == ("auto", "off")
    assert plan.compiled == ()
    report = slipcast.load(path, device="cpu").report
    assert report.compiled is None
    assert report.to_dict()["compile"] == {}


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (None, "the family file names no blocks"),
        (Compile(unsupported="it breaks"), "it breaks"),
        (Compile(blocks=("CBlock", "DBlock")), "this model has no CBlock or DBlock"),
    ],
)
def test_a_family_can_have_nothing_to_compile(declared: Compile | None, reason: str) -> None:
    assert decided(declared=declared) == ("off", reason, ())


def test_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", NO_COMPILER)
    assert decided() == ("off", f"torch compiles for the CPU with {NO_COMPILER}, which is not there", ())
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compile_decision.sys, "platform", "linux")
    monkeypatch.setattr(compile_decision.shutil, "which", lambda name: None if name == "g++" else name)
    assert decided()[1] == "torch compiles for the CPU with g++, which is not there"


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cuda:6.1,8GiB", "float32", "compute capability 6.1, where Triton needs 7.0"),
        ("cuda:7.5,8GiB", "bfloat16", "compute capability 7.5, where Triton needs 8.0 for bfloat16"),
        ("cuda:7.5,8GiB", "float16", ""),
        ("cuda:7.0,8GiB", "float32", ""),
        ("cuda:8.0,8GiB", "bfloat16", ""),
    ],
)
def test_a_gpu_needs_what_triton_needs(device: str, dtype: str, reason: str) -> None:
    engaged, why, _ = decided(device=device, dtype=dtype)
    assert (engaged, why) == (("off", reason) if reason else ("blocks", "as requested: ABlock"))


def test_a_gpu_that_is_there_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    card = replace(resolve_device("cuda:9.0,80GiB")[0], name="cuda:0", present=True)
    for there, engaged in ((False, "off"), (True, "blocks")):
        monkeypatch.setattr(compile_decision, "has_triton_package", lambda there=there: there)
        decision, _ = decide_compile("blocks", BLOCKS, {"ABlock"}, card, "bfloat16")
        assert decision.engaged == engaged
    monkeypatch.setattr(compile_decision, "has_triton_package", lambda: False)
    decision, _ = decide_compile("blocks", BLOCKS, {"ABlock"}, card, "bfloat16")
    assert decision.reason == "torch compiles for a GPU with Triton, which is not installed"


def test_another_word_is_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match="compile") as caught:
        slipcast.plan(path, compile="always")
    assert "blocks" in caught.value.expected


def test_a_saved_plan_keeps_the_request(path: Path) -> None:
    plan = Plan.from_json(json.loads(json.dumps(slipcast.plan(path, device="cpu", compile="blocks").to_json())))
    assert (plan.request.compile, plan.compiled) == ("blocks", ("ZImageTransformerBlock",))
    report = slipcast.load(path, plan=plan).report
    assert report.plan == plan
    assert report.to_dict()["compile"] == {"ZImageTransformerBlock": {"state": "waiting", "blocks": 5, "reason": ""}}
    with pytest.raises(PlanMismatchError, match="the setting compile is given beside a plan"):
        slipcast.load(path, plan=plan, compile="off")


def _with_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    def compile_(model: Any, blocks: Any, mode: Any) -> Any:
        return compile_blocks_(model, blocks, mode, backend=backend)

    monkeypatch.setattr(compiled_blocks, "compile_blocks_", compile_)


def _step(model: Any, height: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(height * 99 + width)
    picture = torch.randn(4, 1, height, width, generator=random)
    caption = torch.randn(7, 24, generator=random)
    with torch.no_grad():
        return model([picture], torch.tensor([0.5]), [caption]).sample[0]


@pytest.mark.parametrize("fp8", ["off", "storage", "compute"])
def test_a_load_compiles_blocks_for_all_sizes(path: Path, monkeypatch: pytest.MonkeyPatch, fp8: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    _with_backend(monkeypatch, counter)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "fp8": fp8_of(fp8)}
    plain = slipcast.load(path, **settings).model
    loaded = slipcast.load(path, compile="blocks", **settings)
    assert bool(multiplying(loaded.report.plan)) is (fp8 == "compute")
    graphs = []
    for size in [(8, 8), (8, 8), (8, 12), (16, 10)]:
        assert relative_l2(_step(loaded.model, *size), _step(plain, *size)) < 1e-5
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs[1:] == [graphs[1]] * 3
    assert loaded.report.compiled is not None
    assert loaded.report.compiled.status["ZImageTransformerBlock"].state == "compiled"
    assert list(loaded.model.state_dict()) == list(plain.state_dict())


def test_what_fails_in_a_forward_stands_in_the_report(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    _with_backend(monkeypatch, broken)
    torch._dynamo.reset()
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    loaded = slipcast.load(path, compile="blocks", **settings)
    plain = slipcast.load(path, **settings).model
    with caplog.at_level(logging.WARNING, "slipcast"):
        assert torch.equal(_step(loaded.model, 8, 8), _step(plain, 8, 8))
        _step(loaded.model, 8, 8)
    warnings = [record.getMessage() for record in caplog.records if record.name == "slipcast"]
    assert len(warnings) == 1
    told = loaded.report.to_dict()["compile"]["ZImageTransformerBlock"]
    assert (told["state"], told["blocks"]) == ("eager", 5)
    assert "no compiler here" in told["reason"]
    assert "no compiler here" in warnings[0]


def test_a_refused_request_stands_in_the_line_for_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", NO_COMPILER)
    report = slipcast.load(path, device="cpu", compile="blocks").report
    assert f"compile=blocks became off: torch compiles for the CPU with {NO_COMPILER}" in report.summary()
