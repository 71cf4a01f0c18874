"""Measure how long planning takes, of every recorded header: identification, the model on the meta device, the plan.

    python benchmarks/planning.py                # all, worst first, in seconds for 2,000 tensors
    python benchmarks/planning.py NAME ...       # of tests/data/headers

Each checkpoint is a sparse file after a recorded header. It is planned once, so that everything is imported, and then
timed: the processor's time of this process, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from measuring import ROOT, circumstances, print_circumstances, print_table

_TENSORS = 2_000
_CARD = "cuda:9.0,140GiB"


def measure(names: list[str], repeats: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Seconds of each, worst first by seconds for a number of tensors; and what can't be planned, with the reason."""
    sys.path.insert(0, str(ROOT / "tests"))
    import slipcast
    from support.recorded import recorded, write_checkpoint

    found, left_out = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = write_checkpoint(recorded(name), Path(folder) / f"{name}.safetensors", fill="zero")
            try:
                plan = slipcast.plan(path, device=_CARD)
            except slipcast.SlipcastError as error:
                left_out[name] = error.found
                continue
            seconds = min(_seconds(path) for _ in range(repeats))
            tensors = len(plan.tensors)
            each = {"header": name, "family": plan.origin.family, "tensors": tensors, "seconds": seconds}
            found.append({**each, "for_2000": seconds / max(tensors, _TENSORS) * _TENSORS})
            path.unlink()
    return sorted(found, key=lambda each: -each["for_2000"]), left_out


def _seconds(path: Path) -> float:
    import slipcast

    gc.collect()  # of what the last one left
    began = process_time()
    slipcast.plan(path, device=_CARD)
    return process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="recorded headers; all of them if left out")
    parser.add_argument("--repeats", type=int, default=2, help="plans of each; the fastest counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    every = sorted(path.stem for path in (ROOT / "tests/data/headers").glob("*.json"))
    before = circumstances()
    found, left_out = measure(arguments.names or every, arguments.repeats)
    if arguments.json:
        print(json.dumps({"plans": found, "left_out": left_out, "circumstances": before}, indent=2))
        return
    print("Files with fewer than 2,000 tensors count as they are.\n")
    print_table(
        ("header", "family", "tensors", "seconds", "for 2,000 tensors"),
        [
            (
                each["header"],
                each["family"],
                f"{each['tensors']:,}",
                f"{each['seconds']:.2f}",
                f"{each['for_2000']:.2f}",
            )
            for each in found
        ],
    )
    for name, reason in left_out.items():
        print(f"not planned: {name}: {reason}")
    print_circumstances(before)


if __name__ == "__main__":
    main()
