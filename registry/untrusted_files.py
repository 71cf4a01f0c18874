"""Opening and parsing files that nobody vouches for.

Sizes are checked first, a failing call of the operating system becomes a ``HeaderError``, and JSON is read in a strict
form.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from slipcast.registry.errors import HeaderError, UnsupportedFileError
from slipcast.registry.foreign_files import SNIFFED_BYTES, foreign_content

_MIB = 1 << 20
_MOST_LEVELS = 32
_LONGEST_INTEGER = 19
"""Digits of the longest integers that are read as such: what they could count fits 63 bits."""


class DuplicateNameError(ValueError):
    """A JSON object that holds one name twice."""


def status_of(path: Path) -> os.stat_result:
    """What the operating system knows of the file or folder at ``path``, links followed.

    Raises:
        HeaderError: there is nothing, a link leads nowhere, or it may not be looked at.
    """
    try:
        return path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; gives the file and its size in bytes.

    Raises:
        HeaderError: the file is missing, may not be read, or fails while it is read.
        UnsupportedFileError: it is a folder, a pipe or a device.
    """
    _check_regular(path, status_of(path))  # before it is opened: opening a pipe would wait for its writer
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(path, status)
            yield file, status.st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def list_folder(folder: Path) -> list[str]:
    """The names in a folder, sorted.

    Raises:
        HeaderError: the folder may not be read.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths
    except OSError as error:
        raise _unreadable(folder, error) from None


def read_json_object(path: Path, *, limit_mib: int, constants: bool = False) -> dict[str, Any]:
    """A JSON file whose outermost value is an object.

    Args:
        path: of the file.
        limit_mib: the largest size that is read.
        constants: whether NaN and infinities are read, which are no JSON; whoever says so has to look for them.

    Raises:
        HeaderError: the file is unreadable, larger than ``limit_mib``, nested more than 32 levels deep, no strict JSON
            (see ``parse_json_object``), or something else altogether.
    """
    with open_regular(path) as (file, size):
        if size > limit_mib * _MIB:
            raise HeaderError(
                f"the JSON file takes {size} bytes",
                expected=f"at most {limit_mib} MiB",
                hint="Such a file holds names and numbers only; download it again.",
                path=path,
            )
        raw = file.read(limit_mib * _MIB + 1)
    foreign = None if raw.lstrip().startswith(b"{") else foreign_content(path, raw[:SNIFFED_BYTES], size, "JSON")
    if foreign is not None:
        raise foreign
    value = parse_json_object(raw, path, what="the JSON file", constants=constants)
    if _is_deeper(value, _MOST_LEVELS):
        raise _damaged(path, f"the JSON file is nested more than {_MOST_LEVELS} levels deep")
    return value


def parse_json_object(raw: bytes, path: Path, *, what: str, constants: bool = False) -> dict[str, Any]:
    """UTF-8 JSON in a strict form: an object, no name twice in any object, no NaN or infinity, no lone surrogates.

    Integers of more than 19 digits, and a minus zero, come back as floats, as they do from other readers of JSON.

    Args:
        raw: the text.
        path: where it stands, for the message.
        what: what it is, for the message.
        constants: whether NaN and infinities are read all the same.

    Raises:
        HeaderError: it is no such JSON.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=float if constants else _no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _damaged(path, f"{what} is nested too deeply") from None
    except DuplicateNameError as error:
        raise _damaged(path, f"{what} holds the name {error} twice in one object", items=(str(error),)) from None
    except UnicodeDecodeError as error:
        raise _damaged(path, f"{what} is no UTF-8 at its byte {error.start}") from None
    except UnicodeEncodeError:
        raise _damaged(path, f"{what} holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise _damaged(path, f"{what} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, f"{what} is a JSON {type(value).__name__}, no object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise DuplicateNameError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return value


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    members = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(member, levels - 1) for member in members)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int | float:
    if len(digits) > _LONGEST_INTEGER or digits == "-0":
        return _finite(digits)
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:20]}{'...' if len(digits) > 20 else ''} is out of range")
    return number


def _damaged(path: Path, found: str, items: tuple[str, ...] = ()) -> HeaderError:
    return HeaderError(
        found,
        expected="a JSON object in UTF-8 with each name once",
        hint="The file is damaged or was written by a faulty program: download or convert it again.",
        path=path,
        items=items,
    )


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
    raise UnsupportedFileError(
        f"this is {kind}, not a file",
        expected="a regular file",
        hint="Name a file that lies inside it." if kind == "a folder" else "Save the data to a file first.",
        path=path,
    )


def _unreadable(path: Path, error: OSError | ValueError) -> HeaderError:
    reason = error.errno if isinstance(error, OSError) else None
    expected = "a file or folder that can be read"
    if reason in (errno.ENOENT, errno.ENOTDIR) and path.is_symlink():
        target = os.readlink(path)  # noqa: PTH115 - the text of the link, resolved or not
        return HeaderError(
            f"the link leads to {target}, where there is nothing",
            expected=expected,
            hint="Restore the file that it leads to, or download the model again.",
            path=path,
        )
    if reason in (errno.ENOENT, errno.ENOTDIR):
        return HeaderError(
            "there is no such file or folder",
            expected=expected,
            hint="Check the path; a model that is published somewhere has to be downloaded first.",
            path=path,
        )
    if reason in (errno.EACCES, errno.EPERM):
        return HeaderError(
            "this user may not read it", expected=expected, hint="Change the file's permissions (chmod u+r).", path=path
        )
    text = error.strerror if isinstance(error, OSError) else str(error)
    return HeaderError(f"it can't be read: {text}", expected=expected, hint="Check the path and the disk.", path=path)
