"""A machine with settings of a user and of a project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipcast.registry.settings import ResolvedSettings, resolve_settings


@dataclass
class Machine:
    """A user's folder and a project, of which a test writes the files."""

    root: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        return self.root / "project"

    @property
    def user(self) -> Path:
        return self.root / "user"

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def resolve(self, call: Mapping[str, object] | None = None, **others: Any) -> ResolvedSettings:
        given = {"environ": self.environ, "cwd": self.project, "user_folder": self.user, **others}
        return resolve_settings(call, **given)
