"""Leads the proofs of family files, one after another, each whatever became of the others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from slipcast.engine.check.block_facts import prove_blocks
from slipcast.engine.check.converter_proof import prove_converter
from slipcast.engine.check.file_facts import prove_parts
from slipcast.engine.check.forward_proofs import prove_forward, prove_keep
from slipcast.engine.check.header_proofs import prove_layout, prove_others, prove_recognised
from slipcast.engine.check.latent_facts import prove_latents
from slipcast.engine.check.model_proofs import (
    prove_bijection,
    prove_class,
    prove_config,
    prove_lint,
    prove_patterns,
    prove_rules,
    prove_way_back,
)
from slipcast.engine.check.name_proofs import prove_names
from slipcast.engine.check.pipeline_facts import prove_pipeline, prove_sampling
from slipcast.engine.check.precision_facts import prove_dtypes
from slipcast.engine.check.proof import CheckedFamily, Outcome, Proof
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.engine.check.scheduler_facts import prove_scheduler
from slipcast.engine.check.subject import Subject, file_of, subject_of
from slipcast.engine.check.todo_proof import prove_filled_in
from slipcast.engine.check.value_proofs import prove_values
from slipcast.registry.catalogue import Catalogue, load_catalogue, load_family_file
from slipcast.registry.errors import SlipcastError
from slipcast.registry.family import Family

PROOFS: Mapping[str, Callable[[Subject], Outcome]] = MappingProxyType(
    {
        "filled in": prove_filled_in,
        "key map": prove_lint,
        "class": prove_class,
        "bijection": prove_bijection,
        "way back": prove_way_back,
        "config": prove_config,
        "patterns": prove_patterns,
        "rules": prove_rules,
        "names": prove_names,
        "recognised": prove_recognised,
        "layout": prove_layout,
        "others": prove_others,
        "values": prove_values,
        "converter": prove_converter,
        "pipeline": prove_pipeline,
        "sampling": prove_sampling,
        "latents": prove_latents,
        "scheduler": prove_scheduler,
        "blocks": prove_blocks,
        "parts": prove_parts,
        "dtypes": prove_dtypes,
        "forward": prove_forward,
        "keep": prove_keep,
    }
)
"""Every proof, by its name, in the order in which they are led."""


def check_families(
    names: Sequence[str], *, folders: Sequence[str | Path] = (), headers: Path | None = None
) -> Iterator[CheckedFamily]:
    """Prove family files.

    Args:
        names: ids of families, or paths of family files; all known families where there are none. A file is laid over
            the known families, also over one of its own id.
        folders: folders of more family files.
        headers: the folder of the recorded headers; that of the repository that slipcast runs from, if left out.

    Returns:
        One after another, as they are done.

    Raises:
        SettingsError: an id that no family has, or no folder of headers where one is named.
        FamilyFileError: one of the known family files can't be read.
    """
    catalogue = load_catalogue(folders)
    ids = [name for name in names if not _is_file(name)]
    for id_ in ids:
        catalogue.refuse_unknown(id_, "an id that 'slipcast families' lists, or the path of a family file")
    return _checked(names, ids, catalogue, recorded_headers(headers))


def _checked(
    names: Sequence[str], ids: Sequence[str], catalogue: Catalogue, headers: Path | None
) -> Iterator[CheckedFamily]:
    with _records(headers) as records:
        for name in names or catalogue:
            if name in ids or not names:
                yield _check(catalogue[name], file_of(catalogue[name]), catalogue, records)
            else:
                yield _check_file(Path(name), catalogue, records)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file()


@contextmanager
def _records(folder: Path | None) -> Iterator[Records | None]:
    with tempfile.TemporaryDirectory(prefix="slipcast-check-") as scratch:
        yield None if folder is None else Records(folder, Path(scratch))


def _check_file(path: Path, catalogue: Catalogue, records: Records | None) -> CheckedFamily:
    """Prove a file that is in no folder of families; one that can't be read is refuted by that."""
    try:
        family = load_family_file(path)
    except SlipcastError as problem:
        return CheckedFamily(path.stem, str(path), (Proof("reads", "failed", problem.found, problem),))
    return _check(family, path, catalogue.with_family(family), records)


def _check(family: Family, path: Path, catalogue: Catalogue, records: Records | None) -> CheckedFamily:
    with subject_of(family, path, catalogue, records) as subject:
        proofs = tuple(lead_proof(name, subject) for name in PROOFS)
    return CheckedFamily(family.id, str(path), proofs)


def lead_proof(name: str, subject: Subject) -> Proof:
    """Lead one proof; whatever refutes it is its result."""
    try:
        outcome = PROOFS[name](subject)
    except SlipcastError as problem:
        return Proof(name, "failed", problem.found, problem)
    return Proof(name, outcome.status, outcome.detail)
