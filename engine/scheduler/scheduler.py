"""Decides what each step computes: decodes, chunks of prompts and drafts under one token budget."""

from __future__ import annotations

from typing import NamedTuple

from engine.config import EngineConfig
from engine.kv.base import GONE, KVCache
from engine.scheduler.admitter import Admitter
from engine.scheduler.chunk_planner import ChunkPlanner
from engine.scheduler.cost import StepCost
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.known import KnownSequences
from engine.scheduler.plan_builder import PlanBuilder, slices
from engine.scheduler.queue import QUEUES, WaitingQueue
from engine.scheduler.running import RunningSet
from engine.scheduler.stop import set_limits, stop_reason, useful_drafts
from engine.scheduler.waiting_limits import WaitingLimits
from engine.types import (
    FinishReason,
    Phase,
    SeqSlice,
    Sequence,
    SliceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)


class SeqUpdate(NamedTuple):
    """What one step gave one sequence: tokens appended (none past the end), prompt logprobs, or its end.

    `fault` says why a sequence ended with FinishReason.FAULT. `prompt_logprobs[i]` belongs to prompt token
    `prompt_logprob_start` + i. After a preemption rows come again: store by position, do not append.
    """

    seq: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprob_start: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    fault: str | None = None


class Scheduler:
    """Owns every live Sequence. Strictly schedule(), run the plan, update(); add() and finish() at any time.

    `max_model_len` is the most tokens (prompt + output) of one sequence. `copy_s`: seconds to copy a block between
    device and host. `now_s` arguments share one clock with Sequence.arrival_s; how long the steps take by it decides
    how much prompt goes into a step that decodes. Not thread-safe. A step costs O(running), whatever waits and
    whatever the pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCache,
        max_model_len: int,
        eos_ids: frozenset[int],
        copy_s: float = 0.0,
    ) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._budget = config.max_num_batched_tokens
        self._fair = config.fair_sharing
        self._cost = StepCost()
        self._queue: WaitingQueue = QUEUES.get(config.scheduling_policy)(config)
        self._running = RunningSet(config, kv, self._queue, self._cost, copy_s)
        self._chunks = ChunkPlanner(config, kv, self._queue, self._cost)
        self._admitter = Admitter(config, kv, self._queue, self._running, self._chunks)
        self._deadlines = Deadlines()
        self._limits = WaitingLimits(config, kv, self._queue, self._running, max_model_len)
        self._live: dict[int, Sequence] = {}
        self._known = KnownSequences(eos_ids)
        self._in_flight: StepPlan | None = None
        self._began_s = 0.0
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._running.sequences)

    @property
    def pending_tokens(self) -> int:
        """Tokens to prefill before all live sequences decode. Upper bound: neither prefix hits are foreseen, nor
        what comes back from host memory."""
        lacking = (len(seq.tokens) - seq.num_computed for seq in self._running.sequences.values())
        return self._queue.num_tokens + sum(n for n in lacking if n > 1)

    @property
    def num_preemptions(self) -> int:
        """Total since the start."""
        return self._running.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Those of num_preemptions that kept their K/V in host memory."""
        return self._running.num_swaps

    @property
    def has_work(self) -> bool:
        """Whether schedule() would give a plan."""
        return bool(self._live)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequestError (no prompt), ContextLengthError or CapacityError: it can
        never run; QueueFullError: not now; DeadlineError: not in time. Sequences that the running limit has room
        for do not count as waiting, and a request's further choices come in with its first."""
        assert seq.seq_id not in self._live, f"sequence {seq.seq_id} added twice"
        set_limits(seq, self._eos_ids, self._max_model_len)
        self._limits.check(seq)
        self._live[seq.seq_id] = seq
        self._queue.push(seq)
        self._deadlines.add(seq, self._cost.token_s(0))

    def finish(self, seq_id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence wherever it stands, also while its step runs; None if it is not live (any more).

        Its blocks are free at once: nothing is scheduled before the running step's update(), which ignores it.
        """
        seq = self._live.pop(seq_id, None)
        if seq is None:
            return None
        if self._running.remove(seq_id) is None:
            self._queue.remove(seq_id)
        self._deadlines.forget(seq_id)
        seq.phase = Phase.FINISHED
        seq.finish_reason = reason
        seq.drafts = ()
        self._kv.forget(seq)
        self._known.end(seq_id)
        return seq

    def missed(self, now_s: float) -> list[Sequence]:
        """Waiting sequences that cannot have their first token by their deadline. Each is named once; the caller
        ends it."""
        return self._deadlines.missed(now_s, self._cost.token_s(0), self._lacking)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing is live. The caller must update() it before the next call, or,
        if it failed, finish() all its sequences."""
        if lost := self._in_flight:
            assert not any(piece.seq_id in self._live for piece in lost.slices), "the last plan was not updated"
        step = PlanBuilder(self._budget, now_s)
        self._serve_decodes(step)
        if self._queue:
            self._admit(step, now_s)
        if step.prompts:
            self._serve_prompts(step)
        copies = self._kv.take_copies()
        if not (step.grants or copies.stores or copies.loads):
            return None
        plan = StepPlan(
            step_id=self._next_step_id,
            slices=slices(step.grants.items(), self._block_size),
            new=self._known.announce(step),
            finished=self._known.take_ended(),
            stores=copies.stores,
            loads=copies.loads,
            moves=copies.moves,
        )
        self._next_step_id += 1
        self._in_flight = plan
        self._began_s = now_s
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SeqUpdate]:
        """Take in the result of the plan in flight. Only sequences with news are listed; a sequence that
        ended here holds nothing any more."""
        assert plan is self._in_flight and plan.step_id == result.step_id, "not the plan in flight"
        self._in_flight = None
        self._observe(plan, now_s - self._began_s)
        updates = []
        running, size = self._running.sequences, self._block_size
        for piece, got in zip(plan.slices, result.slices, strict=True):
            seq = running.get(piece.seq_id)
            if seq is None:
                continue
            ids = got.token_ids
            if len(ids) == 1 == len(piece.token_ids) and seq.first_token_s is not None and not got.drafts:
                # Nearly every slice of nearly every step: one token more of a sequence that decodes.
                assert piece.sample, f"sequence {seq.seq_id}: sampled {ids}, not as planned"
                seq.tokens.append(ids[0])
                seq.num_computed += 1
                if not seq.num_computed % size:
                    self._kv.commit(seq)
                reason = None
                if (ids[0] in seq.stop_ids or len(seq.tokens) >= seq.max_len) and (reason := stop_reason(seq)):
                    self.finish(seq.seq_id, reason)
                if self._fair:
                    self._queue.charge(seq, 1)
                updates.append(SeqUpdate(seq, ids, got.logprobs, 0, (), reason))
            elif update := self._advance(seq, piece, got, now_s):
                updates.append(update)
        return updates

    def check(self) -> None:
        """Assert all invariants. For tests: O(everything)."""
        queued, running = {seq.seq_id: seq for seq in self._queue}, self._running.sequences
        assert len(queued) == len(self._queue), "queued twice"
        assert not queued.keys() & running.keys(), "queued and running"
        assert {**queued, **running} == self._live, "lost or undead sequences"
        assert all(seq.phase in (Phase.WAITING, Phase.PREEMPTED) for seq in queued.values())
        assert all(not seq.blocks and not seq.num_computed for seq in queued.values()), "a queued one holds K/V"
        assert self._queue.num_tokens == sum(len(seq.tokens) for seq in queued.values())
        assert self._running.num_free >= 0
        for seq in running.values():
            assert seq.phase is Phase.RUNNING and seq.num_pending > 0, f"sequence {seq.seq_id} is stuck"
            assert not seq.drafts or seq.num_pending == 1 + len(seq.drafts), "drafts before the end"
        held = {block for seq in running.values() for block in seq.blocks} - {GONE}
        assert len(held) == self._kv.num_used, "blocks not owned exactly by running sequences"
        self._known.check(self._live.keys())
        assert self._deadlines.num_sequences <= len(self._live), "a sequence that has ended is remembered"
        if plan := self._in_flight:
            ids = [piece.seq_id for piece in plan.slices]
            assert len(set(ids)) == len(ids) and plan.num_tokens <= self._budget
            assert all(seq_id in running or seq_id not in self._live for seq_id in ids), "scheduled, not running"
            loading = {block for _, block in plan.loads}
            assert not any(loading.intersection(piece.block_ids) for piece in plan.slices), "used while loading"
        self._kv.check()

    def _lacking(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._kv.lookup(seq).num_tokens

    def _serve_decodes(self, step: PlanBuilder) -> None:
        """Decodes come first: they are cheap and someone is reading along."""
        running, size, grants = self._running.sequences, self._block_size, step.grants
        unserved = len(running)
        prompts = []
        for seq in list(running.values()):
            computed = seq.num_computed
            if len(seq.tokens) - computed != 1:
                prompts.append(seq)
            elif seq.phase is Phase.RUNNING:  # not a victim of the ones before it
                step.decodes.append(seq)
                if computed % size and not seq.drafts:  # most decodes: there is room in the last block
                    grants[seq] = 1
                    step.budget -= 1
                else:
                    seq.drafts = seq.drafts[: step.budget - unserved]  # never at the price of another's only token
                    self._extend(seq, step)
                unserved -= 1
        for seq in prompts:
            if seq.phase is Phase.RUNNING:
                step.add_prompt(seq)

    def _serve_prompts(self, step: PlanBuilder) -> None:
        self._chunks.divide(step)
        while step.prompts and not (step.grants or any(self._kv.loading(seq) for seq in step.prompts)):
            # Under a window prompts take blocks as they go: all wait for what others of them hold.
            self._running.preempt(self._running.least_deserving(), step)
            self._chunks.divide(step)

    def _extend(self, seq: Sequence, step: PlanBuilder) -> None:
        """Grant a decoding sequence its tokens, preempting the least deserving until there is room."""
        while not self._kv.reserve(seq, seq.num_pending):
            if seq.drafts:  # a guess is not worth a preemption
                seq.drafts = ()
                continue
            victim = self._running.least_deserving()
            self._running.preempt(victim, step)
            if victim is seq:
                return
        step.grant(seq, seq.num_pending)

    def _admit(self, step: PlanBuilder, now_s: float) -> None:
        short_of_blocks = step.admit_below != float("inf")
        if not short_of_blocks:
            step.num_prompts = len(step.prompts) + min(len(self._queue), self._running.num_free)
            self._admitter.run(step, now_s)
        self._limits.observe(now_s, sum(len(seq.tokens) for seq in step.admitted), bool(self._queue))

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        decodes = 0
        chunks: list[tuple[int, int]] = []
        for piece in plan.slices:
            n = len(piece.token_ids)
            if n == 1 or piece.num_drafts:
                decodes += 1
            else:
                chunks.append((piece.start, n))
        if decodes or chunks:
            self._chunks.observe(decodes, chunks, seconds)

    def _advance(self, seq: Sequence, piece: SeqSlice, got: SliceResult, now_s: float) -> SeqUpdate | None:
        if got.fault is not None:
            self._kv.discard(seq)
            self.finish(seq.seq_id, FinishReason.FAULT)
            return SeqUpdate(seq, finish_reason=FinishReason.FAULT, fault=got.fault)
        assert bool(got.token_ids) == piece.sample, f"sequence {seq.seq_id}: sampled {got.token_ids}, not as planned"
        reason: FinishReason | None = None
        count = 0
        for token in got.token_ids:
            seq.tokens.append(token)
            count += 1
            if reason := stop_reason(seq):
                break
        end = piece.start + len(piece.token_ids)
        if count:
            # The newest token's K/V is not written yet, and that of refused drafts is not valid.
            end = min(end, len(seq.tokens) - 1)
            if seq.first_token_s is None:
                seq.first_token_s = now_s
            self._queue.charge(seq, count)
        elif end == len(seq.tokens):
            reason = FinishReason.LENGTH  # max_tokens is 0: only the prompt was to be computed
        seq.num_computed = end
        if end // self._block_size != piece.start // self._block_size:
            self._kv.commit(seq)
        if reason:
            self.finish(seq.seq_id, reason)
        else:
            seq.drafts = useful_drafts(seq, got.drafts) if got.drafts else ()
        if not (count or reason or got.prompt_logprobs):
            return None
        return SeqUpdate(seq, got.token_ids[:count], got.logprobs[:count], piece.start + 1, got.prompt_logprobs, reason)
