"""A family's key map: how the names in a file and the names in a model are one another, read both ways."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slipcast.registry.errors import KeyMapError
from slipcast.registry.header import Shape
from slipcast.registry.keymap.expansion import expand
from slipcast.registry.keymap.inverse import inverted
from slipcast.registry.keymap.link import Link
from slipcast.registry.keymap.matching import RuleTree
from slipcast.registry.keymap.operations import joined_shape, native_shape, shared_shapes
from slipcast.registry.keymap.place import ArithmeticHole, LastHole, Place, Where, parse_place
from slipcast.registry.keymap.rules import Rule, parse_rules


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors of the file that nobody loads.

    Attributes:
        place: where they are; what lies below it is meant too.
        reason: why, for the report.
        where: path of the entry in the document.
    """

    place: Place
    reason: str
    where: Where = field(default=(), compare=False)


@dataclass(frozen=True)
class KeyMap:
    """The names of one family: rules between file and model, tensors to drop, and other families inside the file.

    All names on the file's side are native: the file's prefix is off.

    Attributes:
        rules: flat rules; their order has no meaning.
        drops: what the file may hold and nobody loads.
        contents: prefix, ending in a dot, and the family that describes what lies under it; longer prefixes first.
    """

    rules: tuple[Rule, ...] = ()
    drops: tuple[Drop, ...] = ()
    contents: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, keys: Mapping[str, object], drop: Mapping[str, object], contains: Mapping[str, object]) -> KeyMap:
        """Read the sections ``keys:``, ``drop:`` and ``contains:`` of a family file.

        Raises:
            KeyMapError: for anything that the grammar doesn't allow; ``where`` is the path of the entry.
        """
        return cls(
            parse_rules(keys),
            tuple(_parse_drop(key, reason) for key, reason in drop.items()),
            tuple(sorted((_parse_content(key, family) for key, family in contains.items()), key=_longest_first)),
        )

    @cached_property
    def _tree(self) -> RuleTree:
        return RuleTree(self.rules)

    @cached_property
    def _from_file(self) -> tuple[tuple[Rule, ...], RuleTree]:
        rules = inverted(self.rules)
        return rules, RuleTree(rules)

    def links(self, model_names: Iterable[str], file_names: Collection[str] | None = None) -> tuple[Link, ...]:
        """Expand the rules into exact links, one for each tensor of the model or for each sum of them.

        A name that no rule takes is its own name in the file. A sum whose terms are all missing (the biases of layers
        without one) makes no link; one of which only some are there is an error.

        Args:
            model_names: the names of all tensors of the model. All of them, since ``{last}`` looks at the set.
            file_names: the native names of the file, to choose between spellings. Without them, when saving, and
                where the file has none of them, the first spelling is taken.

        Returns:
            Links in the order of the names; each name stands in exactly one of them, and so does each file's name.

        Raises:
            KeyMapError: if several rules take a name and none refines the others, if a sum is incomplete, if two
                tensors of the model have one name in the file without a sum, or if the file has one tensor under two
                spellings.
        """
        known = None if file_names is None else frozenset(file_names)
        expansion = expand(self.rules, self._tree, model_names, known)
        expansion.raise_problems()
        return expansion.links

    def native_view(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Read a header in the model's names back into native names and shapes, as saving would write them.

        It is made for headers of which it is not yet known what they are. So nothing is an error here: names that
        rules disagree on, incomplete sums, names that collide, and shapes that an operation can't have are left out.
        Where several tensors of the file are one of the model's, they are taken to share its rows equally, since a
        header in the model's names doesn't say more.

        Args:
            shapes: logical shapes by name, in the model's names.

        Returns:
            Logical shapes by native name, with the first of several spellings.
        """
        if not self._tree.touches(shapes):
            return dict(shapes)
        view: dict[str, Shape] = {}
        for link in expand(self.rules, self._tree, shapes, None).links:
            natives = _native_shapes(link, shapes)
            if natives is not None:
                view.update(zip(link.files, natives, strict=True))
        return view

    def model_view(self, shapes: Mapping[str, Shape]) -> dict[str, Shape] | None:
        """Read a header in the file's names into the model's; None where no rule takes any of its names.

        Args:
            shapes: logical shapes by name, in the file's names.

        Raises:
            KeyMapError: a rule that can't be read from this side.
        """
        rules, tree = self._from_file
        if not tree.touches(shapes):
            return None
        view: dict[str, Shape] = {}
        for link in expand(rules, tree, shapes, None).links:
            (term,), (model,) = link.terms, link.files
            shape = native_shape(term.operation, shapes[term.model])
            if shape is not None:
                view[model] = shape
        return view

    def drop_reason(self, native_name: str) -> str | None:
        """Why nobody loads this tensor of the file, or None where no ``drop:`` names it."""
        segments = tuple(native_name.split("."))
        return next((drop.reason for drop in self.drops if drop.place.takes(segments)), None)

    def contained(self, native_name: str) -> tuple[str, str] | None:
        """The prefix and the family of the model inside the file that this tensor belongs to, or None."""
        return next((content for content in self.contents if native_name.startswith(content[0])), None)


def _native_shapes(link: Link, shapes: Mapping[str, Shape]) -> tuple[Shape, ...] | None:
    parts = [native_shape(term.operation, shapes[term.model]) for term in link.terms]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    whole = known[0] if len(known) == 1 else joined_shape(known)
    if whole is None:
        return None
    return (whole,) if len(link.files) == 1 else shared_shapes(whole, len(link.files))


def _parse_drop(key: str, reason: object) -> Drop:
    where = ("drop", key)
    place = parse_place(key, where)
    if any(isinstance(segment, ArithmeticHole | LastHole) for segment in place.segments):
        raise KeyMapError(
            f"arithmetic or {{last}} in the dropped place {key!r}",
            expected="literals, {i}, {s=a|b} and {a|b}",
            hint="name the places one by one, or with an index hole",
            where=where,
        )
    if not isinstance(reason, str) or not reason.strip():
        raise KeyMapError(
            f"the dropped place {key!r} has no reason",
            expected="'place: why nobody loads it'",
            hint="say why; the report shows it",
            where=where,
        )
    return Drop(place, reason.strip(), where)


def _parse_content(prefix: str, family: object) -> tuple[str, str]:
    if len(prefix) < 2 or not prefix.endswith(".") or not isinstance(family, str) or not family:
        raise KeyMapError(
            f"the contained prefix {prefix!r} with the family {family!r}",
            expected="'prefix.: id-of-a-family', the prefix ending in a dot",
            hint="write the prefix with its last dot",
            where=("contains", prefix),
        )
    return prefix, family


def _longest_first(content: tuple[str, str]) -> tuple[int, str]:
    return -len(content[0]), content[0]
