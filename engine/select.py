"""What an implementation needs of the machine, and the function that chooses by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from engine.errors import ConfigError
from engine.registry import Registry


@dataclass(frozen=True, slots=True)
class Needs:
    """Empty sets mean "any". `native`: the compiled CPU kernels must be available. `invariant`, which is what it
    offers: a row's result has the same bits in every batch."""

    devices: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = frozenset()
    head_dims: frozenset[int] = frozenset()
    native: bool = False
    invariant: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model is to run and in what form. dtypes by name: float32, bfloat16, float16. `deterministic`: only what
    is invariant will do."""

    device: str
    dtype: str
    kv_dtype: str
    head_dim: int
    native: bool
    deterministic: bool = False


class HasNeeds(Protocol):
    """Any implementation that choose() can choose."""

    needs: ClassVar[Needs]


N = TypeVar("N", bound=HasNeeds)


def refusals(needs: Needs, machine: Machine) -> list[str]:
    """Why `needs` cannot be met on `machine`; empty when it can."""
    checks: Iterable[tuple[str, object, frozenset[object]]] = (
        ("device", machine.device, frozenset(needs.devices)),
        ("dtype", machine.dtype, frozenset(needs.dtypes)),
        ("kv_cache_dtype", machine.kv_dtype, frozenset(needs.kv_dtypes)),
        ("head_dim", machine.head_dim, frozenset(needs.head_dims)),
    )
    bad = [f"{what} is {got}, needs {sorted(map(str, want))}" for what, got, want in checks if want and got not in want]
    if needs.native and not machine.native:
        bad.append("needs the compiled CPU kernels")
    if machine.deterministic and not needs.invariant:
        bad.append("its results depend on the batch, and deterministic is on")
    return bad


def choose(registry: Registry[N], machine: Machine, wanted: str = "auto") -> type[N]:
    """The wanted entry, or with "auto" the first in table order that fits. Raises ConfigError with reasons."""
    names = registry.names() if wanted == "auto" else (wanted,)
    reasons = []
    for name in names:
        cls = registry.get(name)
        bad = refusals(cls.needs, machine)
        if not bad:
            return cls
        reasons.append(f"{name}: {'; '.join(bad)}")
    raise ConfigError(f"no usable {registry.kind} ({' | '.join(reasons)})")
