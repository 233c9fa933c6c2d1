"""Decides each step: one token budget, chunking, preemption and drafts by one subtraction (num_pending)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from engine.config import EngineConfig
from engine.errors import CapacityError, ContextLengthError, InvalidRequestError, QueueFullError
from engine.kv.manager import KVCache
from engine.scheduler.queue import QUEUES, WaitingQueue
from engine.scheduler.stop import max_kv_tokens, stop_reason, useful_drafts
from engine.types import (
    FinishReason,
    NewSequence,
    Phase,
    SeqSlice,
    Sequence,
    SliceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class SeqUpdate:
    """What one step gave one sequence: tokens appended (none past the end), prompt logprobs, or its end.

    `prompt_logprobs[i]` belongs to prompt token `prompt_logprob_start` + i. After a preemption rows come
    again: store by position, do not append.
    """

    seq: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprob_start: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Step:
    """A plan in the making: tokens granted by seq_id, in plan order, and budget left. A grant can be taken back."""

    budget: int
    grants: dict[int, int] = field(default_factory=dict)
    preempted: bool = False

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        self.grants[seq.seq_id] = num_tokens
        self.budget -= num_tokens

    def take_back(self, seq: Sequence) -> None:
        self.budget += self.grants.pop(seq.seq_id, 0)


class Scheduler:
    """Owns every live Sequence. Strictly schedule(), run the plan, update(); add() and finish() at any time.

    `max_model_len` is the most tokens (prompt + output) of one sequence. `now_s` arguments share one clock
    with Sequence.arrival_s. Not thread-safe. A step costs O(running), whatever waits and whatever the pool.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, max_model_len: int, eos_ids: frozenset[int]) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._budget = config.max_num_batched_tokens
        self._max_running = config.max_num_seqs
        self._max_waiting = config.max_num_waiting
        self._queue: WaitingQueue = QUEUES.get(config.scheduling_policy)()
        self._live: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._announced: set[int] = set()
        self._ended: list[int] = []  # announced, and the ranks do not know yet
        self._queued_tokens = 0
        self._num_preemptions = 0
        self._in_flight: StepPlan | None = None
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a seat, preempted ones included."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def pending_tokens(self) -> int:
        """Tokens to prefill before all live sequences decode. Upper bound: prefix hits are not foreseen."""
        lacking = (len(seq.tokens) - seq.num_computed for seq in self._running.values())
        return self._queued_tokens + sum(n for n in lacking if n > 1)

    @property
    def num_preemptions(self) -> int:
        """Total since the start."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether schedule() would give a plan."""
        return bool(self._live)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequestError (no prompt), ContextLengthError or CapacityError: it can
        never run; QueueFullError: not now. Sequences that will find a free seat do not count as waiting, and
        a request's further choices come in with its first."""
        assert seq.seq_id not in self._live, f"sequence {seq.seq_id} added twice"
        self._check_fits(seq)
        seats = self._max_running - len(self._running)
        if seq.index == 0 and len(self._queue) - seats >= self._max_waiting:
            raise QueueFullError(f"{len(self._queue)} requests wait, max_num_waiting is {self._max_waiting}")
        self._live[seq.seq_id] = seq
        self._queue.push(seq)
        self._queued_tokens += len(seq.tokens)

    def finish(self, seq_id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence wherever it stands, also while its step runs; None if it is not live (any more).

        Its blocks are free at once: nothing is scheduled before the running step's update(), which ignores it.
        """
        seq = self._live.pop(seq_id, None)
        if seq is None:
            return None
        if self._running.pop(seq_id, None) is None:
            self._queue.remove(seq_id)
            self._queued_tokens -= len(seq.tokens)
        seq.phase = Phase.FINISHED
        seq.finish_reason = reason
        seq.drafts = ()
        self._kv.forget(seq)
        if seq_id in self._announced:
            self._announced.remove(seq_id)
            self._ended.append(seq_id)
        return seq

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing is live. The caller must update() it before the next call, or,
        if it failed, finish() all its sequences."""
        if lost := self._in_flight:
            assert not any(piece.seq_id in self._live for piece in lost.slices), "the last plan was not updated"
        step = _Step(self._budget)
        self._serve_running(step)
        if not step.preempted:
            self._admit(step, now_s)
        if not step.grants:
            return None
        seqs = [(self._running[seq_id], n) for seq_id, n in step.grants.items()]
        new = [seq for seq, _ in seqs if seq.seq_id not in self._announced]
        self._announced.update(seq.seq_id for seq in new)
        plan = StepPlan(
            step_id=self._next_step_id,
            slices=tuple(self._slice(seq, n) for seq, n in seqs),
            new=tuple(
                NewSequence(s.seq_id, s.request.sampling, s.seed, tuple(islice(s.tokens, s.num_prompt))) for s in new
            ),
            finished=tuple(self._ended),
        )
        self._ended.clear()
        self._next_step_id += 1
        self._in_flight = plan
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SeqUpdate]:
        """Take in the result of the plan in flight. Only sequences with news are listed; a sequence that
        ended here holds nothing any more."""
        assert plan is self._in_flight and plan.step_id == result.step_id, "not the plan in flight"
        self._in_flight = None
        updates = []
        for piece, got in zip(plan.slices, result.slices, strict=True):
            seq = self._running.get(piece.seq_id)
            if seq is not None and (update := self._advance(seq, piece, got, now_s)):
                updates.append(update)
        return updates

    def check(self) -> None:
        """Assert all invariants. For tests: O(everything)."""
        queued = {seq.seq_id: seq for seq in self._queue}
        assert len(queued) == len(self._queue), "queued twice"
        assert not queued.keys() & self._running.keys(), "queued and running"
        assert {**queued, **self._running} == self._live, "lost or undead sequences"
        assert all(seq.phase in (Phase.WAITING, Phase.PREEMPTED) for seq in queued.values())
        assert all(not seq.blocks and not seq.num_computed for seq in queued.values()), "a queued one holds K/V"
        assert self._queued_tokens == sum(len(seq.tokens) for seq in queued.values())
        assert len(self._running) <= self._max_running
        for seq in self._running.values():
            assert seq.phase is Phase.RUNNING and seq.num_pending > 0, f"sequence {seq.seq_id} is stuck"
            assert not seq.drafts or seq.num_pending == 1 + len(seq.drafts), "drafts before the end"
        held = {block for seq in self._running.values() for block in seq.blocks}
        assert len(held) == self._kv.num_used, "blocks not owned exactly by running sequences"
        assert self._announced <= self._live.keys() and not self._announced & set(self._ended)
        if plan := self._in_flight:
            ids = [piece.seq_id for piece in plan.slices]
            assert len(set(ids)) == len(ids) and plan.num_tokens <= self._budget
            assert all(seq_id in self._running or seq_id not in self._live for seq_id in ids), "scheduled, not running"
        self._kv.check()

    def _check_fits(self, seq: Sequence) -> None:
        max_tokens = seq.request.sampling.max_tokens
        if seq.num_prompt < 1:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        if seq.num_prompt + min(max_tokens, 1) > self._max_model_len:
            raise ContextLengthError(
                f"{seq.num_prompt} prompt tokens leave no room for output: the context is {self._max_model_len} tokens",
                "prompt",
            )
        need = max_kv_tokens(seq, self._max_model_len)
        if not self._kv.can_ever_fit(need):
            room = self._kv.num_blocks * self._kv.block_size
            raise CapacityError(
                f"{seq.num_prompt} prompt tokens and {max_tokens} to generate need K/V for {need} tokens; "
                f"the cache holds {room} ({self._kv.num_blocks} blocks of {self._kv.block_size})",
                "max_tokens",
            )

    def _serve_running(self, step: _Step) -> None:
        """Decodes first: they are cheap and someone is reading along. Then prompts, in order, with what is left."""
        running = list(self._running.values())
        decodes = [seq for seq in running if len(seq.tokens) - seq.num_computed == 1]
        unserved = len(running)
        for seq in decodes:
            if seq.phase is Phase.RUNNING:  # not a victim of the ones before it
                if seq.drafts:  # never at the price of another's only token
                    seq.drafts = seq.drafts[: step.budget - unserved]
                self._extend(seq, 1 + len(seq.drafts), step)
            unserved -= 1
        if len(decodes) == len(running):
            return
        for seq in running:
            if step.budget and seq.phase is Phase.RUNNING and seq.seq_id not in step.grants:
                self._extend(seq, min(seq.num_pending, step.budget), step)

    def _extend(self, seq: Sequence, num_tokens: int, step: _Step) -> None:
        """Grant num_tokens to a running sequence, preempting the least deserving until there is room."""
        while not self._kv.reserve(seq, num_tokens):
            if seq.drafts:  # a guess is not worth a preemption
                seq.drafts = ()
                num_tokens = seq.num_pending
                continue
            victim = max(self._running.values(), key=lambda s: (s.request.priority, s.arrival_s, s.seq_id))
            self._preempt(victim, step)
            if victim is seq:
                return
        step.grant(seq, num_tokens)

    def _preempt(self, seq: Sequence, step: _Step) -> None:
        step.take_back(seq)
        step.preempted = True
        self._kv.release(seq)
        del self._running[seq.seq_id]
        seq.phase = Phase.PREEMPTED
        seq.drafts = ()
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.push_front(seq)
        self._queued_tokens += len(seq.tokens)

    def _admit(self, step: _Step, now_s: float) -> None:
        """Seat waiting sequences while the running ones leave budget: so there are never more running than tokens
        in a budget, and none starves. A sequence takes blocks for all its tokens at once, so that blocks seen as
        free are free and not promised to prompts in progress."""
        while step.budget and len(self._running) < self._max_running and (seq := self._queue.peek()):
            hit = self._kv.lookup(seq)
            # Room for everyone to grow by a block, else the newcomer would be thrown out again soon. Who was
            # thrown out before waits for more: that bounds repeated work. Alone, one always fits.
            spare = (len(self._running) + 1) << min(seq.num_preemptions, 8) if self._running else 0
            if not self._kv.reserve(seq, len(seq.tokens) - hit.num_tokens, hit, spare):
                return
            self._queue.pop()
            self._queued_tokens -= len(seq.tokens)
            self._running[seq.seq_id] = seq
            seq.phase = Phase.RUNNING
            if not seq.admitted_before:
                seq.admitted_before = True
                seq.num_cached = hit.num_tokens
                seq.first_scheduled_s = now_s
            step.grant(seq, min(seq.num_pending, step.budget))

    def _slice(self, seq: Sequence, num_tokens: int) -> SeqSlice:
        start, tokens, blocks, drafts = seq.num_computed, seq.tokens, seq.blocks, seq.drafts
        end = start + num_tokens
        num_blocks = -(-end // self._block_size)
        return SeqSlice(
            seq.seq_id,
            (*tokens[start:end], *drafts),
            start,
            tuple(blocks if num_blocks == len(blocks) else blocks[:num_blocks]),
            end >= len(tokens) and seq.request.sampling.max_tokens > 0,
            len(drafts),
        )

    def _advance(self, seq: Sequence, piece: SeqSlice, got: SliceResult, now_s: float) -> SeqUpdate | None:
        assert bool(got.token_ids) == piece.sample, f"sequence {seq.seq_id}: sampled {got.token_ids}, not as planned"
        reason: FinishReason | None = None
        count = 0
        for token in got.token_ids:
            seq.tokens.append(token)
            count += 1
            if reason := stop_reason(seq, self._eos_ids, self._max_model_len):
                break
        end = piece.start + len(piece.token_ids)
        if count:
            # The newest token's K/V is not written yet, and that of refused drafts is not valid.
            end = min(end, len(seq.tokens) - 1)
            if seq.first_token_s is None:
                seq.first_token_s = now_s
        elif end == len(seq.tokens):
            reason = FinishReason.LENGTH  # max_tokens is 0: only the prompt was to be computed
        seq.num_computed = end
        if end // self._block_size != piece.start // self._block_size:
            self._kv.commit(seq)
        if reason:
            self.finish(seq.seq_id, reason)
        else:
            seq.drafts = useful_drafts(seq, got.drafts, self._max_model_len) if got.drafts else ()
        if not (count or reason or got.prompt_logprobs):
            return None
        return SeqUpdate(seq, got.token_ids[:count], got.logprobs[:count], piece.start + 1, got.prompt_logprobs, reason)
