"""No model at all: steps that take time but no CPU, so that everything around them can be measured."""

from __future__ import annotations

import time
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.executor import settings
from engine.executor.base import Capacity
from engine.models.checkpoint import open_checkpoint
from engine.models.locate import resolve
from engine.types import SliceResult, StepPlan, StepResult

_TOKENS_OF_CACHE = 1 << 20  # when num_kv_blocks does not say: room costs nothing here


class StandIn:
    """Passes for the configured model: its context, vocabulary and eos, from the file's metadata. A step sleeps for
    `stand_in_step_ms`. The next token depends on its position alone and is never an eos; there are no logprobs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._step_s = config.stand_in_step_ms / 1000
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
        time.sleep(self._step_s)
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

    def check_health(self) -> None:
        """There is nothing to lose."""

    def shutdown(self) -> None:
        """There is nothing to free."""
