"""Files that are no safetensors: what their names and first bytes say they are, and what to do about it."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path
from typing import Literal

from slipcast.registry.errors import HeaderError, SlipcastError, UnsupportedFileError

PICKLE_SUFFIXES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle"})
SNIFFED_BYTES = 512
"""How many first bytes of a file ``foreign_content`` wants to see."""

_SHOWN_LETTERS = 40

_CONVERT = (
    "import sys,torch,safetensors.torch as s;"
    'd=torch.load(sys.argv[1],"cpu",weights_only=True);d=d.get("state_dict",d);'
    "s.save_file({k:v.contiguous().clone() for k,v in d.items() if torch.is_tensor(v)},sys.argv[2])"
)
_WEIGHTS = "a safetensors or GGUF file, an index of shards, or a folder that holds one of these"
_AGAIN = "Download the file again, and compare its size with the published one."

Kind = Literal["safetensors", "GGUF", "JSON"]
"""What a file should have been."""


def foreign_name(path: Path) -> SlipcastError | None:
    """The error that refuses ``path`` for its name alone, or None."""
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        return _pickle(path, f"the name ends in {suffix}, which is a Python pickle and can run code when it is loaded")
    return None


def foreign_content(path: Path, first: bytes, size: int, kind: Kind = "safetensors") -> SlipcastError | None:
    """The error that says what else a file is than it should be, judged by its first bytes, or None.

    Args:
        path: the file.
        first: its first ``SNIFFED_BYTES`` bytes, or all of them.
        size: bytes of the whole file.
        kind: what it should be.
    """
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    no = f"not a {kind} file: "
    if not first:
        return HeaderError("the file is empty", expected=_WEIGHTS, hint=_AGAIN, path=path)
    if first.startswith(b"version https://git-lfs.github.com/spec/"):
        return HeaderError(
            f"{no}a git-lfs pointer, which stands for weights that were not downloaded",
            expected="the weights themselves",
            hint="Run 'git lfs pull' in the repository that it came with, or download the file itself.",
            path=path,
        )
    if first.startswith(b"PK\x03\x04"):
        return _pickle(path, f"{no}a zip archive, as torch.save writes it, with a pickle inside")
    if first[:1] == b"\x80" and first[1:2] in b"\x01\x02\x03\x04\x05" and len(first) > 1:
        return _pickle(path, f"{no}a Python pickle, which can run code when it is loaded")
    if first.startswith(b"GGUF"):
        return UnsupportedFileError(
            f"{no}GGUF, under a name that says otherwise",
            expected="a name that ends in .gguf",
            hint="Rename the file.",
            path=path,
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return HeaderError(
            f"{no}a web page, probably an error or a login page that was saved under the model's name",
            expected=_WEIGHTS,
            hint="Log in or accept the model's licence where it is published, then download the file again.",
            path=path,
        )
    if kind != "JSON" and text.startswith((b"{", b"[")):
        return HeaderError(
            f"{no}JSON text",
            expected=_WEIGHTS,
            hint="Name the weights themselves, or an index whose name ends in .safetensors.index.json.",
            path=path,
        )
    if not first.strip(b"\0"):
        return HeaderError(
            f"{no}it begins with {len(first)} zero bytes",
            expected="the length of a header, then the header",
            hint=f"An interrupted download leaves such a file of {size} bytes. {_AGAIN}",
            path=path,
        )
    if kind != "JSON" and (words := _text(first)):
        return HeaderError(
            f"{no}text, which begins with {words!r}",
            expected=_WEIGHTS,
            hint="Read it: it may say why there are no weights. Then download the file again, or name another one.",
            path=path,
        )
    return None


def _text(first: bytes) -> str:
    """The beginning of a text; "" of anything else. The last character may be cut off."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(first).lstrip("\ufeff").strip()
    except UnicodeDecodeError:
        return ""
    lines = text.splitlines()
    return lines[0][:_SHOWN_LETTERS] if lines and all(line.replace("\t", "").isprintable() for line in lines) else ""


def _pickle(path: Path, found: str) -> UnsupportedFileError:
    source = path.absolute()
    ending = "-converted.safetensors" if source.suffix == ".safetensors" else ".safetensors"
    command = shlex.join(["python", "-c", _CONVERT, str(source), str(source.with_name(source.stem + ending))])
    return UnsupportedFileError(
        found,
        expected=_WEIGHTS,
        hint=f"Convert it with this command, which loads tensors only and runs no code of the file:\n{command}",
        path=path,
    )
