"""Writes files so that they are there whole or not at all: beside their place first, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slipcast.registry.errors import SlipcastError, UnsupportedFileError


@contextmanager
def new_file(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name only when the block ends well.

    Until then it lies beside its place under another name. Whatever ends the block early, an interrupt from the
    keyboard too, removes it, and what lay at ``path`` stays as it was.

    Args:
        path: the file to write; its folder must be there.
        overwrite: whether a file that lies there may be replaced.

    Raises:
        UnsupportedFileError: something lies there already, or there is no such folder.
        SlipcastError: the operating system refuses to write.
    """
    refuse_place(path, overwrite=overwrite)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105 - the rename that replaces, on every platform
    except OSError as error:
        raise SlipcastError(
            f"the file can't be written: {error.strerror or error}",
            expected="a folder that may be written to, with enough room",
            hint="make room there or change the folder's permissions, or name another place; nothing was left behind",
            path=path,
        ) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder if it is not there; where the block fails, a folder that was made for it goes again."""
    made = not path.is_dir()
    if made:
        refuse_place(path)
        path.mkdir()
    try:
        yield
    except BaseException:
        if made:
            path.rmdir()
        raise


def refuse_place(path: Path, *, overwrite: bool = False) -> None:
    """Refuse to write where something lies already, or where there is no folder to write into.

    Args:
        path: what is to be written.
        overwrite: whether a file there may be replaced; a folder never.

    Raises:
        UnsupportedFileError: that is so.
    """
    if path.is_dir():
        raise UnsupportedFileError(
            "this is a folder", expected="the name of a file to write", hint="name a file inside it", path=path
        )
    if not overwrite and (path.exists() or path.is_symlink()):
        raise UnsupportedFileError(
            "the file is there already",
            expected="a name that is free",
            hint="name another file, or allow to replace it with --overwrite",
            path=path,
        )
    if not path.parent.is_dir():
        raise UnsupportedFileError(
            "there is no such folder to write into",
            expected="a folder that exists",
            hint="make the folder first, or name another one",
            path=path.parent,
        )
