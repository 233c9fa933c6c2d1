"""Pools that share GPUs: who gets how many when not all wishes fit."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

from autoscaling.settings import PolicyError, Settings, setting

_SILENT_S = 1.0  # Serve asks ten times a second about every pool except one that is being woken


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


@dataclass(frozen=True, slots=True)
class BudgetTerms(Settings):
    """One pool's place in a budget of `gpus`, all of which pools that scale may have. For the others see PoolWish."""

    gpus: float = setting(0.0, 0)
    gpus_per_replica: float = setting(1.0, above=0)
    priority: int = 0


class SharedBudget:
    """What pools that scale in one process wish for, and what each may have. A member is any object that stands for a
    pool; it leaves when it is garbage collected. Time, in seconds, is an argument. Not for several threads."""

    def __init__(self) -> None:
        self._standing: WeakKeyDictionary[Hashable, tuple[PoolWish, float]] = WeakKeyDictionary()

    def update(self, member: Hashable, wish: PoolWish, now_s: float) -> None:
        """To be called for every member all the time. A member that falls silent is taken for one that is being woken:
        Serve does not ask about a pool without replicas that requests wait for. A member for the same pool as an
        earlier one takes its place."""
        for other, (theirs, _) in list(self._standing.items()):
            if other is not member and theirs.name == wish.name:
                del self._standing[other]
        self._standing[member] = wish, now_s

    def grant(self, name: str, gpus: float, now_s: float) -> int:
        """How many of the replicas that pool `name` last wished for it may have. Pools that want any get one each, the
        most important first, before any pool gets a second; else a pool that was just woken would be stopped."""
        return share(gpus, [_least_one(*standing, now_s) for standing in self._standing.values()])[name]


def _least_one(wish: PoolWish, heard_s: float, now_s: float) -> PoolWish:
    woken = now_s - heard_s > _SILENT_S
    return replace(wish, wanted=max(wish.wanted, int(woken)), min_replicas=max(wish.min_replicas, 1))


_BUDGETS: WeakValueDictionary[str, SharedBudget] = WeakValueDictionary()


def shared_budget(name: str) -> SharedBudget:
    """The one of that name in this process: Serve makes each pool's policy by itself, in the same controller, and
    leaves them no other way to find each other. It is there for as long as somebody keeps it."""
    budget = _BUDGETS.get(name)
    if budget is None:
        budget = _BUDGETS[name] = SharedBudget()
    return budget
