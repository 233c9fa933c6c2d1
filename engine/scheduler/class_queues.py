"""The waiting sequences of one class: in order of arrival, or shared fairly among tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Protocol

from engine.types import Sequence


class ClassQueue(Protocol):
    """An order of waiting sequences. No operation costs O(waiting)."""

    def push(self, seq: Sequence) -> None:
        """Add one that has arrived."""

    def push_front(self, seq: Sequence) -> None:
        """Add one before all others, whoever they are."""

    def head(self) -> Sequence | None:
        """The one that leaves first; None if nothing waits."""

    def remove(self, seq: Sequence) -> None:
        """Take out one that waits here."""

    def first(self, count: int) -> Iterator[Sequence]:
        """Up to `count` of those that leave first, in about that order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...


class FifoQueue:
    """In the order of arrival.

    A plain dict would not do: its first key is slow to find after many removals.
    """

    def __init__(self) -> None:
        self._seqs: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, seq: Sequence) -> None:
        """See ClassQueue.push()."""
        self._seqs[seq.seq_id] = seq

    def push_front(self, seq: Sequence) -> None:
        """See ClassQueue.push_front()."""
        self._seqs[seq.seq_id] = seq
        self._seqs.move_to_end(seq.seq_id, last=False)

    def head(self) -> Sequence | None:
        """See ClassQueue.head()."""
        return next(iter(self._seqs.values()), None)

    def remove(self, seq: Sequence) -> None:
        """See ClassQueue.remove()."""
        del self._seqs[seq.seq_id]

    def first(self, count: int) -> Iterator[Sequence]:
        """See ClassQueue.first()."""
        return islice(iter(self), count)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())


class TenantShares:
    """Tokens that each tenant has had.

    A tenant that comes back from having nothing waiting starts level with the least served of the others: idle time
    earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._level = 0
        self._prune_at = 1024

    def served(self, tenant: str) -> int:
        """Tokens that the tenant counts as having had."""
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
        """The tenant has had so many tokens more."""
        self._served[tenant] = self.served(tenant) + num_tokens


class FairQueue:
    """First the preempted, then the tenant that has had the fewest tokens, each tenant's own in order of arrival.

    `shares` may be common to many queues. Counters only grow, so an entry of the heap that is behind its tenant's
    counter is put right when it comes up.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._front = FifoQueue()
        self._tenants: dict[str, FifoQueue] = {}
        self._heap: list[tuple[int, str]] = []
        self._in_heap: set[str] = set()  # those in _tenants, and some that left: one entry each
        self._count = 0

    def push(self, seq: Sequence) -> None:
        """See ClassQueue.push()."""
        tenant = seq.request.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            self._shares.enter(tenant)
            queue = self._tenants[tenant] = FifoQueue()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heappush(self._heap, (self._shares.served(tenant), tenant))
        queue.push(seq)
        self._count += 1

    def push_front(self, seq: Sequence) -> None:
        """See ClassQueue.push_front()."""
        self._front.push_front(seq)
        self._count += 1

    def head(self) -> Sequence | None:
        """See ClassQueue.head()."""
        if (seq := self._front.head()) is not None:
            return seq
        heap = self._heap
        while heap:
            at, tenant = heap[0]
            queue, served = self._tenants.get(tenant), self._shares.served(tenant)
            if queue is None:
                heappop(heap)
                self._in_heap.remove(tenant)
            elif at < served:
                heapreplace(heap, (served, tenant))
            else:
                self._shares.leads(tenant)
                return queue.head()
        return None

    def remove(self, seq: Sequence) -> None:
        """See ClassQueue.remove()."""
        self._count -= 1
        if seq in self._front:
            self._front.remove(seq)
            return
        queue = self._tenants[seq.request.tenant]
        queue.remove(seq)
        if not len(queue):
            del self._tenants[seq.request.tenant]

    def first(self, count: int) -> Iterator[Sequence]:
        """See ClassQueue.first()."""
        yield from self._front.first(count)
        queues = (self._tenants.get(tenant) for _, tenant in islice(self._heap, count))
        yield from (seq for queue in queues if queue is not None and (seq := queue.head()) is not None)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        for tenant in sorted(self._tenants, key=self._shares.served):
            yield from self._tenants[tenant]
