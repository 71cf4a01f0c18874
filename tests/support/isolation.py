"""Keeps tests apart from the settings of whoever runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make ``folder`` the working folder and the home, without settings of any kind."""
    for name in list(os.environ):
        if name.startswith("SLIPCAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / ".config"))
    monkeypatch.chdir(folder)
