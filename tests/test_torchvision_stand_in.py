"""Forwards that call torchvision, where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in

SOURCE = """
from torch import nn

class Resizes(nn.Module):
    def forward(self, x):
        return transforms.functional.resize(x, [4, 2], interpolation=transforms.InterpolationMode.NEAREST)

class Doesnt(nn.Module):
    def forward(self, x):
        return x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "resizing.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("resizing")
    del sys.modules["resizing"]


def _absent(monkeypatch: pytest.MonkeyPatch, absent: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if absent else ModuleType(name))


def test_it_resizes_to_the_nearest_pixel_and_is_gone_afterwards(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _absent(monkeypatch, True)
    model: nn.Module = module.Resizes()
    with torchvision_or_stand_in(model):
        out = model(torch.arange(4.0).view(1, 1, 2, 2))
    assert out[0, 0].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert not hasattr(module, "transforms")


def test_it_stands_in_only_where_it_is_called_and_missing(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, absent in (("Doesnt", True), ("Resizes", False)):
        _absent(monkeypatch, absent)
        with torchvision_or_stand_in(getattr(module, name)()):
            assert not hasattr(module, "transforms")
    module.transforms = own = object()
    _absent(monkeypatch, True)
    with torchvision_or_stand_in(module.Resizes()):
        assert module.transforms is own
    assert module.transforms is own
