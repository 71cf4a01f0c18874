"""The proof that a drafted family file has been filled in."""

from __future__ import annotations

import re
from pathlib import Path

from slipcast.engine.check.proof import Outcome, proved
from slipcast.engine.check.subject import Subject
from slipcast.registry.errors import CheckError

_MARK = re.compile(r"\bTODO\b")


def prove_filled_in(subject: Subject) -> Outcome:
    """Nothing in the file, comments included, is still marked TODO, as drafts mark what nobody has decided."""
    path = Path(subject.documents[0].path or "")
    lines = path.read_text(encoding="utf-8").splitlines()
    marked = [f"line {number}: {' '.join(line.split())}" for number, line in enumerate(lines, 1) if _MARK.search(line)]
    if marked:
        raise CheckError(
            f"{path.name}: {len(marked)} line{'' if len(marked) == 1 else 's'} marked TODO",
            expected="a file in which everything is decided",
            hint="decide what each line asks, and remove the mark; docs/adding-a-family.md explains the sections",
            items=marked,
        )
    return proved("nothing is marked TODO")
