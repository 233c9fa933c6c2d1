"""A model-free executor: the next token is a pure function of everything before it, so any mistake in
scheduling, caching or preemption shows as a wrong token."""

from __future__ import annotations

import time
from concurrent.futures import Future

from engine.executor.base import Capacity
from engine.types import SliceResult, StepPlan, StepResult, TokenLogprob


def next_token(prefix: list[int], vocab: int) -> int:
    h = 17
    for t in prefix:
        h = (h * 31 + t) % 1_000_003
    return 3 + h % (vocab - 3)  # 0..2 are special in the test tokenizer


class FakeExecutor:
    """Keeps K/V as (block, offset) -> (token, digest of prefix); reads the context back through block_ids."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16, max_model_len: int = 512, vocab: int = 200) -> None:
        self.capacity = Capacity(num_blocks, max_model_len, vocab, frozenset({2}), "fake")
        self.block_size = block_size
        self.memory: dict[tuple[int, int], int] = {}
        self.fail_at: int | None = None
        self.step_s = 0.0  # so that a test can act while a request runs
        self.steps = 0
        self.params: dict[int, object] = {}
        self.num_tokens = 0

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.steps += 1
        time.sleep(self.step_s)
        future: Future[StepResult] = Future()
        if self.fail_at is not None and self.steps >= self.fail_at:
            future.set_exception(RuntimeError("boom"))
            return future
        for seq_id in plan.finished:
            self.params.pop(seq_id, None)
        for new in plan.new:
            self.params[new.seq_id] = new
        results = []
        for s in plan.slices:
            assert s.seq_id in self.params, "slice of a sequence never announced"
            for i, t in enumerate(s.token_ids, s.start):
                self.memory[s.block_ids[i // self.block_size], i % self.block_size] = t
            end = s.start + len(s.token_ids)
            context = [self.memory[s.block_ids[i // self.block_size], i % self.block_size] for i in range(end)]
            self.num_tokens += len(s.token_ids)
            new = self.params[s.seq_id]
            tokens = (next_token(context, self.capacity.vocab_size),) if s.sample else ()
            sampling = new.sampling  # type: ignore[attr-defined]
            prompt = new.prompt  # type: ignore[attr-defined]
            logprobs = tuple(TokenLogprob(t, -0.5) for t in tokens) if sampling.logprobs is not None else ()
            rows: tuple[TokenLogprob, ...] = ()
            if sampling.prompt_logprobs is not None:
                stop = min(end, len(prompt) - 1)
                rows = tuple(TokenLogprob(prompt[i + 1], -float(i + 1)) for i in range(s.start, stop))
            results.append(SliceResult(tokens, logprobs, rows))
        future.set_result(StepResult(plan.step_id, tuple(results)))
        return future

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return
