"""A family file that says no more than it must, and files made from it."""

from __future__ import annotations

from pathlib import Path

MINIMAL = """\
schema: 1
id: {id}
title: A family
kind: {kind}
model: diffusers.SomeModel
identify:
  has: [proj.weight]
precision:
  fp16: safe
  fp8:
    storage: supported
    compute: supported
"""
MINIMAL_LINES = MINIMAL.count("\n")


def family_text(id: str = "some-family", *, kind: str = "denoiser", more: str = "") -> str:
    """The text of a minimal family file, with more fields after it."""
    return MINIMAL.format(id=id, kind=kind) + more


def write_family(folder: Path, id: str = "some-family", *, kind: str = "denoiser", more: str = "") -> Path:
    """Write a minimal family file with more fields after it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{id}.yaml"
    path.write_text(family_text(id, kind=kind, more=more), encoding="utf-8")
    return path
