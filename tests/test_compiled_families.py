"""The blocks that family files name are compiled without a break, their layers stored in fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipcast.engine.check.small_model import random_values, run, write_files
from slipcast.engine.check.subject import build
from slipcast.engine.compiled_blocks import compile_blocks_
from slipcast.engine.loader import execute
from slipcast.engine.planner import make_plan
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.settings import resolve_settings
from support.number_formats import relative_l2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ernie-image", "pixart", "qwen-image-2.1", "sdxl", "t5-xxl", "wan"])
def test_blocks_of_a_family_become_graphs(name: str, tmp_path: Path) -> None:
    family = load_catalogue([])[name]
    assert family.tiny is not None
    assert family.runtime.compile is not None
    files = write_files(family, random_values(build(family.model, family.tiny.config)), tmp_path / "small")
    call = {"device": "cpu", "dtype": "float32", "fp8": "storage"}
    settings = resolve_settings(call, environ={}, cwd=tmp_path, user_folder=tmp_path).values
    model, _ = execute(make_plan(files.match, settings), files.match.header)
    expected = run(model, family.tiny.inputs)
    torch._dynamo.reset()
    compiled = compile_blocks_(model, family.runtime.compile.blocks, "blocks", backend="eager")
    assert relative_l2(run(model, family.tiny.inputs), expected) < 1e-6
    assert {each.state for each in compiled.status.values()} == {"compiled"}
    assert set(compiled.status) == set(family.runtime.compile.blocks)
