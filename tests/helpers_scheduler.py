"""A scheduler with fake ranks around it. Their memory holds, per slot, a digest of the prefix written there, so
that a wrong share, an early eviction, a stale hit or an overwritten slot shows at the next read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.kv.base import GONE
from engine.kv.manager import PagedKVCache
from engine.kv.window import KVWindow
from engine.scheduler.scheduler import Scheduler, SeqUpdate
from engine.types import (
    FinishReason,
    GenerateRequest,
    Phase,
    SamplingParams,
    Sequence,
    SliceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)

EOS = 0
VOCAB = 23
MASK = (1 << 61) - 1


def mix(state: int, token: int) -> int:
    state = (state * 6364136223846793005 + token + 1442695040888963407) & MASK
    return state ^ (state >> 29)


def root_state(salt: str) -> int:
    return zlib.crc32(salt.encode())


def choose(state: int, seed: int, num_output: int, sampling: SamplingParams) -> int:
    """The model and sampler: a function of the whole prefix, the seed and the position."""
    token = mix(mix(state, seed), num_output) % VOCAB
    if num_output < sampling.min_tokens:
        while token == EOS or token in sampling.stop_token_ids:
            token = (token + 1) % VOCAB
    return token


def oracle(seq: Sequence, prompt: list[int], max_model_len: int) -> tuple[list[int], FinishReason]:
    """What `seq` must generate when it has the machine to itself."""
    sampling, state, out = seq.request.sampling, root_state(seq.request.cache_salt), []
    for token in prompt:
        state = mix(state, token)
    while len(out) < sampling.max_tokens and len(prompt) + len(out) < max_model_len:
        token = choose(state, seq.seed, len(out), sampling)
        out.append(token)
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops and len(out) > sampling.min_tokens:
            return out, FinishReason.STOP
        state = mix(state, token)
    return out, FinishReason.LENGTH


@dataclass
class RankSeq:
    sampling: SamplingParams
    seed: int
    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # states[i]: root and tokens[:i]
    proposed: tuple[int, ...] = ()

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.states.append(mix(self.states[-1], token))


class FakeRanks:
    """Runs plans and asserts that each slice is what a rank may be asked for."""

    def __init__(self, block_size: int, num_drafts: int, window: KVWindow | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.num_drafts = num_drafts
        self.salts: dict[int, str] = {}
        self.known: dict[int, RankSeq] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.num_tokens = 0

    def slot(self, block_ids: tuple[int, ...], pos: int) -> tuple[int, int]:
        return block_ids[pos // self.block_size], pos % self.block_size

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.finished:
            del self.known[seq_id]  # KeyError: reported twice, or never announced
        for new in plan.new:
            assert new.seq_id not in self.known, "announced twice"
            seq = RankSeq(new.sampling, new.seed, len(new.prompt), states=[root_state(self.salts[new.seq_id])])
            for token in new.prompt:
                seq.push(token)
            self.known[new.seq_id] = seq
        self._copy(plan)
        written: set[tuple[int, int]] = set()
        for piece in plan.slices:
            seq = self.known[piece.seq_id]
            end = piece.start + len(piece.token_ids)
            num_real = len(piece.token_ids) - piece.num_drafts
            drafts = piece.token_ids[num_real:]
            assert piece.token_ids and num_real >= 1
            assert list(piece.token_ids[:num_real]) == seq.tokens[piece.start : piece.start + num_real]
            assert drafts == seq.proposed[: len(drafts)]
            assert len(piece.block_ids) == -(-end // self.block_size)
            assert piece.sample == (piece.start + num_real == len(seq.tokens) and seq.sampling.max_tokens > 0)
            state = seq.states[piece.start]
            for pos, token in enumerate(piece.token_ids, piece.start):
                state = mix(state, token)
                slot = self.slot(piece.block_ids, pos)
                assert slot not in written, "two tokens of one step in one slot"
                written.add(slot)
                self.memory[slot] = state
            self.num_tokens += len(piece.token_ids)
        results = []
        for piece in plan.slices:  # after all writes, as one layer's attention does
            seq = self.known[piece.seq_id]
            end = piece.start + len(piece.token_ids) - piece.num_drafts
            for pos in self._seen(piece.start, end):
                assert self.memory[self.slot(piece.block_ids, pos)] == seq.states[pos + 1], (
                    f"sequence {piece.seq_id} reads foreign K/V at {pos}"
                )
            results.append(self._result(piece.token_ids[len(piece.token_ids) - piece.num_drafts :], piece, seq))
        return StepResult(plan.step_id, tuple(results))

    def _seen(self, start: int, end: int) -> list[int]:
        """Positions that rows from `start` on look at."""
        if self.window is None:
            return list(range(end))
        sinks, oldest = self.window.sinks, max(0, start - self.window.size + 1)
        return [pos for pos in range(end) if pos < sinks or pos >= oldest]

    def _copy(self, plan: StepPlan) -> None:
        for slot, to in plan.moves:
            for at in range(self.block_size):
                self.host[to, at] = self.host[slot, at]
        for block, slot in plan.stores:
            for at in range(self.block_size):
                self.host[slot, at] = self.memory.get((block, at), 0)
        for slot, block in plan.loads:
            for at in range(self.block_size):
                self.memory[block, at] = self.host[slot, at]  # KeyError: nothing was ever stored there

    def _result(self, drafts: tuple[int, ...], piece, seq: RankSeq) -> SliceResult:
        rows: tuple[TokenLogprob, ...] = ()
        if seq.sampling.prompt_logprobs is not None:
            stop = min(piece.start + len(piece.token_ids) + 1, seq.num_prompt)
            rows = tuple(TokenLogprob(seq.tokens[i], -float(seq.states[i] % 97)) for i in range(piece.start + 1, stop))
        if not piece.sample:
            return SliceResult(prompt_logprobs=rows)
        out: list[int] = []
        for draft in (*drafts, None):
            out.append(choose(seq.states[-1], seq.seed, len(seq.tokens) - seq.num_prompt, seq.sampling))
            seq.push(out[-1])
            if draft != out[-1]:
                break
        seq.proposed = self._propose(seq)
        logprobs = tuple(TokenLogprob(t, -1.0) for t in out) if seq.sampling.logprobs is not None else ()
        return SliceResult(tuple(out), logprobs, rows, seq.proposed)

    def _propose(self, seq: RankSeq) -> tuple[int, ...]:
        """Some right guesses, then wrong ones."""
        if not self.num_drafts:
            return ()
        state, drafts = seq.states[-1], []
        num_right = state % (self.num_drafts + 1)
        for i in range(self.num_drafts):
            right = choose(state, seq.seed, len(seq.tokens) - seq.num_prompt + i, seq.sampling)
            drafts.append(right if i < num_right else (right + 1) % VOCAB)
            state = mix(state, drafts[-1])
        return tuple(drafts)


class World:
    """Scheduler + KV cache + fake ranks; checks everything after every operation."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        caching: bool = True,
        max_model_len: int = 400,
        num_drafts: int = 0,
        num_host_slots: int = 0,
        step_s: Callable[[StepPlan], float] | None = None,
        window: KVWindow | None = None,
        num_disk_slots: int = 0,
        **settings: object,
    ) -> None:
        config = EngineConfig(
            "none",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            **settings,  # type: ignore[arg-type]
        )
        self.step_s = step_s
        self.budget = budget
        self.max_model_len = max_model_len
        root = {"model": "fake"}
        self.kv = PagedKVCache(num_blocks, block_size, caching, root, num_host_slots, window, num_disk_slots)
        self.window = window
        self.scheduler = Scheduler(config, self.kv, max_model_len, frozenset({EOS}))
        self.ranks = FakeRanks(block_size, num_drafts, window)
        self.now = 0.0
        self.seqs: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, dict[int, TokenLogprob]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        prompt: list[int],
        priority: int = 0,
        salt: str = "",
        seed: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        **sampling: object,
    ) -> Sequence:
        seq_id = len(self.seqs)
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        request = GenerateRequest(str(seq_id), tuple(prompt), params, priority, deadline_s, salt, tenant)
        seq = Sequence(seq_id, request, list(prompt), len(prompt), seed=seed, arrival_s=self.now)
        self.scheduler.add(seq)
        self.seqs[seq_id], self.prompts[seq_id], self.outputs[seq_id] = seq, list(prompt), []
        self.prompt_logprobs[seq_id] = {}
        self.ranks.salts[seq_id] = salt
        self.check()
        return seq

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        live = seq_id not in self.reasons
        seq = self.scheduler.finish(seq_id, reason)
        assert (seq is self.seqs[seq_id]) if live else (seq is None)
        if live:
            self.reasons[seq_id] = reason
        self.check()

    def schedule(self) -> StepPlan | None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self._check_plan(plan)
        return plan

    def update(self, plan: StepPlan) -> list[SeqUpdate]:
        if self.step_s is not None:
            self.now += self.step_s(plan)
        updates = self.scheduler.update(plan, self.ranks.run(plan), self.now)
        for update in updates:
            seq_id = update.seq.seq_id
            assert seq_id not in self.reasons, "news of an ended sequence"
            self.outputs[seq_id].extend(update.token_ids)
            assert self.outputs[seq_id] == update.seq.tokens[update.seq.num_prompt :]
            if update.seq.request.sampling.logprobs is not None:
                assert [entry.token_id for entry in update.logprobs] == list(update.token_ids)
            for i, entry in enumerate(update.prompt_logprobs, update.prompt_logprob_start):
                assert self.prompt_logprobs[seq_id].setdefault(i, entry) == entry
            if update.finish_reason:
                assert update.finish_reason is update.seq.finish_reason
                self.reasons[seq_id] = update.finish_reason
        self.check()
        return updates

    def step(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is not None:
            self.update(plan)
        return plan

    def drain(self) -> None:
        """Run to the end; then everything is free and every output is the oracle's."""
        bound = 20 * sum(
            len(p) + s.request.sampling.max_tokens + 1
            for p, s in zip(self.prompts.values(), self.seqs.values(), strict=True)
        )
        while self.scheduler.has_work:
            assert self.step() is not None, "work, but no plan"
            bound -= 1
            assert bound > 0, "no progress"
        assert self.schedule() is None
        assert (
            self.kv.num_used == self.kv.host.num_used == 0
            and self.scheduler.num_running == self.scheduler.num_waiting == 0
        )
        assert self.scheduler.pending_tokens == 0
        for seq_id, seq in self.seqs.items():
            assert seq.phase is Phase.FINISHED and not seq.blocks
            tokens, reason = oracle(seq, self.prompts[seq_id], self.max_model_len)
            if self.reasons[seq_id] is FinishReason.ABORT:
                assert self.outputs[seq_id] == tokens[: len(self.outputs[seq_id])]
            else:
                assert (self.outputs[seq_id], self.reasons[seq_id]) == (tokens, reason)
                if seq.request.sampling.prompt_logprobs is not None:
                    assert sorted(self.prompt_logprobs[seq_id]) == list(range(1, seq.num_prompt))

    def check(self) -> None:
        self.scheduler.check()
        size = self.kv.block_size
        live = [seq for seq in self.seqs.values() if seq.phase is Phase.RUNNING]
        holders: dict[int, tuple[str, int, list[int]]] = {}
        for seq in live:
            for i, block in enumerate(seq.blocks):
                if block == GONE:
                    continue
                full = (i + 1) * size
                mine = (seq.request.cache_salt, full, seq.tokens[:full])
                assert holders.setdefault(block, mine) == mine, f"block {block} shared by different prefixes"
        assert self.kv.num_used == len(holders)
        lacking = [len(s.tokens) - s.num_computed for s in live]
        queued = [len(s.tokens) for s in self.seqs.values() if s.phase in (Phase.WAITING, Phase.PREEMPTED)]
        assert self.scheduler.pending_tokens == sum(queued) + sum(n for n in lacking if n > 1)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert plan.slices or plan.loads, "a step for nothing"
        loading = {block for _, block in plan.loads}
        for piece in plan.slices:
            seq, end = self.seqs[piece.seq_id], piece.start + len(piece.token_ids)
            assert end <= max(seq.num_prompt, seq.num_prompt + seq.request.sampling.max_tokens - 1)
            assert end <= self.max_model_len, "a position the model does not have"
        scheduled = {piece.seq_id for piece in plan.slices}
        assert len(scheduled) == len(plan.slices)
        for seq in self.seqs.values():
            if seq.phase is Phase.RUNNING and seq.seq_id not in scheduled and not loading.intersection(seq.blocks):
                fresh = not seq.num_output or seq.num_computed < seq.num_prompt
                assert fresh or len(seq.tokens) - seq.num_computed > 1, "a decode was passed over"
                if self.step_s is None and self.window is None:  # else prompts may be held back for those who decode
                    assert plan.num_tokens == self.budget, "a prompt was passed over with budget left"
            assert seq.phase is Phase.RUNNING or seq.seq_id not in scheduled
