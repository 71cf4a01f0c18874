"""Texts of a certain form. An error describes the form in words; editors get the pattern, through the JSON Schema."""

from __future__ import annotations

from typing import Any

from pydantic import StringConstraints, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError


def of_form(pattern: str, words: str) -> tuple[StringConstraints, WrapValidator]:
    """What makes a ``str`` of a model one of a certain form, as annotations.

    Args:
        pattern: a regular expression, from ``^`` to ``$``.
        words: what it allows, as an error says it.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("form", "{form}", {"form": words}) from None

    return StringConstraints(pattern=pattern), WrapValidator(check)
