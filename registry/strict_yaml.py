"""Reads YAML strictly, and remembers the line of every entry.

Strict means: a key stands once, keys are strings whatever they look like, and only null, true, false, whole and
decimal numbers are anything but strings (``off``, ``2024-01-01``, ``010`` and ``0x1f`` are strings). Tags, merge keys
(``<<``) and several documents are refused; aliases are expanded up to a bound. The parser is libyaml's where PyYAML
has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipcast.registry.errors import DocumentError, FamilyFileError
from slipcast.registry.frozen import FrozenMapping

MAX_BYTES = 1 << 20
MAX_ENTRIES = 50_000
MAX_DEPTH = 64
MAX_DIGITS = 40

Where = tuple[str | int, ...]

_PLAIN, _QUOTED = "plain", "quoted"
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text holds.

    Attributes:
        data: mappings as dict, sequences as list, and scalars; None for an empty text.
        path: where the text came from, or None.
        lines: path of an entry, as ``("precision", "fp8", "storage")``, to its line, from 1. An entry that came
            through an alias has the line on which it was written.
    """

    data: Any
    path: str | None
    lines: Mapping[Where, int]

    def line_of(self, where: Where) -> int | None:
        """Line of the entry at ``where``, or of the nearest entry around it; None in an empty document."""
        for length in range(len(where), -1, -1):
            line = self.lines.get(tuple(where[:length]))
            if line is not None:
                return line
        return None


class _Loader(_BaseLoader):  # type: ignore[misc]
    """A loader that tells plain scalars from quoted ones and resolves nothing."""

    def resolve(self, kind: Any, value: str | None, implicit: Any) -> str:  # noqa: ARG002 - the signature is PyYAML's
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _QUOTED

    def descend_resolver(self, parent: Any, index: Any) -> None:
        """Nothing is resolved by its place."""

    def ascend_resolver(self) -> None:
        """Nothing is resolved by its place."""


class _Builder:
    """Turns a node tree into data and lines, counting what aliases expand to."""

    def __init__(self, path: str | None, error: type[DocumentError]) -> None:
        self.path = path
        self.error = error
        self.lines: dict[Where, int] = {}
        self.open: list[Any] = []

    def problem(self, node: Any, where: Where, found: str, expected: str, hint: str) -> DocumentError:
        return self.error(found, expected=expected, hint=hint, path=self.path, line=_line(node), field=dotted(where))

    def build(self, node: Any, where: Where, line: int) -> Any:
        self.lines[where] = line
        if len(self.lines) > MAX_ENTRIES:
            raise self.problem(
                node,
                where,
                f"the document has more than {MAX_ENTRIES} entries once its aliases are expanded",
                f"at most {MAX_ENTRIES}",
                "use fewer aliases (*name); nested ones multiply",
            )
        if node.tag not in (_PLAIN, _QUOTED):
            raise self.problem(
                node, where, f"the tag {node.tag!r}", "no tags", "remove the tag; quote a value that is meant as text"
            )
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, where) if node.tag == _PLAIN else node.value
        if len(where) >= MAX_DEPTH or any(node is one for one in self.open):
            raise self.problem(
                node,
                where,
                "an alias that contains itself" if len(where) < MAX_DEPTH else f"entries nested {MAX_DEPTH} deep",
                f"fewer than {MAX_DEPTH} levels",
                "write the entries out, or remove the alias",
            )
        self.open.append(node)
        built = self.mapping(node, where) if isinstance(node, yaml.MappingNode) else self.sequence(node, where)
        self.open.pop()
        return built

    def sequence(self, node: Any, where: Where) -> list[Any]:
        return [self.build(item, (*where, index), _line(item)) for index, item in enumerate(node.value)]

    def mapping(self, node: Any, where: Where) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.problem(
                    key_node, where, "a mapping or a list as a key", "a word or a number", "quote the key if it is text"
                )
            key: str = key_node.value
            inner = (*where, key)
            if key in built:
                raise self.problem(
                    key_node,
                    inner,
                    f"the key {key!r} stands twice, in lines {self.lines[inner]} and {_line(key_node)}",
                    "every key once",
                    "remove one of the two, or join their entries",
                )
            if key == "<<" and key_node.tag == _PLAIN:
                raise self.problem(
                    key_node,
                    inner,
                    "the merge key '<<'",
                    "no merge keys",
                    "write the entries out, or alias a whole value",
                )
            if key_node.tag not in (_PLAIN, _QUOTED):
                raise self.problem(key_node, inner, f"the tag {key_node.tag!r}", "no tags", "remove the tag")
            built[key] = self.build(value_node, inner, _line(key_node))
        return built

    def scalar(self, node: Any, where: Where) -> Any:
        text: str = node.value
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            number: int | float = int(text) if len(text) <= MAX_DIGITS else math.inf
        elif _FLOAT.fullmatch(text):
            number = float(text)
        else:
            return text
        if not math.isfinite(number):
            raise self.problem(
                node,
                where,
                f"the number {text[:MAX_DIGITS]} is too large",
                f"a finite number of at most {MAX_DIGITS} digits",
                "write a smaller one, or quote it if it is text",
            )
        return number


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def dotted(where: Where) -> str:
    """A path of an entry as users write it: ``("precision", "fp8")`` is ``precision.fp8``."""
    return ".".join(str(part) for part in where)


def parse_yaml(text: str, path: str | Path | None = None, error: type[DocumentError] = FamilyFileError) -> Document:
    """Read one YAML document from a text.

    Args:
        text: the document.
        path: where it came from, for messages.
        error: the class of errors to raise.

    Raises:
        DocumentError: of class ``error``; the text is not YAML, or not strict YAML as this module means it.
    """
    shown = None if path is None else str(path)
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        found = " ".join(part for part in (problem.context, problem.problem) if part)
        raise error(
            f"not YAML: {found}",
            expected="one YAML document",
            hint="check the indentation there, and quote values that begin with { [ * & ! % @ ` or hold ': ' or ' #'",
            path=shown,
            line=None if mark is None else mark.line + 1,
        ) from None
    except (yaml.YAMLError, UnicodeEncodeError, RecursionError) as problem:
        raise error(
            f"not YAML: {str(problem).splitlines()[0]}",
            expected="one YAML document of printable characters",
            hint="save it as plain text in UTF-8",
            path=shown,
        ) from None
    finally:
        if loader is not None:
            loader.dispose()
    builder = _Builder(shown, error)
    data = None if node is None else builder.build(node, (), _line(node))
    return Document(data, shown, FrozenMapping(builder.lines))


def load_yaml(path: str | Path, error: type[DocumentError] = FamilyFileError) -> Document:
    """Read one YAML document from a file in UTF-8 of at most 1 MiB.

    Raises:
        DocumentError: of class ``error``; the file can't be read, is too large, is not UTF-8, or is not strict YAML.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise error(
            f"the file can't be read: {problem.strerror or problem}",
            expected="a readable YAML file",
            hint="check the path and its permissions",
            path=path,
        ) from None
    if len(content) > MAX_BYTES:
        raise error(
            f"the file is larger than {MAX_BYTES} bytes",
            expected="a YAML file of at most 1 MiB",
            hint="check that it is the file that you mean",
            path=path,
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"byte 0x{content[problem.start]:02x} at position {problem.start} is not UTF-8",
            expected="text in UTF-8",
            hint="save the file as UTF-8",
            path=path,
            line=content.count(b"\n", 0, problem.start) + 1,
        ) from None
    return parse_yaml(text, path, error)
