"""Integers as JSON has them: to JSON Schema, and to clients whose languages have one kind of number, 5.0 is one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

_EXACT = 2**53  # beyond, a double is not the integer that was meant


def as_integer(value: Any) -> Any:
    """The integer that a decimal without a fraction is; everything else as it came."""
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(as_integer)]
"""Inside an array. Bounds on it would not be seen in the JSON Schema."""


class Body(BaseModel):
    """What a client sends: of exact types, but for how it writes its integers."""

    model_config = ConfigDict(strict=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_integer(cls, value: Any) -> Any:
        return as_integer(value)
