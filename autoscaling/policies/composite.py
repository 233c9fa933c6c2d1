"""The most that any of several policies asks for, as `slo` above the floors of `schedule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from autoscaling.base import POLICIES, Proposal, ScalingPolicy, Signals
from autoscaling.settings import PolicyError, Settings


@dataclass(frozen=True, slots=True)
class CompositeParams(Settings):
    """`policies`: mappings with policy and params, one level deep."""

    policies: Sequence[Any] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if isinstance(self.policies, str) or not isinstance(self.policies, Sequence) or not self.policies:
            raise PolicyError(f"policies: must be a list of at least one mapping, got {self.policies!r}")
        for i, member in enumerate(self.policies):
            _member(member, f"policies[{i}]")


class Composite:
    """A member that fails or holds has no say while another has one; if none has, the first failure is raised."""

    Params: ClassVar[type[Settings]] = CompositeParams
    raw: ClassVar[bool] = False

    def __init__(self, members: Mapping[str, ScalingPolicy]) -> None:
        self._members = members

    @classmethod
    def build(cls, params: CompositeParams) -> Self:
        """A policy without a past."""
        members: dict[str, ScalingPolicy] = {}
        for i, given in enumerate(params.policies):
            name, settings = _member(given, f"policies[{i}]")
            members[f"{name}[{i}]" if name in members else name] = POLICIES.get(name).build(settings)
        return cls(members)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """The proposal of the member that asks for the most; the others' numbers are among the terms."""
        said: dict[str, Proposal] = {}
        failed: Exception | None = None
        for name, member in self._members.items():
            try:
                said[name] = member.decide(signals, now_s)
            except Exception as error:  # one member's mistake must not silence the others
                failed = failed or error
        if failed and not said:
            raise failed
        having = {name: p for name, p in said.items() if not p.hold} or said
        name, best = max(having.items(), key=lambda item: item[1].replicas)
        terms = {n: float(p.replicas) for n, p in having.items()}
        return Proposal(best.replicas, f"{name}: {best.why}", {**best.terms, **terms}, best.hold)


def _member(given: Any, where: str) -> tuple[str, Settings]:
    if not isinstance(given, Mapping) or not set(given) <= {"policy", "params"} or "policy" not in given:
        raise PolicyError(f"{where}: must be a mapping with policy and params, got {given!r}")
    name = given["policy"]
    allowed = [n for n in POLICIES.names() if n != "composite"]
    if name not in allowed:
        raise PolicyError(f"{where}.policy: must be one of {', '.join(allowed)}, got {name!r}")
    return name, POLICIES.get(name).Params.from_dict(given.get("params"), f"{where}.params")
