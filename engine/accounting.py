"""Every tensor of the file in exactly one place, every tensor of the model from one source, or an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from slipcast.engine.plan import Fate, FileTensor, Piece
from slipcast.registry.errors import AccountingError, QuantisationError
from slipcast.registry.header import Shape
from slipcast.registry.identify import Match
from slipcast.registry.keymap.link import Link, Term
from slipcast.registry.keymap.operations import accepts, joined_shape, native_shape, shared_shapes
from slipcast.registry.quantisation import Bundle


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where each tensor of the model comes from, and what becomes of the rest.

    Attributes:
        pieces: model name -> the pieces of the file that make it; a tied tensor may have none of its own.
        shapes: name of each weight of the file that is used -> its logical shape, without the padding of codes.
        links: the links that hold, for the way back.
        unused: fates of the tensors of the file that no target takes.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    shapes: Mapping[str, Shape]
    links: tuple[Link, ...]
    unused: tuple[FileTensor, ...]


def account(
    match: Match,
    shapes: Mapping[str, Shape],
    ties: Mapping[str, str],
    *,
    others: Sequence[Match] = (),
    unexpected: Sequence[str] = (),
) -> Accounts:
    """Hold a file against a model class.

    Args:
        match: the identified model.
        shapes: the model's parameters and persistent buffers by name, with their logical shapes.
        ties: name -> the name of the tensor that it is the same as.
        others: the other models found in the same file.
        unexpected: globs of plain tensors that may be left over.

    Raises:
        QuantisationError: scales or markers that belong to no weight.
        AccountingError: tensors left over, parameters without a source, shapes that differ.
    """
    _refuse_orphans(match)
    links = model_links(match, shapes)
    held = tuple(link for link in links if all(name in match.bundles for name in link.files))
    missing = _missing(links, held, match.bundles, shapes, ties)
    logical = {name: shape for link in held for name, shape in _logical_shapes(link, match.bundles, shapes)}
    problems = [problem for link in held for problem in _shape_problems(link, logical, shapes)]
    used = {name for link in held for name in link.files}
    unused, left_over = _unused(match, used, others, unexpected)
    if missing or left_over or problems:
        raise _unaccounted(match, missing, left_over, problems, shapes)
    pieces = {
        term.model: found
        for link in held
        for term, found in zip(link.terms, _pieces(link, match, logical, shapes), strict=True)
    }
    used_shapes = {match.bundles[name].name: shape for name, shape in logical.items()}
    return Accounts(pieces, used_shapes, held, unused)


def model_links(match: Match, shapes: Mapping[str, Shape]) -> tuple[Link, ...]:
    """The links between the file's names and the model's: the family's key map, or the identity."""
    if match.layout == "diffusers":
        return tuple(Link((name,), (Term(name),)) for name in shapes)
    return match.key_map.links(shapes.keys(), match.bundles.keys())


def _refuse_orphans(match: Match) -> None:
    orphans = match.everything.orphans
    if orphans:
        raise QuantisationError(
            "1 scale or marker that no weight consumes"
            if len(orphans) == 1
            else f"{len(orphans)} scales or markers that no weight consumes",
            expected="every scale and marker beside the weight that it belongs to, in a spelling that its format knows",
            hint="the file is damaged, or in a format that is not known: loading it would give wrong weights",
            path=match.header.path,
            items=[f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in orphans],
        )


def _missing(
    links: Iterable[Link],
    held: Collection[Link],
    bundles: Mapping[str, Bundle],
    shapes: Mapping[str, Shape],
    ties: Mapping[str, str],
) -> list[str]:
    """Model tensors without a source, unless they are tied to one that has it."""
    sourced = {term.model for link in held for term in link.terms}
    tied = {name for name in shapes if name in ties and ties[name] in sourced}
    tied |= {other for name, other in ties.items() if name in sourced}
    lines: list[str] = []
    for link in links:
        wanting = [term.model for term in link.terms if term.model not in sourced and term.model not in tied]
        if wanting:
            absent = [name for name in link.files if name not in bundles]
            lines.append(f"missing: {' + '.join(absent)} (for {' + '.join(wanting)})")
    return lines


def _logical_shapes(
    link: Link, bundles: Mapping[str, Bundle], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    """The shape of each file's weight of a link; one that its codes pad has the shape that the model needs.

    Of several weights whose rows make one of the model's, each has the same share of them.
    """
    want = _native_shape(link, shapes)
    shares = None if want is None else shared_shapes(want, len(link.files))
    for name, share in zip(link.files, shares or (None,) * len(link.files), strict=True):
        bundle = bundles[name]
        yield name, share if share is not None and bundle.pads(share) else bundle.shape


def _native_shape(link: Link, shapes: Mapping[str, Shape]) -> Shape | None:
    return _whole([native_shape(term.operation, shapes[term.model]) for term in link.terms])


def _shape_problems(link: Link, logical: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> list[str]:
    """Shapes that do not fit, as lines. Fused tensors add their rows."""
    have = _whole([logical[name] for name in link.files])
    want = _native_shape(link, shapes)
    if len(link.terms) == 1:
        (term,) = link.terms
        fits = have is not None and accepts(term.operation, have, shapes[term.model])
    else:
        fits = have is not None and have == want
    if fits:
        return []
    models = " + ".join(f"{term.model} {list(shapes[term.model])}" for term in link.terms)
    return [f"shape: {' + '.join(link.files)} is {_shown(have)}, the model's {models} needs {_shown(want)}"]


def _whole(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of tensors put one after another along their rows, or None where they don't fit together."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    return known[0] if len(known) == 1 else joined_shape(known)


def _shown(shape: Shape | None) -> str:
    return "of shapes that can't be joined" if shape is None else str(list(shape))


def _pieces(
    link: Link, match: Match, logical: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> list[tuple[Piece, ...]]:
    """The pieces of each term of a link."""
    if len(link.files) > 1:
        return [tuple(_joined_pieces([(match.bundles[name].name, logical[name][0]) for name in link.files]))]
    source = match.bundles[link.files[0]]
    if len(link.terms) == 1:
        (term,) = link.terms
        if term.operation == "swap_halves":
            return [_swapped_pieces(source.name, 0, shapes[term.model][0])]
        return [(Piece(source=source.name, operation=term.operation),)]
    found: list[tuple[Piece, ...]] = []
    row = 0
    for term in link.terms:
        native = native_shape(term.operation, shapes[term.model])
        assert native is not None  # the shapes fit
        if term.operation == "swap_halves":
            found.append(_swapped_pieces(source.name, row, native[0]))
        else:
            found.append((Piece(source=source.name, source_rows=(row, row + native[0]), operation=term.operation),))
        row += native[0]
    return found


def _swapped_pieces(source: str, first: int, rows: int) -> tuple[Piece, Piece]:
    """The two halves of some rows, each going to where the other was."""
    half = rows // 2
    return (
        Piece(source=source, source_rows=(first, first + half), target_rows=(half, rows)),
        Piece(source=source, source_rows=(first + half, first + rows), target_rows=(0, half)),
    )


def _joined_pieces(sources: Sequence[tuple[str, int]]) -> Iterator[Piece]:
    row = 0
    for source, rows in sources:
        yield Piece(source=source, target_rows=(row, row + rows))
        row += rows


def _unused(
    match: Match, used: Collection[str], others: Sequence[Match], unexpected: Sequence[str]
) -> tuple[tuple[FileTensor, ...], list[Bundle]]:
    """Fates of what no link uses, and what is left over."""
    fates = [
        FileTensor(name=marker.name, fate="side tensor", reason="marks the file as quantised")
        for marker in match.everything.markers
    ]
    fates += [FileTensor(name=name, fate="dropped", reason=reason) for name, reason in match.everything.ignored.items()]
    left_over: list[Bundle] = []
    foreign = {
        bundle.name: f"part of {other.part or other.family.id} in the same file ({other.family.title})"
        for other in others
        if other is not match
        for bundle in other.bundles.values()
    }
    for bundle in match.everything.weights.values():
        native = bundle.name[len(match.prefix) :] if bundle.name.startswith(match.prefix) else None
        if native is not None and native in used:
            continue
        fate = _fate(match, bundle, native, foreign.get(bundle.name), unexpected)
        if fate is None:
            left_over.append(bundle)
        else:
            fates += [FileTensor(name=tensor.name, fate=fate[0], reason=fate[1]) for tensor in bundle.tensors]
    return tuple(fates), left_over


def _fate(
    match: Match, bundle: Bundle, native: str | None, foreign: str | None, unexpected: Sequence[str]
) -> tuple[Fate, str] | None:
    name = bundle.name if native is None else native
    if foreign is not None:
        return "other component", foreign
    if (contained := match.family.key_map.contained(name)) is not None:
        return "other component", f"part of {contained[1]}"
    if (native is None or match.layout != "diffusers") and (
        reason := (match.family if native is None else match).key_map.drop_reason(name)
    ) is not None:
        return "dropped", reason
    if (
        bundle.is_plain
        and not _belongs_to_codes(match, bundle)
        and any(fnmatchcase(name, glob) for glob in unexpected for name in (bundle.name, native or bundle.name))
    ):
        return "dropped", "left over; the setting unexpected lets it pass"
    return None


_SIDE_WORDS = ("scale", "offset", "zero", "absmax")


def _belongs_to_codes(match: Match, bundle: Bundle) -> bool:
    """Whether a plain tensor looks like a scale, in whatever spelling, beside a weight in codes: never superfluous."""
    layer, _, leaf = bundle.name.rpartition(".")
    weights = match.everything.weights
    beside = weights.get(f"{layer.removesuffix('.weight')}.weight")
    in_codes = beside is not None and not beside.is_plain
    return in_codes and any(word in leaf.lower() for word in _SIDE_WORDS)


def _unaccounted(
    match: Match, missing: list[str], left_over: list[Bundle], problems: list[str], shapes: Mapping[str, Shape]
) -> AccountingError:
    counts = [
        f"{len(lines)} {what}"
        for lines, what in ((missing, "missing"), (left_over, "left over"), (problems, "of another shape"))
        if lines
    ]
    lines = [f"left over: {bundle.name} {bundle.weight.dtype} {list(bundle.shape)}" for bundle in left_over]
    return AccountingError(
        f"the tensors do not add up to a model of the family {match.family.id}: " + ", ".join(counts),
        expected=f"exactly the tensors of {match.model}, and what the family's drop: names",
        hint=_hint(match, left_over, bool(missing or problems), shapes),
        path=match.header.path,
        items=problems + missing + lines,
    )


def _hint(match: Match, left_over: Sequence[Bundle], incomplete: bool, shapes: Mapping[str, Shape]) -> str:
    outside = [name for name in match.everything.weights if not name.startswith(match.prefix)]
    if outside:
        return (
            f"{len(outside)} tensors lie outside the prefix {match.prefix!r}: "
            "a file with mixed prefixes is of two models, or damaged"
        )
    if incomplete:
        return "the file is incomplete, or of a model that the family does not describe; nothing was loaded"
    if not all(bundle.is_plain for bundle in left_over):
        return "quantised weights can't be let pass: the file is of a model that the family does not describe"
    name = left_over[0].name
    near = get_close_matches(name.removeprefix(match.prefix), shapes.keys(), n=1, cutoff=0.9)
    return (
        "if they are known to be superfluous, let them pass with the setting unexpected, for example "
        f"unexpected=[{name}]" + (f" (the model has {near[0]}: is it misspelt?)" if near else "")
    )
