"""No model at all: steps that take time but no CPU, so that everything around them can be measured."""

from __future__ import annotations

import time
from concurrent.futures import Future

from engine.config import EngineConfig, StepTimes
from engine.executor import settings
from engine.executor.base import Capacity
from engine.models.checkpoint import open_checkpoint
from engine.models.locate import resolve
from engine.types import SeqSlice, SliceResult, StepPlan, StepResult

_TOKENS_OF_CACHE = 1 << 20  # when num_kv_blocks does not say: room costs nothing here
_MAX_BEHIND_S = 0.1  # what later steps make good at most: a machine that stood still for longer did so


class StandIn:
    """Passes for the configured model: its context, vocabulary and eos, from the file's metadata. A step sleeps for
    `stand_in_step_ms`, or what `stand_in_times` says, and then keeps to that on the whole, whatever the engine does
    between two steps. The next token depends on its position alone and is never an eos; there are no logprobs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._step_s = config.stand_in_step_ms / 1000
        self._times = config.stand_in_times
        self._due_s = 0.0  # when the last step should have been over, by monotonic()
        self._tokens: tuple[int, ...] = ()

    def start(self) -> Capacity:
        """Raises ModelFileError, or ConfigError for a max_model_len beyond the model's."""
        config = self._config
        checkpoint = open_checkpoint(resolve(config.model))
        vocab_size, eos_ids = checkpoint.spec.vocab_size, frozenset(checkpoint.spec.eos_ids)
        # The middle of a vocabulary is ordinary pieces of words: bytes and control tokens are at its ends.
        self._tokens = tuple(t for t in range(vocab_size // 4, vocab_size // 2) if t not in eos_ids)
        return Capacity(
            config.num_kv_blocks or -(-_TOKENS_OF_CACHE // config.block_size),
            settings.resolve_max_model_len(config, checkpoint),
            vocab_size,
            eos_ids,
            checkpoint.fingerprint,
        )

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._times is None:
            time.sleep(self._step_s)
        else:
            self._pace(plan, self._times)
        ends = (s.start + len(s.token_ids) if s.sample else None for s in plan.slices)
        tokens = self._tokens
        future: Future[StepResult] = Future()
        future.set_result(
            StepResult(
                plan.step_id,
                tuple(SliceResult(() if end is None else (tokens[end % len(tokens)],)) for end in ends),
            )
        )
        return future

    def _pace(self, plan: StepPlan, times: StepTimes) -> None:
        """What the engine does between steps, and what sleeping takes beyond its time, steps with prompts make good:
        the shortest step tells the engine what is fixed in each, so that decodes alone are never hurried. A step of new
        sequences alone comes after a pause."""
        now_s = time.monotonic()
        took_s = step_s(plan, times)
        new = {sequence.seq_id for sequence in plan.new}
        goes_on = any(s.seq_id not in new for s in plan.slices)
        behind_s = min(max(0.0, now_s - self._due_s), _MAX_BEHIND_S) if goes_on else 0.0
        hurry_s = min(behind_s, took_s / 2) if any(_prompt_tokens(s) for s in plan.slices) else 0.0
        self._due_s = now_s - behind_s + took_s
        time.sleep(took_s - hurry_s)

    def check_health(self) -> None:
        """There is nothing to lose."""

    def shutdown(self) -> None:
        """There is nothing to free."""


def step_s(plan: StepPlan, times: StepTimes) -> float:
    """What the model that `times` describes would take."""
    took_s = times.base_s
    for s in plan.slices:
        if tokens := _prompt_tokens(s):
            took_s += tokens * (times.prefill_token_s + times.prefill_pair_s * (s.start + tokens / 2))
        else:
            took_s += times.decode_seq_s + times.decode_context_s * (s.start + len(s.token_ids))
    return took_s


def _prompt_tokens(part: SeqSlice) -> int:
    """A slice of one token, drafts apart, decodes, and has none."""
    tokens = len(part.token_ids)
    return tokens if tokens - part.num_drafts > 1 else 0
