"""Writes the generated parts of the documents, between markers: ``python -m slipcast.cli.docs_tables [--check]``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from slipcast.cli.application import COMMANDS, application
from slipcast.cli.errors import DONE, INCOMPLETE, run_reporting
from slipcast.cli.markdown import table
from slipcast.cli.output import write
from slipcast.cli.settings_command import description_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import SlipcastError, UnsupportedFileError
from slipcast.registry.new_files import new_file
from slipcast.registry.settings import setting_names
from slipcast.registry.settings_layers import read_defaults, variable

_WIDTH = 100


def families_table() -> str:
    """Every built-in family, from the catalogue."""
    rows = [
        (
            f"`{family.id}`",
            family.title,
            family.kind,
            f"`{family.model}`",
            ", ".join(family.variants),
            family.precision.fp8.storage.status.replace("_", " "),
            ", ".join(sorted({example.expect.format for example in family.examples})),
        )
        for family in load_catalogue().values()
    ]
    return table(("id", "family", "kind", "class", "variants", "fp8 storage", "tested with files in"), rows)


def settings_table() -> str:
    """Every setting, with its default from ``configs/defaults.yaml`` and its meaning from the model."""
    defaults = read_defaults().values
    rows = [
        (
            f"`{key}`",
            f"`{_yaml(defaults[key])}`",
            "" if key == "models" else f"`{variable(key)}`",
            description_of(key),
        )
        for key in setting_names()
    ]
    return table(("setting", "default", "environment", "meaning"), rows)


def help_texts() -> str:
    """What each command says with ``--help``."""
    settings = {**application.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(application, info_name="slipcast", **settings) as around:
        texts = [("slipcast", application.get_help(around))]
        for name in COMMANDS:
            command = application.get_command(around, name)
            assert command is not None
            with click.Context(command, info_name=name, parent=around) as context:
                texts.append((f"slipcast {name}", command.get_help(context)))
    return "\n\n".join(f"## {title}\n\n```text\n{text}\n```" for title, text in texts)


def decisions_table() -> str:
    """What is decided for each file format, setting and device."""
    from slipcast.cli.docs_formats import formats_table  # imports torch

    return formats_table()


def recognised_headers() -> str:
    """Whose each recorded header is."""
    from slipcast.cli.docs_families import recognised_table

    return recognised_table()


def sizes() -> str:
    """What each family weighs."""
    from slipcast.cli.docs_families import sizes_table

    return sizes_table()


def measured_sizes() -> str:
    """What other programs measured."""
    from slipcast.cli.docs_families import measured_table

    return measured_table()


DOCUMENTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/families.md": {"families": families_table},
    "docs/settings.md": {"settings": settings_table},
    "docs/commands.md": {"commands": help_texts},
    "docs/formats.md": {"decisions": decisions_table},
    "docs/evidence.md": {"recognised": recognised_headers, "sizes": sizes, "measured": measured_sizes},
}
"""Each document with its generated parts."""


def current(document: Path, parts: Mapping[str, Callable[[], str]]) -> str:
    """A document's text with its generated parts as they should be.

    Raises:
        UnsupportedFileError: the document is not there, or lacks a marker.
    """
    try:
        text = document.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _no_document(document, "there is no such document") from None
    for name, generate in parts.items():
        between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        found = between.search(text)
        if found is None:
            raise _no_document(document, f"the document lacks the markers of its part {name!r}")
        text = f"{text[: found.end(1)]}\n{generate()}\n\n{text[found.start(2) :]}"
    return text


def outdated(root: Path) -> Iterator[tuple[Path, str]]:
    """The documents below a repository's root that are not current, with the texts that they should have."""
    for name, parts in DOCUMENTS.items():
        text = current(root / name, parts)
        if text != (root / name).read_text(encoding="utf-8"):
            yield root / name, text


@click.command("docs_tables")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a document is not current.")
def main(check: bool) -> int:
    """Write the generated parts of docs/ in the working folder, a repository's root."""
    stale = list(outdated(Path()))
    for path, text in stale:
        if check:
            write(f"{path} is not current: run 'make docs'", to_errors=True)
            continue
        with new_file(path, overwrite=True) as file:
            file.write(text.encode("utf-8"))
        write(f"wrote {path}")
    return INCOMPLETE if check and stale else DONE


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _no_document(document: Path, found: str) -> SlipcastError:
    return UnsupportedFileError(
        found,
        expected="a document with '<!-- NAME: ... -->' and '<!-- end of NAME -->' around each generated part",
        hint="run this in the root of the repository",
        path=document,
    )


if __name__ == "__main__":
    sys.exit(run_reporting(lambda: main(standalone_mode=False), as_json=False))
