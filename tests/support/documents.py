"""What the documents show: blocks of code, and command lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_SHOWN = re.compile(r"`(slipcast(?: [^`\n]*)?)`|^(?:\$ | {4,})(slipcast [^\n]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A command line and the output that is shown for it.

    Attributes:
        command: the line after the prompt.
        output: what follows up to the next prompt, without blank lines around it.
    """

    command: str
    output: str

    @property
    def arguments(self) -> list[str]:
        """What follows ``slipcast``."""
        name, *arguments = shlex.split(self.command)
        assert name == "slipcast"
        return arguments


def text_of(document: str) -> str:
    """The text of a document in docs/."""
    return (DOCS / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The blocks of code of a document that are marked with this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


def shown_commands(document: str) -> list[Shown]:
    """The command lines after prompts in a document's console blocks, in order."""
    parts = [part for block in blocks(document, "console") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [Shown(command, output.strip("\n")) for command, _, output in (part.partition("\n") for part in parts)]


def command_lines(document: str) -> list[str]:
    """Every slipcast command line that a document names, wherever: in blocks, or in a sentence; once each."""
    found = (first or second for first, second in _SHOWN.findall(text_of(document)))
    return list(dict.fromkeys(line.strip() for line in found))
