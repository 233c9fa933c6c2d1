"""The simulator's replicas in Python, one step at a time: the oracle for autoscaling/simulator/replicas.cpp, which does
the same, in the same order."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from autoscaling.base import WINDOW_S, ReplicaSample
from autoscaling.service_model import ServiceModel
from autoscaling.simulator.cluster import ROUTERS, Counts
from autoscaling.traces.trace import Trace

STARTING, SERVING, DRAINING, GONE = range(4)
BUCKETS_PER_S = 5
NUM_BUCKETS = int(WINDOW_S) * BUCKETS_PER_S
NUM_ITL = 128  # steps with decodes that the ITL percentile is of
RATE_DECAY = 0.98  # per step, of the prefill rate
TOKENS_PER_REQUEST = 128  # what a request weighs beside its prompt tokens, as in deployments.routing.policies.work
MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Seq:
    """`prompt`: tokens to compute before the next token can be sampled; `left`: tokens still to be generated."""

    index: int
    prompt: int
    left: int
    computed: int = 0
    grant: int = 0
    start_step: int = 0  # decoding since
    finish_step: int = 0


@dataclass(slots=True)
class Replica:
    start_s: float
    ready_s: float
    host: int
    state: int = STARTING
    gone_s: float = math.inf
    waiting: deque[Seq] = field(default_factory=deque)
    prefilling: deque[Seq] = field(default_factory=deque)
    decoding: list[tuple[int, int, Seq]] = field(default_factory=list)  # heap by (finish_step, index)
    pending: int = 0  # prompt tokens not computed, of waiting and prefilling
    unanswered: int = 0  # prompt tokens, computed or not, of requests without a first token
    context: int = 0  # tokens that the decoding attend over
    reserved: int = 0  # tokens of K/V of the prefilling, whole prompts
    step: int = 0
    step_end_s: float = math.inf  # of the step in progress
    step_s: float = 0.0
    step_tokens: int = 0  # prompt tokens in it
    step_starved: bool = False  # it began with prompt tokens pending
    rate_tokens: float = 0.0
    rate_s: float = 0.0
    shortest_s: float = math.inf  # of the steps without a prompt
    buckets: list[tuple[int, int, int, float]] = field(default_factory=lambda: [(-1, 0, 0, 0.0)] * NUM_BUCKETS)
    ttfts: deque[tuple[float, float]] = field(default_factory=deque)
    itls: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_ITL))

    @property
    def ongoing(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def work(self) -> int:
        """What the gateway's policies compare: a gateway hears of first tokens, not of how far a prompt is."""
        return self.unanswered + TOKENS_PER_REQUEST * self.ongoing

    def count(self, at_s: float, arrivals: int, steps: int, step_s: float) -> None:
        bucket = int(at_s * BUCKETS_PER_S)
        held, a, n, took_s = self.buckets[bucket % NUM_BUCKETS]
        if held != bucket:
            a, n, took_s = 0, 0, 0.0
        self.buckets[bucket % NUM_BUCKETS] = (bucket, a + arrivals, n + steps, took_s + step_s)


class ReferenceCluster:
    """See autoscaling.simulator.cluster.Cluster."""

    def __init__(self, model: ServiceModel, trace: Trace, router: str, seed: int) -> None:
        self._model = model
        self._at = trace.at_s.tolist()
        self._prompt = trace.prompt_tokens.tolist()
        self._output = trace.output_tokens.tolist()
        self._router = ROUTERS.index(router)
        self._shares = model.contention > 0 and model.replicas_per_host > 1
        self._random = seed & MASK64
        self._turn = 0
        self._next = 0
        self._replicas: list[Replica] = []
        self._gateway: deque[Seq] = deque()
        self._open = 0
        self._rejected = 0
        self.ttft_s = np.full(len(trace), np.nan)
        self.finish_s = np.full(len(trace), np.nan)

    def start(self, now_s: float, ready_s: float) -> None:
        used = Counter(r.host for r in self._replicas if r.state != GONE)
        host = next(host for host in count() if used[host] < self._model.replicas_per_host)
        self._replicas.append(Replica(now_s, ready_s, host))

    def stop(self, now_s: float) -> bool:
        for state in (STARTING, SERVING):
            for r in reversed(self._replicas):
                if r.state == state:
                    r.state = DRAINING
                    if not r.ongoing:
                        self._leave(r, now_s)
                    return True
        return False

    def advance(self, until_s: float) -> None:
        while True:
            ready = [r for r in self._replicas if r.state == STARTING]
            starting = min(ready, key=lambda r: r.ready_s, default=None)
            ready_s = starting.ready_s if starting else math.inf
            arrival_s = self._at[self._next] if self._next < len(self._at) else math.inf
            if min(ready_s, arrival_s) > until_s:
                break
            if starting is not None and ready_s <= arrival_s:
                self._serve(starting)
            else:
                self._arrive(arrival_s)
        self._run_to(until_s)

    def counts(self) -> Counts:
        states = [r.state for r in self._replicas]
        return Counts(
            states.count(SERVING), states.count(STARTING), states.count(DRAINING),
            len(self._gateway), self._open, self._rejected, self._next,
        )  # fmt: skip

    def lifetimes(self) -> list[tuple[float, float]]:
        return [(r.start_s, r.gone_s) for r in self._replicas]

    def samples(self, now_s: float) -> list[ReplicaSample]:
        return [self._sample(r, now_s) for r in self._replicas if r.state == SERVING]

    def _sample(self, r: Replica, now_s: float) -> ReplicaSample:
        newest = int(now_s * BUCKETS_PER_S)
        arrivals = steps = 0
        took_s = 0.0
        for bucket, a, n, s in r.buckets:
            if bucket > newest - NUM_BUCKETS:
                arrivals += a
                steps += n
                took_s += s
        span_s = WINDOW_S + now_s - (newest + 1) / BUCKETS_PER_S
        work_s = 0.0
        if steps:
            work_s = max(0.0, took_s - steps * r.shortest_s) if r.shortest_s < math.inf else math.nan
        while r.ttfts and r.ttfts[0][0] < now_s - WINDOW_S:
            r.ttfts.popleft()
        ttfts = sorted(value for _, value in r.ttfts)
        itls = sorted(r.itls)
        rate = r.rate_tokens / r.rate_s if r.rate_tokens > 0 else math.nan
        kv = r.context + r.reserved
        return ReplicaSample(
            now_s,
            len(r.waiting),
            len(r.prefilling) + len(r.decoding),
            r.pending,
            r.pending / rate if r.pending else 0.0,
            work_s / span_s,
            (len(r.prefilling) + len(r.decoding)) / self._model.max_num_seqs,
            kv / self._model.kv_tokens,
            arrivals / span_s,
            _percentile(ttfts, 0.50),
            _percentile(ttfts, 0.95),
            _percentile(itls, 0.95) if r.decoding else math.nan,
            r.ready_s - r.start_s,
        )

    def _serve(self, r: Replica) -> None:
        self._run_to(r.ready_s)
        r.state = SERVING
        for seq in self._gateway:
            self._give(self._choose(), seq, r.ready_s)
        self._gateway.clear()

    def _arrive(self, at_s: float) -> None:
        self._run_to(at_s)
        i = self._next
        self._next += 1
        self._open += 1
        seq = Seq(i, self._prompt[i], self._output[i])
        chosen = self._choose()
        if chosen is not None:
            self._give(chosen, seq, at_s)
        elif len(self._gateway) < self._model.max_num_waiting:
            self._gateway.append(seq)
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._open -= 1
        self._rejected += 1

    def _choose(self) -> Replica | None:
        serving = [r for r in self._replicas if r.state == SERVING]
        if not serving:
            return None
        if self._router == 2:
            self._turn += 1
            return serving[(self._turn - 1) % len(serving)]
        if self._router == 1 and len(serving) > 1:
            a = self._draw(len(serving))
            b = self._draw(len(serving) - 1)
            b += b >= a
            return serving[b] if serving[b].work < serving[a].work else serving[a]
        works = [r.work for r in serving]
        least = min(works)
        equal = [r for r, work in zip(serving, works, strict=True) if work == least]
        return equal[self._draw(len(equal))] if len(equal) > 1 else equal[0]

    def _draw(self, n: int) -> int:
        """splitmix64."""
        self._random = (self._random + 0x9E3779B97F4A7C15) & MASK64
        z = self._random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return (z ^ (z >> 31)) % n

    def _give(self, r: Replica | None, seq: Seq, now_s: float) -> None:
        assert r is not None
        r.count(now_s, 1, 0, 0.0)
        if len(r.waiting) >= self._model.max_num_waiting:
            self._refuse()
            return
        r.waiting.append(seq)
        r.pending += seq.prompt
        r.unanswered += seq.prompt
        if r.step_end_s == math.inf:
            self._begin(r, now_s)

    def _run_to(self, until_s: float) -> None:
        if self._shares:  # in the order of time, since a step depends on who else is in one
            while (r := min(self._replicas, key=lambda r: r.step_end_s, default=None)) and r.step_end_s <= until_s:
                self._step(r)
            return
        for r in self._replicas:
            while r.step_end_s <= until_s:
                self._step(r)

    def _step(self, r: Replica) -> None:
        """The end of one and the begin of the next."""
        now_s = r.step_end_s
        self._end(r)
        self._begin(r, now_s)
        if r.state == DRAINING and not r.ongoing:
            self._leave(r, now_s)

    def _leave(self, r: Replica, now_s: float) -> None:
        r.state = GONE
        r.gone_s = now_s

    def _begin(self, r: Replica, now_s: float) -> None:
        """Decodes first; prompts share what is left, shorter before longer: as the engine's scheduler does."""
        m = self._model
        while r.context + r.reserved + len(r.decoding) > m.kv_tokens and len(r.decoding) > 1:
            self._preempt(r)
        r.step_starved = r.pending > 0
        budget = m.max_num_batched_tokens - len(r.decoding)
        lacking = sum(seq.prompt - seq.computed for seq in r.prefilling)
        while (
            r.waiting
            and len(r.prefilling) + len(r.decoding) < m.max_num_seqs
            and r.context + r.reserved + len(r.decoding) + r.waiting[0].prompt <= m.kv_tokens
            and (lacking < budget or _has_room(r.prefilling, r.waiting[0].prompt, budget))
        ):
            seq = r.waiting.popleft()
            lacking += seq.prompt
            r.reserved += seq.prompt
            r.prefilling.append(seq)
        tokens = _divide(r.prefilling, budget)
        pairs = 0.0
        for seq in r.prefilling:
            pairs += seq.grant * (seq.computed + 0.5 * seq.grant)
        if not tokens and not r.decoding:
            r.step_end_s = math.inf
            return
        r.step_s = m.step_s(tokens, pairs, len(r.decoding), r.context) * (1.0 + m.contention * self._neighbours(r))
        r.step_tokens = tokens
        r.step_end_s = now_s + r.step_s

    def _neighbours(self, r: Replica) -> int:
        """Those that take from this one what it shares with them."""
        if not self._shares:
            return 0
        busy = [o for o in self._replicas if o.state == STARTING or o.step_end_s < math.inf]
        return sum(o.host == r.host and o is not r for o in busy)

    def _end(self, r: Replica) -> None:
        now_s = r.step_end_s
        r.step += 1
        r.count(now_s, 0, 1, r.step_s)
        if not r.step_tokens and r.step_s < r.shortest_s:
            r.shortest_s = r.step_s
        if r.decoding:
            r.itls.append(r.step_s)
        if r.step_starved:
            r.rate_tokens = r.rate_tokens * RATE_DECAY + r.step_tokens
            r.rate_s = r.rate_s * RATE_DECAY + r.step_s
        r.pending -= r.step_tokens
        r.context += len(r.decoding)
        while r.decoding and r.decoding[0][0] == r.step:
            _, index, seq = heapq.heappop(r.decoding)
            r.context -= seq.prompt + (r.step - seq.start_step)
            self._finish(index, now_s)
        for seq in r.prefilling:
            seq.computed += seq.grant
        done = [seq for seq in r.prefilling if seq.computed == seq.prompt]
        r.prefilling = deque(seq for seq in r.prefilling if seq.computed < seq.prompt)
        for seq in done:
            self._first_token(r, seq, now_s)

    def _first_token(self, r: Replica, seq: Seq, now_s: float) -> None:
        r.reserved -= seq.prompt
        if math.isnan(self.ttft_s[seq.index]):
            ttft_s = now_s - self._at[seq.index]
            self.ttft_s[seq.index] = ttft_s + self._model.overhead_s
            r.ttfts.append((now_s, ttft_s))
            r.unanswered -= seq.prompt
        seq.left -= 1
        if not seq.left:
            self._finish(seq.index, now_s)
            return
        seq.start_step, seq.finish_step = r.step, r.step + seq.left
        r.context += seq.prompt
        heapq.heappush(r.decoding, (seq.finish_step, seq.index, seq))

    def _finish(self, index: int, now_s: float) -> None:
        self.finish_s[index] = now_s
        self._open -= 1

    def _preempt(self, r: Replica) -> None:
        """The youngest decoding one goes back to the head of the queue and computes all its tokens anew."""
        victim = max(r.decoding, key=lambda entry: entry[1])
        r.decoding.remove(victim)
        heapq.heapify(r.decoding)
        old = victim[2]
        done = r.step - old.start_step
        r.context -= old.prompt + done
        r.waiting.appendleft(Seq(old.index, old.prompt + done, old.left - done))
        r.pending += old.prompt + done


def _percentile(ordered: list[float], q: float) -> float:
    """Nearest rank; NaN of nothing."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


def _has_room(prefilling: deque[Seq], pending: int, room: int) -> bool:
    """Whether one more prompt would get some of the room."""
    if not prefilling:
        return room > 0
    oldest = prefilling[0].prompt - prefilling[0].computed
    claimed = sum(n for seq in prefilling if (n := seq.prompt - seq.computed) <= pending)
    if oldest > pending:
        claimed += min(oldest, max(1, room // 4))
    return claimed < room


def _divide(prefilling: deque[Seq], room: int) -> int:
    """Shortest first, but a quarter to the oldest. Returns the tokens granted."""
    whole = max(0, room)
    room = whole
    for i, seq in enumerate(prefilling):
        seq.grant = 0 if i else min(seq.prompt - seq.computed, max(1, room // 4), room)
        room -= seq.grant
    for seq in sorted(prefilling, key=lambda seq: seq.prompt - seq.computed):
        more = min(seq.prompt - seq.computed - seq.grant, room)
        seq.grant += more
        room -= more
    return whole - room
