"""Writes to the terminal: facts, tables, JSON, progress bars. Colour and bars appear on a terminal only."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

_MIB = 2**20
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"
_UNBOUNDED = 100_000
"""A width that no line reaches."""

Progress = Callable[[int, int], None]
"""Called with what is done so far and what there is in all."""


def printable(text: str) -> str:
    """The text without what could steer a terminal: names in files may hold anything.

    Control characters but line ends, and marks that turn the direction of writing, become escapes.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def write(text: str = "", *, to_errors: bool = False) -> None:
    """Write a line, or several."""
    _put(printable(text), sys.stderr if to_errors else sys.stdout)


def _put(text: str, stream: TextIO | None = None) -> None:
    """Write at once, so that a pipe that nobody reads any more shows here and not when the process ends."""
    print(text, file=stream or sys.stdout, flush=True)


def write_json(value: Any) -> None:
    """Write plain data as JSON, in ASCII, so that no name and no encoding of the terminal can break it."""
    _put(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Keep what model libraries warn their own developers of, while one of their classes is built, off the terminal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(diffusers|transformers)\.")
        yield


def write_heading(text: str) -> None:
    """Write the heading of a section."""
    _put(f"{_BOLD}{printable(text)}{_RESET}" if in_colour() else printable(text))


def write_facts(facts: Iterable[tuple[str, str | Sequence[str]]]) -> None:
    """Write names and what they are, in two columns; a fact of several lines under one name, one of none not at all."""
    known = [(name, [value] if isinstance(value, str) else list(value)) for name, value in facts]
    width = max(len(name) for name, _ in known)
    for name, lines in known:
        for index, line in enumerate(lines):
            write(f"  {name if index == 0 else '':<{width}}  {line}")


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Write a table, indented. It is folded to the width of a terminal; in a file or a pipe each row is a line.

    Args:
        columns: their headings.
        rows: the cells, as many as there are columns.
        right: headings of the columns that are aligned to the right.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    colour = in_colour()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(
        file=io.StringIO(),
        width=shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(Padding(table, (0, 0, 0, 2)))
    _put("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def progress_bar(label: str, *, in_bytes: bool = True) -> Iterator[Progress]:
    """A bar on standard error while something long runs; nothing where that is no terminal.

    Gives a function to call with what is done so far and what there is in all.

    Args:
        label: what is being done.
        in_bytes: whether that is counted in bytes.
    """
    if not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    counted: list[ProgressColumn] = [MofNCompleteColumn()]
    if in_bytes:
        counted = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeRemainingColumn())
    console = Console(stderr=True, no_color=not in_colour(sys.stderr))
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(printable(label), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _show_nothing(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def in_colour(stream: TextIO | None = None) -> bool:
    """Whether a stream, standard output by default, is a terminal that colours are wanted on (https://no-color.org)."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def prepare_streams() -> None:
    """Make standard output and error take any text: escaped where an encoding lacks it, lost where they are closed."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Stop writing to standard output, which nobody reads any more or which is full."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # it was closed altogether
        sys.stdout = io.StringIO()


def shorten(text: str, letters: int) -> str:
    """A text that has no more than so many letters, cut at a space."""
    if len(text) <= letters:
        return text
    words, space, _ = text[:letters].rpartition(" ")
    return f"{words.rstrip(',;:') if space else text[: letters - 1]}…"


def mebibytes(count: int) -> str:
    """Bytes in MiB, to a tenth, without the unit."""
    return f"{count / _MIB:,.1f}"


def exact_bytes(count: int) -> str:
    """Bytes, in full."""
    return f"{count:,} bytes"
