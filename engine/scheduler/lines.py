"""Sequences of one class waiting: one line for all, or fair shares among tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Protocol

from engine.types import Sequence


class Line(Protocol):
    """No operation costs O(waiting)."""

    def push(self, seq: Sequence) -> None: ...
    def push_front(self, seq: Sequence) -> None:
        """Before all others, whoever they are."""

    def head(self) -> Sequence | None: ...
    def remove(self, seq: Sequence) -> None: ...
    def first(self, count: int) -> Iterator[Sequence]:
        """Up to `count` of those that leave first, in about that order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


class Fifo:
    """In the order of arrival. (A plain dict would not do: its first key is slow to find after many removals.)"""

    def __init__(self) -> None:
        self._seqs: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, seq: Sequence) -> None:
        self._seqs[seq.seq_id] = seq

    def push_front(self, seq: Sequence) -> None:
        self._seqs[seq.seq_id] = seq
        self._seqs.move_to_end(seq.seq_id, last=False)

    def head(self) -> Sequence | None:
        return next(iter(self._seqs.values()), None)

    def remove(self, seq: Sequence) -> None:
        del self._seqs[seq.seq_id]

    def first(self, count: int) -> Iterator[Sequence]:
        return islice(iter(self), count)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())


class Shares:
    """Tokens that each tenant has had: its virtual counter. One who comes back from having nothing waiting starts
    level with the least served of the others, for idle time earns no credit."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._level = 0
        self._prune_at = 1024

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._level)

    def enter(self, tenant: str) -> None:
        """The tenant has something waiting, having had nothing."""
        if len(self._served) >= self._prune_at:  # counters below the level say nothing
            self._served = {name: n for name, n in self._served.items() if n > self._level}
            self._prune_at = max(1024, 2 * len(self._served))
        self._served[tenant] = max(self.served(tenant), self._level)

    def leads(self, tenant: str) -> None:
        """The tenant is the least served of those that wait."""
        self._level = max(self._level, self.served(tenant))

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] = self.served(tenant) + num_tokens


class Fair:
    """First the preempted, then the tenant that has had the fewest tokens, each tenant's own in order of arrival.

    `shares` may be common to many lines. Counters only grow, so an entry of the heap that is behind its tenant's
    counter is put right when it comes up.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._front = Fifo()
        self._tenants: dict[str, Fifo] = {}
        self._heap: list[tuple[int, str]] = []
        self._in_heap: set[str] = set()  # those in _tenants, and some that left: one entry each
        self._count = 0

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        line = self._tenants.get(tenant)
        if line is None:
            self._shares.enter(tenant)
            line = self._tenants[tenant] = Fifo()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heappush(self._heap, (self._shares.served(tenant), tenant))
        line.push(seq)
        self._count += 1

    def push_front(self, seq: Sequence) -> None:
        self._front.push_front(seq)
        self._count += 1

    def head(self) -> Sequence | None:
        if (seq := self._front.head()) is not None:
            return seq
        heap = self._heap
        while heap:
            at, tenant = heap[0]
            line, served = self._tenants.get(tenant), self._shares.served(tenant)
            if line is None:
                heappop(heap)
                self._in_heap.remove(tenant)
            elif at < served:
                heapreplace(heap, (served, tenant))
            else:
                self._shares.leads(tenant)
                return line.head()
        return None

    def remove(self, seq: Sequence) -> None:
        self._count -= 1
        if seq in self._front:
            self._front.remove(seq)
            return
        line = self._tenants[seq.request.tenant]
        line.remove(seq)
        if not len(line):
            del self._tenants[seq.request.tenant]

    def first(self, count: int) -> Iterator[Sequence]:
        yield from self._front.first(count)
        lines = (self._tenants.get(tenant) for _, tenant in islice(self._heap, count))
        yield from (seq for line in lines if line is not None and (seq := line.head()) is not None)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        for tenant in sorted(self._tenants, key=self._shares.served):
            yield from self._tenants[tenant]
