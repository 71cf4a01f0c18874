"""What notices a wrong fact: a proof of the file, or nobody but the source that stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipcast.engine.check.fact import has_source
from slipcast.engine.check.run import lead_proof
from slipcast.engine.check.subject import Subject, cases_of, file_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.errors import SlipcastError
from slipcast.registry.family import Family
from slipcast.registry.family_file import FamilyFile, build_family, read_family_file
from slipcast.registry.strict_yaml import Document
from support.fact_mutations import WrongFact

SOURCE = "source"
PROOFS = ("patterns", "pipeline", "sampling", "latents", "scheduler", "blocks", "parts", "dtypes")
ON_HEADERS = ("recognised", "bijection")
_FOR_HEADERS = ("prefixes", "contains", "guess_from_filename")


def noticed_by(wrong: WrongFact, subject: Subject) -> str | None:
    """The proof that a wrong fact fails; ``source`` where it rests on one beside it; None where nothing notices it.

    Args:
        wrong: the file with the fact.
        subject: the file as it is, of which all proofs hold.
    """
    try:
        family = _read(wrong, subject)
    except SlipcastError:
        return "reading"
    document = replace(subject.documents[0], data=wrong.data)
    catalogue = subject.catalogue.with_family(family)
    broken = replace(subject, family=family, documents=[document, *subject.documents[1:]], catalogue=catalogue)
    found = _failed(broken, PROOFS)
    if found is None and any(word in wrong.path for word in _FOR_HEADERS) and subject.records is not None:
        cases = tuple(cases_of(family, subject.records, catalogue))
        found = _failed(replace(broken, cases=cases), ON_HEADERS)
    if found is None and has_source(broken, wrong.path):
        return SOURCE
    return found


def _failed(subject: Subject, proofs: Sequence[str]) -> str | None:
    return next((name for name in proofs if lead_proof(name, subject).status == "failed"), None)


def _read(wrong: WrongFact, subject: Subject) -> Family:
    family = subject.family
    base = None
    if family.extends is not None:
        base = read_family_file(file_of(load_catalogue()[family.extends]))
    document = Document(wrong.data, subject.documents[0].path, subject.documents[0].lines)
    return build_family(FamilyFile(family.id, family.source, document), base, linted=True)
