"""An executor without a model: its steps take time but no CPU, so that everything around them can be measured.

An engine uses it with `executor: "load_tests.stand_in:StandIn"` and, in `executor_options`, either `step_ms`, what
each step takes, or the fields of StepTimes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor import settings
from engine.executor.base import Capacity
from engine.models.checkpoint import open_checkpoint
from engine.models.locate import resolve
from engine.types import SeqSlice, SliceResult, StepPlan, StepResult

_TOKENS_OF_CACHE = 1 << 20  # when num_kv_blocks does not say: room costs nothing here
_MAX_BEHIND_S = 0.1  # what later steps make good at most: a machine that stood still for longer did so
STAND_IN = "load_tests.stand_in:StandIn"
"""What EngineConfig.executor calls it."""
_STEP_MS = 30.0  # if executor_options says nothing: about a decode step of a small model on two cores


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step takes, in seconds: `base_s`, and so much for each prompt token, for each pair of a prompt token and
    one before it, for each sequence that decodes, and for each token that one attends to."""

    base_s: float
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_seq_s: float = 0.0
    decode_context_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "prefill_token_s", "prefill_pair_s", "decode_seq_s", "decode_context_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")


class StandIn:
    """Passes for the configured model: its context, vocabulary and eos, from the file's metadata.

    A step sleeps for `step_ms`, or for what StepTimes says of it, and then keeps to that on average, whatever the
    engine does between two steps. The next token depends on its position alone and is never an eos; there are no
    logprobs. `clock` and `sleep` are in seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._step_s, self._times = _step_times(dict(config.executor_options))
        self.due_s = 0.0  # by the clock: when the last step should have been over
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
            self._sleep(self._step_s)
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
        """Sleep for what the step takes. Steps with prompts are shorter by what the engine did between steps and what
        sleeping took beyond its time; steps that only decode never are, for the engine learns from the shortest of
        them what is fixed in each. A step of new sequences alone comes after a pause, and makes good nothing."""
        now_s = self._clock()
        took_s = step_s(plan, times)
        new = {sequence.seq_id for sequence in plan.new}
        goes_on = any(s.seq_id not in new for s in plan.slices)
        behind_s = min(max(0.0, now_s - self.due_s), _MAX_BEHIND_S) if goes_on else 0.0
        hurry_s = min(behind_s, took_s / 2) if any(_prompt_tokens(s) for s in plan.slices) else 0.0
        self.due_s = now_s - behind_s + took_s
        self._sleep(took_s - hurry_s)

    def check_health(self) -> None:
        """There is nothing to lose."""

    def shutdown(self) -> None:
        """There is nothing to free."""


def _step_times(options: dict[str, float]) -> tuple[float, StepTimes | None]:
    """Seconds of each step, or what they depend on. Raises ConfigError for options that are not known."""
    if options and "step_ms" not in options:
        try:
            return 0.0, StepTimes(**options)
        except TypeError as error:
            raise ConfigError(f"executor_options: step_ms, or the times of a step: {error}") from None
    step_ms = options.pop("step_ms", _STEP_MS)
    if options or step_ms < 0:
        raise ConfigError(f"executor_options: step_ms must be at least 0 and stand alone, got {step_ms} and {options}")
    return step_ms / 1000, None


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
