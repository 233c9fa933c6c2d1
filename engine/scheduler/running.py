"""Which sequences run: they begin, end and are preempted here, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.config import EngineConfig
from engine.kv.base import KVCache, PrefixHit
from engine.scheduler.cost import StepCost
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.queue import WaitingQueue
from engine.types import Phase, Sequence


class RunningSet:
    """The running sequences, at most `limit`, in the order in which they were admitted.

    `copy_s`: seconds to copy one block to host memory or back.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCache, queue: WaitingQueue, cost: StepCost, copy_s: float = 0.0
    ) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.limit = min(config.max_num_seqs, config.max_num_batched_tokens)  # none must go without its token
        self.num_preemptions = 0
        self.num_swaps = 0
        self._mode = config.preemption_mode
        self._caching = config.enable_prefix_caching
        self._kv = kv
        self._queue = queue
        self._cost = cost
        self._copy_s = copy_s
        self._classes: Counter[int] = Counter()  # of the running

    @property
    def num_free(self) -> int:
        """How many more may run."""
        return self.limit - len(self.sequences)

    def add(self, seq: Sequence, step: PlanBuilder, now_s: float) -> None:
        """A waiting sequence that has its blocks runs from this step on."""
        self._queue.remove(seq.seq_id)
        self._queue.charge(seq, seq.num_pending)
        self.sequences[seq.seq_id] = seq
        self._classes[self._queue.class_of(seq)] += 1
        seq.phase = Phase.RUNNING
        if not seq.admitted_before:
            seq.admitted_before = True
            seq.first_scheduled_s = now_s
        step.admitted.append(seq)
        step.add_prompt(seq)

    def remove(self, seq_id: int) -> Sequence | None:
        """A sequence runs no more; None if it was not running."""
        seq = self.sequences.pop(seq_id, None)
        if seq is not None:
            cls = self._queue.class_of(seq)
            self._classes[cls] -= 1
            if not self._classes[cls]:
                del self._classes[cls]
        return seq

    def preempt(self, seq: Sequence, step: PlanBuilder) -> None:
        """A running sequence waits again, and gives up its blocks or keeps them in host memory."""
        step.take_back(seq)  # while its numbers still say what was granted
        step.admit_below = min(step.admit_below, self._queue.class_of(seq))
        if self._swaps(seq) and self._kv.swap_out(seq):
            self.num_swaps += 1
        else:
            self._kv.release(seq)
        self.remove(seq.seq_id)
        seq.phase = Phase.PREEMPTED
        seq.drafts = ()
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._queue.push_front(seq)

    def least_deserving(self) -> Sequence:
        """Who gives way when blocks are short: lowest priority, then cheapest to restore, then the latest."""
        return max(self.sequences.values(), key=lambda s: (s.request.priority, -s.num_computed, s.arrival_s, s.seq_id))

    def has_lesser(self, seq: Sequence) -> bool:
        """Whether anyone of a less important class runs. O(classes)."""
        return bool(self._classes) and max(self._classes) > self._queue.class_of(seq)

    def victims(self, seq: Sequence, hit: PrefixHit, num_free: int, step: PlanBuilder) -> Seq[Sequence]:
        """Those whose preemption would admit `seq`, with `num_free` blocks besides their own; none if no preemption
        could. Lowest class first, then cheapest to restore."""
        class_of, outranks = self._queue.class_of, self._queue.outranks
        lesser = [s for s in self.sequences.values() if outranks(seq, s) and s not in step.admitted]
        lesser.sort(key=lambda s: (class_of(s), -s.num_computed, s.arrival_s, s.seq_id), reverse=True)
        demand = self._kv.demand(seq, hit)
        for count, victim in enumerate(lesser, 1):
            num_free += self._kv.freeable(victim)
            remaining = len(self.sequences) - count
            if remaining < self.limit and num_free >= demand + spare_blocks(seq, remaining):
                return lesser[:count]
        return ()

    def _swaps(self, seq: Sequence) -> bool:
        """Whether to try. What is cached and need not go soon is best left where it is."""
        if self._mode != "auto":
            return self._mode == "swap"
        if self._caching and seq.request.sampling.prompt_logprobs is None and self._kv.num_free > self._kv.held(seq):
            return False
        token_s = self._cost.token_s(seq.num_computed // 2)  # on average
        return token_s is None or 2 * self._copy_s * self._kv.held(seq) < token_s * seq.num_computed


def spare_blocks(seq: Sequence, num_running: int) -> int:
    """Blocks to leave free beside a newcomer: room for everyone to grow by one, else it would be thrown out again
    soon. Who was thrown out before waits for more: that bounds repeated work. Alone, one always fits."""
    return (num_running + 1) << min(seq.num_preemptions, 8) if num_running else 0
