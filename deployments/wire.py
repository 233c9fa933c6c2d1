"""How deltas travel from replica to gateway: as tuples, which pickle at a fraction of what dataclasses cost."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from engine.types import TokenDelta

SERIALIZATION = "pickle"  # Serve's default would bring cloudpickle's start-up cost to each message

_fields = attrgetter(*TokenDelta.__match_args__)


def pack(deltas: Iterable[TokenDelta]) -> list[Any]:
    return [_fields(delta) for delta in deltas]


def unpack(packed: Iterable[Any]) -> list[TokenDelta]:
    return [TokenDelta(*fields) for fields in packed]
