"""A pool of simulated replicas behind a real policy and a real prefix index, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from deployments.channel.replica_info import Load
from deployments.routing.policies.base import Policy, ReplicaView, RouteHint
from deployments.routing.prefixes import PrefixIndex
from engine.stats import nearest_rank
from load_tests.routing.workloads import Call, RoutingWorkload

_NEWS_S = 0.05  # how old a replica's word on its load may be


@dataclass(frozen=True, slots=True)
class Machine:
    """What a replica can do: prompt tokens per second, seconds for one decode step and for each sequence in it, how
    many sequences at once, and tokens of prefix cache. The defaults are about one mid-sized GPU with an 8B model."""

    prefill_per_s: float = 8000.0
    step_s: float = 0.012
    sequence_s: float = 0.0002
    seats: int = 64
    cache_tokens: int = 200_000


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    """`hit_rate`: cached prompt tokens over all. `requests` and `tokens`: what each replica served: requests, and
    tokens it computed. `in_flight`: the mean of each over the time in which anything ran. `ttft_s` is sorted."""

    hit_rate: float
    requests: Sequence[int]
    tokens: Sequence[int]
    in_flight: Sequence[float]
    ttft_s: Sequence[float]

    def ttft(self, q: float) -> float:
        return nearest_rank(self.ttft_s, q)


def imbalance(values: Sequence[float]) -> float:
    """max / mean; 1 is even."""
    return max(values) * len(values) / sum(values)


@dataclass(slots=True)
class _Request:
    call: Call
    queued_tokens: int = 0  # what the gateway believes must be computed


class _Replica:
    """Prefills one prompt after another; decodes all that it has prefilled, at most `seats` sequences in all. With it
    stands what the gateway knows of it: `heard`, its own word on its load, and what requests to it have shown."""

    def __init__(self, name: str, machine: Machine, block_tokens: int) -> None:
        self.name = name
        self.machine = machine
        self._block_tokens = block_tokens
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._max_blocks = max(1, machine.cache_tokens // block_tokens)
        self.waiting: deque[_Request] = deque()
        self.prefilling: _Request | None = None
        self.decoding = 0
        self.served = self.hits = self.computed = 0  # requests, and tokens
        self.open_s = 0.0  # the sum of what its requests took
        self.heard = Load()
        self.queued_tokens = self.last_chosen = 0
        self.ttft_s: float | None = None

    @property
    def open_requests(self) -> int:
        return len(self.waiting) + (self.prefilling is not None) + self.decoding

    def load(self) -> Load:
        pending = [*self.waiting, *([self.prefilling] if self.prefilling else [])]
        return Load(
            waiting=len(self.waiting),
            running=self.decoding + (self.prefilling is not None),
            pending_tokens=sum(request.call.prompt_tokens for request in pending),
        )

    def begin(self) -> tuple[float, _Request] | None:
        """The next prompt, if it can take one up, with the seconds that its prefill takes."""
        if self.prefilling is not None or not self.waiting or self.decoding >= self.machine.seats:
            return None
        request = self.prefilling = self.waiting.popleft()
        hit = self._block_tokens * sum(1 for _ in takewhile(self._cache.__contains__, request.call.keys))
        self.hits += hit
        self.computed += request.call.prompt_tokens - hit
        decode_share = self.decoding * self.machine.sequence_s / self.machine.step_s
        return (request.call.prompt_tokens - hit) / self.machine.prefill_per_s * (1 + decode_share), request

    def prefilled(self, request: _Request, ttft_s: float) -> float:
        """The seconds that the rest of the answer takes."""
        self.prefilling = None
        self.served += 1
        self.decoding += 1
        for key in reversed(request.call.keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self._max_blocks:
            self._cache.popitem(last=False)
        self.queued_tokens -= request.queued_tokens
        self.ttft_s = ttft_s if self.ttft_s is None else 0.8 * self.ttft_s + 0.2 * ttft_s
        return request.call.output_tokens * (self.machine.step_s + self.decoding * self.machine.sequence_s)


class _Gateway:
    """The choices, and the belief about prefixes."""

    def __init__(self, policy: Policy, replicas: Sequence[_Replica], block_tokens: int, rng: random.Random) -> None:
        self._policy = policy
        self._replicas = replicas
        self._rng = rng
        self._index = PrefixIndex(max(1, replicas[0].machine.cache_tokens // block_tokens), block_tokens)
        self._heard_s = -1.0
        self._choices = count(1)

    def choose(self, request: _Request, now_s: float) -> _Replica:
        call = request.call
        if now_s - self._heard_s >= _NEWS_S:
            self._heard_s = now_s
            for replica in self._replicas:
                replica.heard = replica.load()
        views = [
            ReplicaView(r.name, r.heard, r.open_requests, r.queued_tokens, r.last_chosen, r.ttft_s)
            for r in self._replicas
        ]
        cached = self._index.cached_tokens(call.keys)
        hint = RouteHint(call.prompt_tokens, None, cached)
        chosen = self._replicas[self._policy.choose(views, hint, self._rng)]
        self._index.add(chosen.name, call.keys)
        request.queued_tokens = call.prompt_tokens - cached.get(chosen.name, 0)
        chosen.queued_tokens += request.queued_tokens
        chosen.last_chosen = next(self._choices)
        return chosen


def simulate(
    workload: RoutingWorkload, policy: Policy, num_replicas: int, machine: Machine, rng: random.Random
) -> RoutingOutcome:
    """All of the workload's calls, each to where the policy sends it."""
    replicas = [_Replica(f"replica-{i}", machine, workload.block_tokens) for i in range(num_replicas)]
    gateway = _Gateway(policy, replicas, workload.block_tokens, rng)
    order = count()  # of events at the same time
    # When something happens to a request: without a replica it arrives, else its prefill or its answer ends.
    events: list[tuple[float, int, _Replica | None, _Request]] = [
        (call.at_s, next(order), None, _Request(call)) for call in workload.calls
    ]
    heapq.heapify(events)
    busy_s = last_s = 0.0
    ttft_s: list[float] = []
    while events:
        now_s, _, replica, request = heapq.heappop(events)
        span_s, last_s = now_s - last_s, now_s
        if any(r.open_requests for r in replicas):
            busy_s += span_s
            for r in replicas:
                r.open_s += r.open_requests * span_s
        if replica is None:
            replica = gateway.choose(request, now_s)
            replica.waiting.append(request)
        elif request is replica.prefilling:
            ttft_s.append(now_s - request.call.at_s)
            takes_s = replica.prefilled(request, ttft_s[-1])
            heapq.heappush(events, (now_s + takes_s, next(order), replica, request))
        else:
            replica.decoding -= 1
        if (begun := replica.begin()) is not None:
            heapq.heappush(events, (now_s + begun[0], next(order), replica, begun[1]))
    return RoutingOutcome(
        hit_rate=sum(r.hits for r in replicas) / sum(call.prompt_tokens for call in workload.calls),
        requests=[r.served for r in replicas],
        tokens=[r.computed for r in replicas],
        in_flight=[r.open_s / busy_s for r in replicas],
        ttft_s=sorted(ttft_s),
    )
