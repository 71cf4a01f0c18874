"""Holds a document against a pydantic model, and says in the user's terms what is wrong and on which line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from slipcast.registry.errors import DocumentError
from slipcast.registry.strict_yaml import Where, dotted

Model = TypeVar("Model", bound=BaseModel)


class Place(NamedTuple):
    """Where an entry stands: a file, or None for what came from no file, and a line from 1."""

    path: str | None
    line: int | None


class _Problem(NamedTuple):
    where: Where
    found: str
    expected: str
    hint: str


def nearest(word: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name that a misspelt word most probably means, or None if none is at least this alike, 0 to 1."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=likeness)
    return close[0] if close else None


def did_you_mean(word: str, names: Iterable[str], otherwise: str) -> str:
    """A hint that gives the nearest right name, or ``otherwise`` where none is near."""
    near = nearest(word, names)
    return f"did you mean {near!r}?" if near else otherwise


def mistake(found: str, expected: str, hint: str) -> PydanticCustomError:
    """What a model's own validator raises; ``validate`` puts it into the user's terms as it is."""
    return PydanticCustomError("mistake", "{found}", {"found": found, "expected": expected, "hint": hint})


def validate(
    model: type[Model], data: Any, locate: Callable[[Where], Place], error: type[DocumentError], around: Where = ()
) -> Model:
    """The model's instance that parsed YAML describes.

    Args:
        model: a pydantic model with ``extra="forbid"``.
        data: what the YAML holds.
        locate: gives the file and line of an entry, or of the nearest one around it.
        error: the class of errors to raise.
        around: path of the entry that ``data`` is, where it is not the whole document.

    Raises:
        DocumentError: of class ``error``, for the first problem in the file; its items are the others.
    """
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        problems = _problems(model, data, failure)
    placed = [(locate((*around, *problem.where)), problem) for problem in problems]
    placed.sort(key=lambda pair: pair[0].line or 0)
    place, first = placed[0]
    raise error(
        first.found,
        expected=first.expected,
        hint=first.hint,
        path=place.path,
        line=place.line,
        field=dotted((*around, *first.where)),
        items=[f"line {other.line}: {problem.found}" for other, problem in placed[1:]],
    )


def _problems(model: type[BaseModel], data: Any, failure: ValidationError) -> list[_Problem]:
    """One problem for each place; of a union's failures those that came furthest. What is missing comes last."""
    by_place: dict[Where, list[_Problem]] = {}
    for item in sorted(failure.errors(include_url=False), key=lambda item: item["type"] == "missing"):
        where = _in_document(item["loc"], data, keep_last=item["type"] == "missing")
        by_place.setdefault(where, []).append(_problem(model, where, item))
    deepest = [where for where in by_place if not any(_is_inside(other, where) for other in by_place)]
    return [_joined(by_place[where]) for where in deepest]


def _joined(problems: list[_Problem]) -> _Problem:
    first = problems[0]
    expected = " or ".join(dict.fromkeys(problem.expected for problem in problems))
    return first._replace(expected=expected)


def _is_inside(inner: Where, outer: Where) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _in_document(location: tuple[str | int, ...], data: Any, *, keep_last: bool) -> Where:
    """Pydantic's location without what is not in the document: names of union members, ``[key]``."""
    where: list[str | int] = []
    for index, part in enumerate(location):
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (keep_last and index == len(location) - 1):
            continue
        where.append(part)
    return tuple(where)


def _problem(model: type[BaseModel], where: Where, item: Any) -> _Problem:
    name = str(where[-1]) if where else ""
    value, message = item["input"], str(item["msg"]).removeprefix("Input should be ")
    if item["type"] == "mistake":
        return _Problem(where, item["ctx"]["found"], item["ctx"]["expected"], item["ctx"]["hint"])
    if item["type"] == "extra_forbidden":
        known = sorted(_fields(_annotation_at(model, where[:-1])))
        inside = f" in {dotted(where[:-1])}" if len(where) > 1 else ""
        found = f"unknown field {name!r}{inside}"
        return _Problem(where, found, f"one of {', '.join(known)}", did_you_mean(name, known, "remove it"))
    if item["type"] == "missing":
        return _Problem(where, f"the field {dotted(where)!r} is missing", _described(model, where, "a value"), "add it")
    found = (
        f"the key {name!r}"
        if item["loc"][-1:] == ("[key]",)
        else f"{dotted(where) or 'the document'} is {shown(value)}"
    )
    if item["type"] == "form":
        return _Problem(where, found, item["ctx"]["form"], "correct it")
    if item["type"] == "literal_error":
        words = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        expected = f"one of {', '.join(words)}" if words else message
        return _Problem(where, found, expected, did_you_mean(str(value), words, "write one of these"))
    message = message.replace("valid dictionary or instance of ", "mapping, as of ").replace("dictionary", "mapping")
    message = message.replace("valid tuple", "list")
    return _Problem(where, found, _described(model, where, message), "correct it")


def counted(count: int, noun: str) -> str:
    """A number and a noun whose plural ends in s: ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: Any) -> str:
    """A value as a message names it: scalars as YAML writes them, collections by their kind."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _described(model: type[BaseModel], where: Where, message: str) -> str:
    fields = _fields(_annotation_at(model, where[:-1])) if where else {}
    field = fields.get(str(where[-1])) if where else None
    return f"{message}: {field.description}" if field is not None and field.description else message


def _fields(annotation: Any) -> dict[str, FieldInfo]:
    """The fields of a model by the names that documents use; none for anything but a model."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {}
    return {field.alias or name: field for name, field in annotation.model_fields.items()}


def _annotation_at(annotation: Any, where: Where) -> Any:
    """The type that a model gives the entry at ``where``; None where it gives none."""
    annotation = _bare(annotation)
    for part in where:
        fields = _fields(annotation)
        if fields:
            inner = fields[str(part)].annotation if str(part) in fields else None
        elif get_origin(annotation) is tuple:
            inner = get_args(annotation)[0]
        else:
            inner = get_args(annotation)[1] if len(get_args(annotation)) == 2 else None
        annotation = _bare(inner)
    return annotation


def _bare(annotation: Any) -> Any:
    """A type without ``Annotated`` and without ``None`` as an alternative."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _bare(members[0]) if len(members) == 1 else None
    return annotation
