"""The signatures of the built-in families, so that a start need not read all their files.

``python -m slipcast.registry.catalogue_index [--check]`` writes ``families/index.json``. An index that was made for
other files than those that are there is passed over: it can make a start slow, never wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipcast.registry.signature import Signature

INDEX = "index.json"


def digest_of(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 of the files' names and bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def read_index(root: Path, paths: Iterable[Path]) -> dict[str, Signature]:
    """The signatures by family id; empty where there is no index, or one of other files."""
    try:
        data = json.loads((root / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if data["digest"] != digest_of(paths, root):
        return {}
    return {
        id_: Signature(
            tuple(entry["prefixes"]),
            tuple(entry["native"]),
            tuple(map(tuple, entry["model"])),
            tuple(map(tuple, entry["namings"])),
        )
        for id_, entry in data["families"].items()
    }


def index_text(signatures: Mapping[str, Signature], digest: str) -> str:
    """The index as JSON, a line for each family."""
    lines = [f"{json.dumps(id_)}: {json.dumps(_plain(signatures[id_]))}" for id_ in sorted(signatures)]
    return f'{{"digest": "{digest}", "families": {{\n' + ",\n".join(lines) + "\n}}\n"


def _plain(signature: Signature) -> dict[str, Any]:
    return {
        "prefixes": signature.prefixes,
        "native": signature.native,
        "model": signature.model,
        "namings": signature.namings,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the index, or say with ``--check`` whether it is current."""
    from slipcast.registry.catalogue import builtin_index

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the index is current")
    check = parser.parse_args(arguments).check
    path, text = builtin_index()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{path.name} is not current; run 'make schema'", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
