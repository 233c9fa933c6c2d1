"""Typed, checked settings: frozen dataclasses whose mistakes name the field, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_type_hints


class PolicyError(ValueError):
    """Settings that cannot be used. The message names the field."""


def setting(default: Any, low: float | None = None, high: float | None = None, *, above: float | None = None) -> Any:
    """A field with a default and the values it may have: `low` and `high` included, `above` not."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of all settings. Numbers must be finite and within the bounds of their `setting`."""

    def __post_init__(self) -> None:
        # getattr() and setattr() by name: the zero-argument super() is not to be had in dataclasses with slots.
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = _typed(f.name, getattr(self, f.name), hints[f.name])
            _check_bounds(f.name, value, f.metadata)
            object.__setattr__(self, f.name, value)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None, where: str) -> Self:
        """Raises PolicyError; its message begins with `where`."""
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise PolicyError(f"{where}: must be a mapping, got {given!r}")
        known = [f.name for f in fields(cls)]
        if unknown := [str(key) for key in given if key not in known]:
            raise PolicyError(f"{where}: unknown setting {', '.join(unknown)}; known: {', '.join(known) or 'none'}")
        try:
            return cls(**given)
        except PolicyError as error:
            raise PolicyError(f"{where}.{error}") from None


def _typed(name: str, value: Any, wanted: Any) -> Any:
    if wanted is bool and not isinstance(value, bool):
        raise PolicyError(f"{name}: must be true or false, got {value!r}")
    if wanted in (int, float, float | None):
        if value is None and wanted == float | None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PolicyError(f"{name}: must be a number, got {value!r}")
        if not math.isfinite(value):
            raise PolicyError(f"{name}: must be finite, got {value}")
        if wanted is int and value != int(value):
            raise PolicyError(f"{name}: must be a whole number, got {value}")
        return int(value) if wanted is int else float(value)
    if wanted is str and not isinstance(value, str):
        raise PolicyError(f"{name}: must be text, got {value!r}")
    return value


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float | None]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high, above = bounds.get("low"), bounds.get("high"), bounds.get("above")
    if low is not None and value < low:
        raise PolicyError(f"{name}: must be at least {low:g}, got {value:g}")
    if high is not None and value > high:
        raise PolicyError(f"{name}: must be at most {high:g}, got {value:g}")
    if above is not None and value <= above:
        raise PolicyError(f"{name}: must be above {above:g}, got {value:g}")
