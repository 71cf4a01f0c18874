"""The tables of families: whose each recorded header is, and what each family weighs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType

from slipcast.cli.markdown import table
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.engine.plan import Plan
from slipcast.engine.planner import make_plan
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.claims import ask
from slipcast.registry.errors import HeaderError, IdentificationError
from slipcast.registry.family import Family
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.header import Checkpoint
from slipcast.registry.identify import Match, identify
from slipcast.registry.settings import Settings, resolve_settings
from slipcast.registry.strangers import kind_of_stranger, relative_among

_MIB = 2**20
_NOBODY = "of no family"


def recognised_table() -> str:
    """A row for each recorded header and model in it: what it is recognised as."""
    with _records() as records:
        rows = [row for name in records.names for row in _rows(records, name)]
    return table(("header", "family", "variant", "names", "prefix", "formats"), rows)


def _rows(records: Records, name: str) -> Iterator[tuple[str, ...]]:
    try:
        matches = identified(records, name)
    except IdentificationError:
        weights = records.bundles(name).weights
        kind = kind_of_stranger(weights) or relative_among(ask(weights, load_catalogue()))
        kind = kind.partition(",")[0].removeprefix("it looks like ")
        yield f"`{name}`", f"none: {kind or _NOBODY}", "", "", "", ""
        return
    for match in matches:
        formats = ", ".join(sorted({bundle.format for bundle in match.bundles.values()}))
        prefix = f"`{match.prefix}`" if match.prefix else ""
        yield f"`{name}`", f"`{match.family.id}`", match.variant or "", match.layout or "", prefix, formats


def identified(records: Records, name: str) -> tuple[Match, ...]:
    """The models of a recorded header.

    Raises:
        IdentificationError: no family claims any of it, or two claim the same.
    """
    header = records.header(name)
    return identify(Checkpoint(header.path, MappingProxyType({"": header})), load_catalogue())


def sizes_table() -> str:
    """A row for each family with a recorded header: parameters, and bytes in bfloat16 and in fp8 storage."""
    with _records() as records:
        rows = [row for family in load_catalogue().values() if (row := _size(records, family)) is not None]
    return table(
        ("family", "header", "parameters", "bfloat16, MiB", "fp8 storage, MiB", "of it not in fp8, %"),
        rows,
    )


def measured_table(measured: Path = Path("tests/data/measured_sizes.json")) -> str:
    """What other programs measured of their float8 storage, beside what is predicted for the layers that they keep."""
    with _records() as records:
        rows = [
            (
                f"`{size['header']}`",
                ", ".join(f"`{place}`" for place in size["keep"]) or "nothing",
                f"{predicted_without_scales(records, size['header'], size['keep']) / _MIB:,.0f}",
                f"{size['mib']:,}",
                size["source"],
            )
            for size in json.loads(measured.read_text(encoding="utf-8"))["sizes"]
        ]
    return table(("header", "kept back", "predicted, MiB", "measured, MiB", "by"), rows)


def predicted_without_scales(records: Records, name: str, keep: Sequence[str]) -> int:
    """Bytes of a header's models in fp8 storage that has no scales and keeps these modules alone in bfloat16."""
    total = 0
    matches = identified(records, name)
    for match in matches:
        precision = match.family.precision.model_copy(update={"keep": FrozenMapping({"other": tuple(keep)})})
        bare = replace(match, family=match.family.model_copy(update={"precision": precision}))
        plan = make_plan(bare, _settings(records.scratch, "storage"), others=matches)
        total += sum(target.stored[0].nbytes for target in plan.targets if target.stored)
    return total


def _size(records: Records, family: Family) -> tuple[str, ...] | None:
    if not family.examples:
        return None
    holding = {example.header: identified(records, example.header) for example in family.examples}
    formats = {example.header: example.expect.format for example in family.examples}
    alone = {name: len(records.header(name).tensors) for name in holding}
    name = min(holding, key=lambda name: (formats[name] != "plain", len(holding[name]), alone[name]))
    matches = holding[name]
    match = next(match for match in matches if match.family.id == family.id)
    plain = make_plan(match, _settings(records.scratch, "off"), others=matches)
    row = [f"`{family.id}`", f"`{name}`", f"{elements(plain):,}", f"{plain.bytes.resident / _MIB:,.0f}"]
    storage = family.precision.fp8.storage
    if not storage.supported:
        return *row, storage.status.replace("_", " "), ""
    stored = make_plan(match, _settings(records.scratch, "storage"), others=matches)
    rest = sum(target.stored[0].nbytes for target in stored.targets if target.stored and target.codec is None)
    share = 100 * rest / stored.bytes.resident
    return *row, f"{stored.bytes.resident / _MIB:,.0f}", f"{share:.1f}"


def elements(plan: Plan) -> int:
    """Elements of all tensors of the model, tied ones once."""
    return sum(prod(target.shape) for target in plan.targets if target.stored)


def _settings(nowhere: Path, mode: str) -> Settings:
    call = {"device": "cpu", "dtype": "bfloat16", "fp8": {"mode": mode, "remainder": "quantise"}}
    return resolve_settings(call, environ={}, cwd=nowhere, user_folder=nowhere).values


@contextmanager
def _records() -> Iterator[Records]:
    folder = recorded_headers()
    if folder is None:
        raise HeaderError(
            "no recorded headers",
            expected="tests/data/headers of the repository",
            hint="run this in a copy of the repository that is installed in editable mode",
        )
    with tempfile.TemporaryDirectory(prefix="slipcast-docs-") as scratch:
        yield Records(folder, Path(scratch))
