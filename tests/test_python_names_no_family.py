"""No line of Python names a family, its class or its title, comments and docstrings included: families are files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipcast.registry.catalogue import load_catalogue

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("registry", "engine", "slipcast") for path in (ROOT / folder).rglob("*.py"))


def names() -> re.Pattern[str]:
    """Ids, also as Python would spell them, titles and classes, as whole words."""
    found: set[str] = set()
    for family in load_catalogue().values():
        found |= {family.id, family.id.replace("-", "_"), family.id.replace("-", ""), family.title}
        found.add(family.model.rpartition(".")[2])
    words = "|".join(re.escape(word) for word in sorted(found, key=len, reverse=True))
    return re.compile(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z0-9])", re.IGNORECASE)


def test_no_line_of_python_names_a_family() -> None:
    pattern = names()
    assert len(FILES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["# only for Z-Image", 'if family == "z_image":', "ZImageTransformer2DModel", "zimage = 1", "a flux-1 file"]
)
def test_a_line_that_names_one_is_found(line: str) -> None:
    assert names().search(line)
