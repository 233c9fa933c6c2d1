"""Pools that share a cluster's GPUs: who gets how many when not all wishes fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaling.settings import PolicyError, Settings, setting


@dataclass(frozen=True, slots=True)
class PoolWish(Settings):
    """`wanted` replicas of `gpus_per_replica` each, of which `min_replicas` are never denied to one of lower rank.
    `priority`: smaller is more important."""

    name: str
    wanted: int = setting(0, 0)
    min_replicas: int = setting(0, 0)
    gpus_per_replica: float = setting(1.0, above=0)
    priority: int = 0


def share(total_gpus: float, wishes: Sequence[PoolWish]) -> Mapping[str, int]:
    """Replicas per pool, never more than wanted and never more GPUs than there are.

    First everyone's minimum, the most important first; then, rank by rank, one replica at a time to the pool of that
    rank that has the smallest share of its wish. A pool whose replica no longer fits does not hold up smaller ones.
    """
    if total_gpus < 0:
        raise PolicyError(f"total_gpus: must be at least 0, got {total_gpus:g}")
    names = [w.name for w in wishes]
    if len(set(names)) < len(names):
        raise PolicyError(f"pools: names must differ, got {', '.join(names)}")
    given = dict.fromkeys(names, 0)
    left = total_gpus
    ranked = sorted(wishes, key=lambda w: w.priority)
    for wish in ranked:
        least = min(wish.wanted, wish.min_replicas)
        while given[wish.name] < least and wish.gpus_per_replica <= left + 1e-9:
            given[wish.name] += 1
            left -= wish.gpus_per_replica
    for priority in sorted({w.priority for w in wishes}):
        peers = [w for w in ranked if w.priority == priority]
        while open_ := [w for w in peers if given[w.name] < w.wanted and w.gpus_per_replica <= left + 1e-9]:
            wish = min(open_, key=lambda w: given[w.name] / w.wanted)
            given[wish.name] += 1
            left -= wish.gpus_per_replica
    return given
