"""What it costs a gateway to decide where a request goes: the plan, the prompt's chain of blocks, and the choice."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.channel.replica_info import Load
from deployments.config.routing_table import Route, RoutingTable, Share, Target
from deployments.routing.plan import RouteRequest, plan
from deployments.routing.policies.base import Policy, ReplicaView, RouteHint
from deployments.routing.prefixes import PrefixIndex, chain

_PROMPTS = 50  # different ones, so that some are cached somewhere
_THINK_S = 0.5  # mean time of a client between a decision and its next request
_POOLS = ("a", "b", "c")
_ROUTE = Route("model", tuple(Share(name) for name in _POOLS), ("d",))
_TABLE = RoutingTable({name: Target(name, max_tokens=8192) for name in (*_POOLS, "d")}, {"model": _ROUTE})


@dataclass(frozen=True, slots=True)
class Decisions:
    """Seconds, sorted. `choice_s`: of the choice alone, as the policy sees it, with the making of its views.
    `decision_s`: of everything. `added_s`: of everything and of the wait for others' decisions on one event loop, when
    so many clients are served at once."""

    choice_s: Sequence[float]
    decision_s: Sequence[float]
    added_s: Sequence[float]


def measure(
    policy: Policy, num_replicas: int, prompt_tokens: int, clients: int, times: int, rng: random.Random
) -> Decisions:
    """The costs are measured; when clients come is drawn, and the loop's queue follows from both."""
    names = [f"replica-{i:04x}" for i in range(num_replicas)]
    index = PrefixIndex(1 << 16)
    prompts = [tuple(rng.randrange(50_000) for _ in range(prompt_tokens)) for _ in range(_PROMPTS)]
    loads = [Load(rng.randrange(4), rng.randrange(8), rng.randrange(5000)) for _ in names]
    choice_s, decision_s = [], []
    for number in range(times):
        prompt = prompts[number % _PROMPTS]
        began = time.perf_counter()
        plan(RouteRequest("model", f"r{number}", f"s{number}", num_tokens=prompt_tokens), _TABLE)
        keys = [*chain({"model": "m"}, "salt", prompt)] if policy.wants_prefixes else []
        hint = RouteHint(prompt_tokens, f"s{number}", index.cached_tokens(keys))
        looked = time.perf_counter()
        views = [ReplicaView(name, load, 3, 1000, number) for name, load in zip(names, loads, strict=True)]
        chosen = policy.choose(views, hint, rng)
        choice_s.append(time.perf_counter() - looked)
        index.add(names[chosen], keys)
        decision_s.append(time.perf_counter() - began)
    added_s = _added(decision_s, clients, rng)
    return Decisions(sorted(choice_s), sorted(decision_s), sorted(added_s))


def _added(costs_s: Sequence[float], clients: int, rng: random.Random) -> list[float]:
    """What each request waits and takes when decisions are made one after another."""
    due_s = [rng.expovariate(1 / _THINK_S) for _ in range(clients)]
    free_s, added = 0.0, []
    for cost_s in costs_s:
        client = min(range(clients), key=due_s.__getitem__)
        free_s = max(free_s, due_s[client]) + cost_s
        added.append(free_s - due_s[client])
        due_s[client] = free_s + rng.expovariate(1 / _THINK_S)
    return added
