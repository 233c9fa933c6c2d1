"""A pool of simulated replicas behind a real policy and a real prefix index, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

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
    idle_while_queued_s: float

    def ttft(self, q: float) -> float:
        return nearest_rank(self.ttft_s, q)


def imbalance(values: Sequence[float]) -> float:
    """max / mean; 1 is even."""
    return max(values) * len(values) / sum(values)


@dataclass(slots=True)
class _Request:
    call: Call
    queued_tokens: int = 0  # what the pool believes must be computed


class _Replica:
    """Prefills one prompt after another; decodes all that it has prefilled, at most `seats` sequences in all."""

    def __init__(self, name: str, machine: Machine, block_tokens: int) -> None:
        self.name = name
        self.machine = machine
        self._block_tokens = block_tokens
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._max_blocks = max(1, machine.cache_tokens // block_tokens)
        self.waiting: deque[_Request] = deque()
        self.prefilling: _Request | None = None
        self.decoding = 0
        self.hits = 0
        self.computed = 0

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

    def begin(self) -> float | None:
        """Takes the next prompt up, if it can; the seconds its prefill takes."""
        if self.prefilling is not None or not self.waiting or self.decoding >= self.machine.seats:
            return None
        request = self.prefilling = self.waiting.popleft()
        depth = 0
        for key in request.call.keys:
            if key not in self._cache:
                break
            depth += 1
        hit = depth * self._block_tokens
        self.hits += hit
        self.computed += request.call.prompt_tokens - hit
        decode_share = self.decoding * self.machine.sequence_s / self.machine.step_s
        return (request.call.prompt_tokens - hit) / self.machine.prefill_per_s * (1 + decode_share)

    def prefilled(self) -> _Request:
        request = self.prefilling
        assert request is not None
        self.prefilling = None
        self.decoding += 1
        for key in reversed(request.call.keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self._max_blocks:
            self._cache.popitem(last=False)
        return request

    def decode_s(self, call: Call) -> float:
        return call.output_tokens * (self.machine.step_s + self.decoding * self.machine.sequence_s)


class _Pool:
    """The gateway's side: views, choices, belief about prefixes."""

    def __init__(self, policy: Policy, replicas: Sequence[_Replica], block_tokens: int, rng: random.Random) -> None:
        self._policy = policy
        self._replicas = replicas
        self._rng = rng
        self._index = PrefixIndex(max(1, replicas[0].machine.cache_tokens // block_tokens), block_tokens)
        self._loads = [Load()] * len(replicas)
        self._heard_s = -1.0
        self._queued: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._last: Counter[str] = Counter()
        self._ttft: dict[str, float] = {}
        self._choices = count(1)

    def choose(self, request: _Request, now_s: float) -> _Replica:
        call = request.call
        if now_s - self._heard_s >= _NEWS_S:
            self._heard_s = now_s
            self._loads = [replica.load() for replica in self._replicas]
        views = [
            ReplicaView(
                r.name, load, self._open[r.name], self._queued[r.name], self._last[r.name], self._ttft.get(r.name)
            )
            for r, load in zip(self._replicas, self._loads, strict=True)
        ]
        cached = self._index.cached_tokens(call.keys)
        hint = RouteHint(call.prompt_tokens, None, cached)
        chosen = self._replicas[self._policy.choose(views, hint, self._rng)]
        self._index.add(chosen.name, call.keys)
        self._open[chosen.name] += 1
        request.queued_tokens = call.prompt_tokens - cached.get(chosen.name, 0)
        self._queued[chosen.name] += request.queued_tokens
        self._last[chosen.name] = next(self._choices)
        return chosen

    def first_token(self, replica: _Replica, request: _Request, ttft_s: float) -> None:
        self._queued[replica.name] -= request.queued_tokens
        old = self._ttft.get(replica.name)
        self._ttft[replica.name] = ttft_s if old is None else 0.8 * old + 0.2 * ttft_s

    def ended(self, replica: _Replica) -> None:
        self._open[replica.name] -= 1


def simulate(
    workload: RoutingWorkload, policy: Policy, num_replicas: int, machine: Machine, rng: random.Random
) -> RoutingOutcome:
    """All of the workload's calls, each to where the policy sends it."""
    replicas = [_Replica(f"replica-{i}", machine, workload.block_tokens) for i in range(num_replicas)]
    pool = _Pool(policy, replicas, workload.block_tokens, rng)
    served = Counter[str]()
    area: dict[str, float] = {replica.name: 0.0 for replica in replicas}
    busy_s = idle_while_queued_s = 0.0
    ttft_s: list[float] = []
    last_s = 0.0
    for now_s, replica, request, kind in _events(workload, pool, replicas):
        span = now_s - last_s
        last_s = now_s
        if any(r.open_requests for r in replicas):
            busy_s += span
            for r in replicas:
                area[r.name] += r.open_requests * span
            if any(len(r.waiting) for r in replicas) and not all(r.open_requests for r in replicas):
                idle_while_queued_s += span
        if kind == "first":
            ttft_s.append(now_s - request.call.at_s)
            served[replica.name] += 1
    total = sum(call.prompt_tokens for call in workload.calls)
    return RoutingOutcome(
        hit_rate=sum(r.hits for r in replicas) / total,
        requests=[served[r.name] for r in replicas],
        tokens=[r.computed for r in replicas],
        in_flight=[area[r.name] / busy_s for r in replicas],
        ttft_s=sorted(ttft_s),
        idle_while_queued_s=idle_while_queued_s,
    )


def _events(
    workload: RoutingWorkload, pool: _Pool, replicas: Sequence[_Replica]
) -> Iterator[tuple[float, _Replica, _Request, str]]:
    """Every change in order of time, told before it takes effect."""
    order = count()
    queue: list[tuple[float, int, str, _Replica | None, _Request]] = [
        (call.at_s, next(order), "call", None, _Request(call)) for call in workload.calls
    ]
    heapq.heapify(queue)

    def push(at_s: float, kind: str, replica: _Replica, request: _Request) -> None:
        heapq.heappush(queue, (at_s, next(order), kind, replica, request))

    def go_on(replica: _Replica, now_s: float) -> None:
        if (takes_s := replica.begin()) is not None and replica.prefilling is not None:
            push(now_s + takes_s, "first", replica, replica.prefilling)

    while queue:
        now_s, _, kind, replica, request = heapq.heappop(queue)
        if replica is None:
            replica = pool.choose(request, now_s)
        yield now_s, replica, request, kind
        if kind == "call":
            replica.waiting.append(request)
        elif kind == "first":
            replica.prefilled()
            pool.first_token(replica, request, now_s - request.call.at_s)
            push(now_s + replica.decode_s(request.call), "end", replica, request)
        else:
            replica.decoding -= 1
            pool.ended(replica)
        go_on(replica, now_s)
