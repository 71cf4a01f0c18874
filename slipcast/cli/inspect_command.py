"""``slipcast inspect``: what a checkpoint is, or each of those in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import click

from slipcast import api
from slipcast.cli.errors import DONE, INCOMPLETE
from slipcast.cli.options import call_settings, common_options, path_argument, settings_options
from slipcast.cli.output import (
    exact_bytes,
    mebibytes,
    progress_bar,
    shorten,
    write,
    write_facts,
    write_heading,
    write_json,
    write_table,
)
from slipcast.registry.checkpoint_search import find_checkpoints
from slipcast.registry.errors import IdentificationError, SlipcastError
from slipcast.registry.inspection import Component, Inspection
from slipcast.registry.weight_files import model_of_folder

_MOST_LETTERS = 72
"""Of what is said of a file in a table."""


@click.command("inspect")
@path_argument
@settings_options
@common_options
def command(path: Path, assignments: tuple[str, ...], as_json: bool) -> int:
    """Say what a checkpoint is: family, variant, layout, prefix, formats, components, size, evidence.

    PATH is a .safetensors or .gguf file, an index of shards, a component's folder or a pipeline's folder. In any other
    folder each checkpoint is inspected, in the folders below as well. No weight is read.

    \b
    Examples:
      slipcast inspect model.safetensors
      slipcast inspect --json pipeline/
      slipcast inspect ComfyUI/models/

    For a folder of checkpoints the exit code is 0 if each could be read, also where no family claims one.
    """
    settings = call_settings(assignments)
    several = _checkpoints_in(path)
    if several:
        return _inspect_all(path, several, settings, as_json)
    found = api.inspect(path, **settings)
    if as_json:
        write_json(found.to_dict())
    else:
        _write_inspection(found)
    return DONE


def _checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints of a folder that is not itself one; none for anything else."""
    if not path.is_dir():
        return []
    found = find_checkpoints(path)
    is_one_itself = found == [path] or (len(found) == 1 and found[0].parent == path)
    return [] if is_one_itself else found


def _inspect_all(folder: Path, paths: list[Path], settings: Mapping[str, Any], as_json: bool) -> int:
    answers: dict[Path, Inspection | SlipcastError] = {}
    with progress_bar("inspecting", in_bytes=False) as progress:
        for path in paths:
            try:
                answers[path] = api.inspect(path, **settings)
            except SlipcastError as error:
                answers[path] = error
            progress(len(answers), len(paths))
    taken = model_of_folder(folder)
    if as_json:
        checkpoints = [{**answer.to_dict(), "path": str(path)} for path, answer in answers.items()]
        write_json({"path": str(folder), "taken": None if taken is None else str(taken), "checkpoints": checkpoints})
    else:
        _write_all(folder, answers, taken)
    unread = [answer for answer in answers.values() if isinstance(answer, SlipcastError) and not _was_read(answer)]
    return INCOMPLETE if unread else DONE


def _write_all(folder: Path, answers: Mapping[Path, Inspection | SlipcastError], taken: Path | None) -> None:
    write_heading(f"{folder}: {len(answers)} checkpoint{'' if len(answers) == 1 else 's'}")
    columns = ("checkpoint", "family", "layout", "formats", "MiB")
    write_table(columns, (_row(folder, path, answer) for path, answer in answers.items()), right=("MiB",))
    refused = [path for path, answer in answers.items() if isinstance(answer, SlipcastError)]
    if refused:
        write(f"To see all that is known of one, and what to do about it: slipcast inspect {quote(str(refused[0]))}")
    if taken is None:
        write("To plan, load or convert one of them, name it: the folder is not one model.")
    else:
        write(f"To plan, load or convert, the folder stands for {taken.name}; name another to have that.")


def _was_read(error: SlipcastError) -> bool:
    """Whether the checkpoint could be read and is merely nobody's."""
    return isinstance(error, IdentificationError)


def _row(folder: Path, path: Path, answer: Inspection | SlipcastError) -> tuple[str, ...]:
    name = str(path.relative_to(folder))
    if isinstance(answer, SlipcastError):
        return name, "unknown" if _was_read(answer) else "unreadable", "", shorten(answer.found, _MOST_LETTERS), ""
    return name, _family(answer.main), answer.main.layout or "", _formats(answer.formats), mebibytes(answer.nbytes)


def _write_inspection(found: Inspection) -> None:
    write_heading(str(found.path))
    several = len(found.components) > 1
    main = [] if several else [("family", _family(found.main)), ("layout", _layout(found.main))]
    write_facts(
        [
            *main,
            ("formats", _formats(found.formats)),
            ("size", f"{mebibytes(found.nbytes)} MiB ({exact_bytes(found.nbytes)}) in {found.tensors} tensors"),
            ("container", found.container),
            ("evidence", found.evidence),
            ("guesses", found.guesses),
            ("problems", found.problems),
        ]
    )
    if several:
        write()
        _write_components(found.components)


def _write_components(components: Iterable[Component]) -> None:
    columns = ("component", "kind", "family", "layout", "formats", "MiB")
    rows = (
        (part.name, part.kind, _family(part), _layout(part), _formats(part.formats), mebibytes(part.nbytes))
        for part in components
    )
    write_table(columns, rows, right=("MiB",))


def _family(component: Component) -> str:
    return component.family + (f", variant {component.variant}" if component.variant else "")


def _layout(component: Component) -> str:
    names = f"{component.layout} names" if component.layout else "names that native and diffusers layouts share"
    in_name = component.prefix.removesuffix(".") == component.name
    return names + (f" under the prefix {component.prefix}" if component.prefix and not in_name else "")


def _formats(formats: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in formats.items()) or "no weights"
