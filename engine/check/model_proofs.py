"""Proofs on the model class: that it builds, that the key map fits it, and that every pattern hits something."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from slipcast.engine.accounting import account, model_links
from slipcast.engine.build import model_class, unknown_arguments
from slipcast.engine.check.header_proofs import NOTHING_BUILT, why_no_cases, why_nothing_built
from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.sampling_names import sampling_names
from slipcast.engine.check.subject import BOOKKEEPING, Built, Case, Subject, build
from slipcast.registry.errors import (
    CheckError,
    DocumentError,
    FamilyFileError,
    IdentificationError,
    KeyMapError,
    SlipcastError,
)
from slipcast.registry.expression import evaluate_config
from slipcast.registry.family import NATIVE_NAMES, Family
from slipcast.registry.identify import Match
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.link import Link
from slipcast.registry.keymap.lint import lint_all
from slipcast.registry.keymap.matching import RuleTree
from slipcast.registry.keymap.operations import accepts, joined_shape, native_shape
from slipcast.registry.keymap.place import ArithmeticHole, LastHole, LiteralSegment, Place, WordHole, parse_place
from slipcast.registry.keymap.rules import Rule
from slipcast.registry.strict_yaml import Where


def prove_lint(subject: Subject) -> Outcome:
    """The key map has no fault that shows without a model."""
    family = subject.family
    findings = lint_all(family.key_map, family.naming_maps)
    if findings:
        raise subject.refuted(
            findings[0].message,
            expected="a key map that can be read both ways",
            hint="see what the message says of the entry",
            where=findings[0].where,
            items=[f"{subject.at(finding.where)}: {finding.message}" for finding in findings[1:]],
        )
    rules = len(family.key_map.rules) + sum(len(other.rules) for other in family.naming_maps.values())
    return proved(f"{rules} rules, each at odds with none")


def prove_class(subject: Subject) -> Outcome:
    """The class is there, and builds with the configuration inferred from each example."""
    try:
        model_class(subject.family.model)
    except FamilyFileError as problem:
        raise subject.refuted(
            problem.found, expected=problem.expected, hint=problem.hint, where=("model",)
        ) from problem
    for case in subject.cases:
        if case.problem is not None and not isinstance(case.problem, IdentificationError) and case.header is not None:
            raise _unbuilt(subject, case.example.header, case.problem, ("config",))
    if subject.tiny_problem is not None:
        raise _unbuilt(subject, "the small model", subject.tiny_problem, ("tiny", "config"))
    if not subject.built:
        return skipped(why_nothing_built(subject))
    examples = sum(case.built is not None for case in subject.cases)
    small = " and the small model" if subject.tiny is not None else ""
    return proved(f"{examples} examples{small} build {subject.family.model}")


def _unbuilt(subject: Subject, what: str, problem: SlipcastError, where: Where) -> CheckError:
    """A proof refuted by an error, at the entry that the error names, if it names one."""
    origin = problem.__cause__ if isinstance(problem.__cause__, KeyMapError) else problem
    if isinstance(origin, KeyMapError):
        where = origin.where or where
    elif isinstance(origin, DocumentError) and origin.field:
        where = (origin.field,)
    return subject.refuted(
        f"{what}: {problem.found}", expected=problem.expected, hint=problem.hint, where=where, items=problem.items
    )


def prove_bijection(subject: Subject) -> Outcome:
    """Every tensor of each example has exactly one place in the model, and the other way round, with equal shapes."""
    done = 0
    for case in subject.cases:
        if case.match is None or case.built is None:
            continue
        try:
            others = (*case.beside, *_outside(case.match))
            account(case.match, case.built.shapes, case.built.tensors.ties, others=others)
        except KeyMapError as problem:
            raise _unbuilt(subject, case.example.header, problem, ("keys",)) from problem
        except SlipcastError as problem:
            raise _unbuilt(subject, case.example.header, problem, _culprit(subject, case, case.built)) from problem
        done += 1
    if not done:
        return skipped(NOTHING_BUILT if subject.cases else why_no_cases(subject))
    return proved(f"{done} examples, every tensor in exactly one place")


def _outside(match: Match) -> Iterator[Match]:
    """What lies outside the prefix of an encoder or a VAE in a file of several: its denoiser answers for that."""
    if match.prefix and match.family.kind != "denoiser":
        weights = match.everything.weights
        yield replace(
            match, bundles={name: bundle for name, bundle in weights.items() if not name.startswith(match.prefix)}
        )


def _culprit(subject: Subject, case: Case, built: Built) -> Where:
    """The entry that is most likely to blame: that of a tensor left over, missing, or of another shape."""
    assert case.match is not None
    match, key_map = case.match, case.match.family.key_map
    links = model_links(match, built.shapes)
    expected = {name for link in links for name in link.files}
    for name in match.bundles:
        if name not in expected and (where := _rule_of_file(key_map, name)) is not None:
            return where
    wrong = next((link for link in links if not _fits(link, case, built)), None)
    return ("keys",) if wrong is None else subject.entry_of(wrong.terms[0].model)


def _rule_of_file(key_map: KeyMap, name: str) -> Where | None:
    segments = tuple(name.split("."))
    rules = [rule for rule in key_map.rules if any(_takes(place, segments) for place in rule.files)]
    return max(rules, key=lambda rule: len(rule.where)).where if rules else None


def _takes(place: Place, segments: tuple[str, ...]) -> bool:
    plain = not any(isinstance(segment, ArithmeticHole | LastHole) for segment in place.segments)
    return plain and place.takes(segments)


def _fits(link: Link, case: Case, built: Built) -> bool:
    assert case.match is not None
    if any(name not in case.match.bundles for name in link.files):
        return False
    have = joined_or_only([case.match.bundles[name].shape for name in link.files])
    if have is not None and len(link.terms) == 1:
        return accepts(link.terms[0].operation, have, built.shapes[link.terms[0].model])
    return have is not None and have == _written(link, built.shapes)


def prove_way_back(subject: Subject) -> Outcome:
    """The names that the model gives back show the same configuration as the example that it was built from.

    A native example's are those that it has. Where all examples are in the model's names, so the native ones derived
    from them are held against the configuration.
    """
    done = {"native": 0, "other": 0}
    for case in subject.cases:
        if case.match is not None and case.built is not None:
            _prove_way_back(subject, case, case.match, case.built)
            done["native" if case.match.layout in (None, NATIVE_NAMES) else "other"] += 1
    if done["native"]:
        return proved(f"{done['native']} native examples come back with their names, and show the same configuration")
    if done["other"]:
        return proved(f"{done['other']} examples show the same configuration in native names; none is native itself")
    return skipped(NOTHING_BUILT if subject.cases else why_no_cases(subject))


def _prove_way_back(subject: Subject, case: Case, match: Match, built: Built) -> None:
    family, name = subject.family, case.example.header
    try:
        written = {file for link in family.key_map.links(built.shapes) for file in link.files}
        view = family.key_map.native_view(built.shapes)
        inferred = evaluate_config(family.config_of(match.variant), family.let, view)
    except KeyMapError as problem:
        raise _unbuilt(subject, f"{name}, written back", problem, ("keys",)) from problem
    lost = sorted(written - view.keys())
    if lost:
        raise subject.refuted(
            f"{name}: {len(lost)} tensors can't be written back",
            expected="operations that can be done on the model's shapes",
            hint="correct the entries of these tensors",
            where=_rule_of_file(family.key_map, lost[0]) or ("keys",),
            items=lost,
        )
    different = [key for key in inferred if inferred[key] != match.config[key]]
    if different:
        raise subject.refuted(
            f"{name}: a file in the model's names shows {different[0]} = {inferred[different[0]]}, "
            f"the native file {match.config[different[0]]}",
            expected="the same configuration from both namings",
            hint="read it from a tensor whose shape is the same in every file",
            where=("config", different[0]),
        )


def prove_config(subject: Subject) -> Outcome:
    """The inferred configuration equals the published one, and that of the small model."""
    done = 0
    for case in subject.cases:
        if case.built is None or case.example.config is None:
            continue
        assert subject.records is not None  # there are cases
        published = subject.records.config(case.example.config)
        _prove_config(subject, case, case.built, published)
        done += 1
    if not done:
        return skipped("no example names a published configuration" if subject.cases else why_no_cases(subject))
    return proved(f"{done} published configurations are what the tensors show")


def _prove_config(subject: Subject, case: Case, built: Built, published: Mapping[str, Any]) -> None:
    """Compare the arguments of both, with the class's defaults where one says nothing."""
    wanted = {key: value for key, value in published.items() if not key.startswith("_") and key not in BOOKKEEPING}
    model = subject.family.model if case.match is None else case.match.model
    inferred, expected = built.arguments, build(model, _known(model, wanted)).arguments
    different = [key for key in expected if key in inferred and inferred[key] != expected[key]]
    if different:
        key = different[0]
        where = ("config", key) if key in subject.family.config else ("config",)
        raise subject.refuted(
            f"{case.example.header}: {key} is {inferred[key]!r}, {case.example.config} says {expected[key]!r}",
            expected="the published configuration; no tensor shows an argument that the class takes otherwise",
            hint=f"correct config.{key}, or add it as a constant",
            where=where,
            items=[f"{name}: {inferred[name]!r}, published {expected[name]!r}" for name in different],
        )


def _known(model: str, config: dict[str, Any]) -> dict[str, Any]:
    unknown = unknown_arguments(model, config)
    return {key: value for key, value in config.items() if key not in unknown}


def prove_patterns(subject: Subject) -> Outcome:
    """Every pattern of precision: and runtime: hits something of some model."""
    if not subject.built:
        return skipped(why_nothing_built(subject))
    family = subject.family
    modules = [item for built in subject.built for item in built.model.named_modules() if item[0]]
    owners = {path for path, module in modules if any(True for _ in module.parameters(recurse=False))}
    names = owners | {name for built in subject.built for name in built.shapes}
    classes = {type(module).__name__ for _, module in modules}
    lists = {path for path, module in modules if isinstance(module, nn.ModuleList | nn.Sequential)}
    wanted: list[tuple[Where, str, bool]] = []
    for role, places in family.precision.keep.items():
        keys: Iterable[str | int] = places if isinstance(places, Mapping) else range(len(places))
        for key, text in zip(keys, places, strict=True):
            wanted += [(("precision", "keep", role, key), one, _hits(one, owners)) for one in _one_word_each(text)]
    for n, text in enumerate(family.precision.keep_fp32):
        wanted += [(("precision", "keep_fp32", n), one, _hits(one, names)) for one in _one_word_each(text)]
    for n, text in enumerate(family.runtime.compile.blocks if family.runtime.compile else ()):
        wanted.append((("runtime", "compile", "blocks", n), text, text in classes))
    for n, text in enumerate(family.runtime.offload.blocks if family.runtime.offload else ()):
        wanted += [
            (("runtime", "offload", "blocks", n), one, _hits(one, lists, exactly=True)) for one in _one_word_each(text)
        ]
    wanted += sampling_names(family)
    dead = [(where, text) for where, text, hit in wanted if not hit]
    if dead:
        raise subject.refuted(
            f"{dead[0][1]!r} hits nothing in {_searched(dead[0][0], family)}",
            expected="patterns that hit a module; of compile its class, of offload a list of modules; of sampling a "
            "pipeline of diffusers and an argument of its call",
            hint="correct or remove it",
            where=dead[0][0],
            items=[f"{subject.at(where)}: {text}" for where, text in dead[1:]],
        )
    return proved(f"{len(wanted)} patterns, each of them hits something")


def _searched(where: Where, family: Family) -> str:
    """Where a name was looked for."""
    return "diffusers" if "sampling" in where else "its library" if "companions" in where else family.model


def _one_word_each(text: str) -> list[str]:
    """A pattern with each word of its ``{a=x|y}`` in turn, the other holes as they are; itself where it has none."""
    segments = parse_place(text).segments
    return [
        str(Place((*segments[:at], LiteralSegment(word), *segments[at + 1 :])))
        for at, segment in enumerate(segments)
        if isinstance(segment, WordHole)
        for word in segment.words
    ] or [text]


def _hits(text: str, paths: Collection[str], *, exactly: bool = False) -> bool:
    place = parse_place(text)
    split = [tuple(path.split(".")) for path in paths]
    return any(place.takes(names) and (not exactly or len(names) == len(place.segments)) for names in split)


def prove_rules(subject: Subject) -> Outcome:
    """Every rule of the key map acts on some model."""
    if not subject.built:
        return skipped(why_nothing_built(subject))
    family = subject.family
    idle: list[tuple[Where, Rule]] = []
    for section, key_map in (((), family.key_map), *((("namings", name), x) for name, x in family.naming_maps.items())):
        idle += [((*section, *rule.where), rule) for rule in _idle_rules(subject, key_map, section)]
    if idle:
        raise subject.refuted(
            f"'{idle[0][1]}' acts on no tensor of any example, nor of the small model",
            expected="rules that are used",
            hint="correct the place in the model, remove the rule, or add the example that needs it",
            where=idle[0][0],
            items=[f"{subject.at(where)}: {rule}" for where, rule in idle[1:]],
        )
    rules = len(family.key_map.rules) + sum(len(other.rules) for other in family.naming_maps.values())
    return proved(f"{rules} rules, each of them used")


def _idle_rules(subject: Subject, key_map: KeyMap, section: Where) -> list[Rule]:
    """The rules of a key map, which stands in a section of the file, that act on no model."""
    tree = RuleTree(key_map.rules)
    used = {
        match.term[0]
        for built in subject.built
        for _, match in tree.match(built.shapes)
        if match is not None and match.term is not None
    }
    # Rules of the family that it extends are proved there, and need not all act on a relative.
    own = subject.documents[0].lines
    unused = [rule for number, rule in enumerate(key_map.rules) if number not in used and not rule.scope]
    return [rule for rule in unused if (*section, *rule.where)[: len(section) + 2] in own]


def joined_or_only(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of tensors put one after another by rows; of one tensor its own."""
    return shapes[0] if len(shapes) == 1 else joined_shape(shapes)


def _written(link: Link, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    parts = [native_shape(term.operation, shapes[term.model]) for term in link.terms]
    known = [part for part in parts if part is not None]
    return joined_or_only(known) if len(known) == len(parts) else None
