"""Plausible wrong facts in family files are caught: some proof fails, or the fact rests on the source beside it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from slipcast.engine.check.records import Records, recorded_headers
from slipcast.engine.check.subject import file_of, subject_of
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.strict_yaml import load_yaml
from support.broken_families import models_built_once
from support.fact_mutations import wrong_facts
from support.wrong_facts import SOURCE, noticed_by

CATALOGUE = load_catalogue()

ON_SOURCES = {
    "arguments flag": "whether weights are distilled shows in no tensor and in no class",
    "companion class": "pipelines that take any tokenizer, or a scheduler other than they annotate",
    "fp8 compute refused": "a class that does not run by itself",
    "fp8 storage refused": "a class that does not run by itself",
    "guess_from_filename": "words that people write into names of files",
    "precision.compute_default": "in what a family is published, where no header is on record",
    "precision.fp16": "what overflows shows in pictures alone",
    "precision.fp8": "how far one scale of activations may reach shows in pictures alone",
    "precision.keep_fp32 one left out": "of entries with a comment around them that the class has as well",
    "precision.nvfp4_layout": "no nvfp4 header of most families is on record",
    "prefixes": "how other programs name models inside files of several",
    "runtime.compile": "why blocks are not compiled is the file's own reason",
    "runtime.offload": "lists with a comment around them",
    "sampling.denoiser": "the comment is of another entry on the line above",
    "sampling.guidance": "its source states the other number as well",
    "sampling.image_to_image": "a comment stands beside it",
    "sampling.latent_scale": "a comment stands beside it",
    "sampling.pipeline": "a comment stands beside it",
    "sampling.steps": "its source states the other number as well",
    "sampling.takes": "widths of encoders of which no header is on record",
    "scheduler flag": "how a scheduler works shows in pictures alone",
    "scheduler number": "its source states the other number as well",
}
"""Kinds of facts some of which rest on the source named beside them, and why nothing else shows them."""

UNNOTICED = {
    "architectures other": "another architecture that llama.cpp knows",
    "companion class": "a pipeline that takes any tokenizer, of an encoder for which transformers has none",
    "companion family": "another encoder of the same class, where takes does not say how wide its states are",
    "companion variant": "variants that differ in constants that no published configuration states, or in widths",
    "companions name": "roles of families that are no denoisers, which no pipeline is made of",
    "contains family": "a family in a place that no recorded file fills, which the pipeline needs elsewhere",
    "fp8 compute claimed": "of convolutions, which run in float8; the loss is in pictures",
    "fp8 storage claimed": "of convolutions, which run in float8; the loss is in pictures",
    "precision.compute": "a dtype in which an example is published",
    "precision.compute_default": "a dtype in which an example is published",
    "runtime.compile": "a reason against compiling, where the class declares no repeated blocks",
    "runtime.offload": "a tower that holds little of the model left out, or a large list beside the blocks",
    "sampling.pipeline": "another pipeline of the same parts, with the same defaults",
    "sampling.size_multiple": "another multiple that the pipeline's own check asks for",
    "sampling.takes": "an argument that is as large by chance",
    "guess_from_filename": "a longer word in a variant that another word or the default chooses",
}
"""Kinds of facts of which nothing notices some wrong ones, and why."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = recorded_headers()
    assert folder is not None
    return Records(folder, tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, Counter[str]]]:
    """How many wrong facts of each kind were caught, and how many were not, printed at the end."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    yield found
    for kind, numbers in sorted(found.items()):
        print(f"{kind:36} {', '.join(f'{number} {what}' for what, number in sorted(numbers.items()))}")
    whole: Counter[str] = sum(found.values(), Counter())
    print(f"{'all':36} {', '.join(f'{number} {what}' for what, number in sorted(whole.items()))}")


@pytest.mark.parametrize("id_", list(CATALOGUE))
def test_a_wrong_fact_is_caught(id_: str, records: Records, counts: dict[str, Counter[str]]) -> None:
    family = CATALOGUE[id_]
    missed = []
    with models_built_once(), subject_of(family, file_of(family), CATALOGUE, records) as subject:
        for wrong in wrong_facts(load_yaml(file_of(family)).data, subject):
            by = noticed_by(wrong, subject)
            counts[wrong.kind]["caught" if by not in (None, SOURCE) else by or "unnoticed"] += 1
            excused = {SOURCE: ON_SOURCES, None: UNNOTICED}.get(by, (wrong.kind,))
            if wrong.kind not in excused:
                missed.append(f"{wrong} ({by or 'unnoticed'})")
    assert missed == []


def test_nearly_all_wrong_facts_are_caught(counts: dict[str, Counter[str]]) -> None:
    whole: Counter[str] = sum(counts.values(), Counter())
    if whole.total() > 1000:  # of all files, where the test above ran for all
        assert whole["unnoticed"] < whole.total() * 0.05
        assert whole["source"] < whole.total() * 0.08
