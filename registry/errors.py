"""The closed set of errors that slipcast raises.

Every error says what was found, what was expected and what to do, and carries these as fields, so that an
application can show them in its own words and ``--json`` can print them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict, Unpack

_SHOWN_ITEMS = 12


class Extras(TypedDict, total=False):
    """The arguments that some classes take beside their base's. A class takes those that it gives a default."""

    candidates: tuple[str, ...]
    roles: tuple[str, ...]
    line: int | None
    field: str
    where: tuple[str | int, ...]


class SlipcastError(Exception):
    """Base of all errors of this library.

    Args:
        found: what was there, as a clause ("the file ends after 12 bytes").
        expected: what should have been there.
        hint: what to do about it, as a sentence.
        path: the file or folder that is meant, if one is.
        items: names of the tensors, keys or settings concerned; the message shows the first twelve.
        extras: what the class says beyond that; its own docstring names them.
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str,
        hint: str,
        path: str | Path | None = None,
        items: Iterable[str] = (),
        **extras: Unpack[Extras],
    ) -> None:
        self.found = found
        self.expected = expected
        self.hint = hint
        self.items = tuple(items)
        unknown = extras.keys() - self._extras().keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} takes no {', '.join(sorted(unknown))}")
        vars(self).update(extras)
        self.path = None if path is None else self._place(str(path))
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        lines = [f"{where}{self.found}", f"  expected: {self.expected}"]
        lines += [f"    {item}" for item in self.items[:_SHOWN_ITEMS]]
        if len(self.items) > _SHOWN_ITEMS:
            lines.append(f"    ... and {len(self.items) - _SHOWN_ITEMS} more")
        lines.append(f"  to do:    {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())

    def to_dict(self) -> dict[str, Any]:
        """The error as the JSON object that every command prints with ``--json``."""
        return {
            "error": type(self).__name__,
            "found": self.found,
            "expected": self.expected,
            "hint": self.hint,
            "path": self.path,
            "items": list(self.items),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in self._extras().items()},
        }

    def _extras(self) -> dict[str, Any]:
        """What the class says beyond its base, by name."""
        return {name: getattr(self, name) for name in Extras.__annotations__ if hasattr(self, name)}

    def _place(self, path: str) -> str:
        """The path as the message shows it."""
        return path


def _rebuild(kind: type[SlipcastError], fields: dict[str, Any]) -> SlipcastError:
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    error.args = (str(error),)
    return error


class HeaderError(SlipcastError):
    """A file is damaged, or is not the container that its name says."""


class UnsupportedFileError(SlipcastError):
    """A file of a kind that is refused by name: a pickle, an archive, a folder without a model."""


class QuantisationError(SlipcastError):
    """Scales, markers or other side tensors that fit no weight, or contradict each other."""


class UnsupportedFormatError(SlipcastError):
    """A quantisation format that is recognised but can't be loaded."""


class IdentificationError(SlipcastError):
    """No family claims the checkpoint, or more than one does.

    Args:
        candidates: ids of the families that claim it; empty where none does.
    """

    candidates: tuple[str, ...] = ()


class CompanionError(SlipcastError):
    """A part of a pipeline that is missing, or is not what the pipeline needs; the message says what would be.

    Args:
        roles: the pipeline's own names of the parts that are meant.
    """

    roles: tuple[str, ...] = ()


class DocumentError(SlipcastError):
    """A YAML or JSON document that slipcast reads is wrong; ``line`` and ``field`` say where.

    Args:
        line: line of the file, from 1, or None where the whole file is meant.
        field: dotted path of the field ("precision.fp8.storage"), or "".
    """

    line: int | None = None
    field: str = ""

    def _place(self, path: str) -> str:
        return f"{path}:{self.line}" if self.line else path


class FamilyFileError(DocumentError):
    """A family file is wrong."""


class SettingsError(DocumentError):
    """A setting that is unknown, misplaced or has an impossible value."""


class KeyMapError(SlipcastError):
    """A key map that is ambiguous, or does not fit the names that it is applied to.

    Args:
        where: path of the entry in the family file, for example ``("keys", "x_embedder")``.
    """

    where: tuple[str | int, ...] = ()


class ExpressionError(KeyMapError):
    """An expression of ``config:`` or ``let:`` that can't be read or evaluated."""


class ConfigError(SlipcastError):
    """A folder's config.json contradicts its tensors, or a model class refuses its configuration."""


class AccountingError(SlipcastError):
    """Tensors of the file without a place in the model, parameters without a source, or shapes that differ."""


class PlanMismatchError(SlipcastError):
    """A saved plan that was made for another file, another family file or another version."""


class DeviceError(SlipcastError):
    """A device that is not there, or can't do what was asked of it."""


class CheckError(SlipcastError):
    """A family file that a proof of ``slipcast check`` refutes."""


class SessionError(SlipcastError):
    """A call that a session can't answer as it is: nothing is loaded, or the call comes from within its own work."""


class Cancelled(SlipcastError):  # noqa: N818 - a caller's own wish, not a fault
    """The caller cancelled a load, a conversion or a generation, or put another load in its place; nothing is left."""
