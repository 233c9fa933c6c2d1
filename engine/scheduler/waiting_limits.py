"""Which sequences may wait at all, and for how long."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import CapacityError, ContextLengthError, DeadlineError, InvalidRequestError, QueueFullError
from engine.kv.base import KVCache
from engine.scheduler.deadlines import DrainRate
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.running import RunningSet
from engine.scheduler.stop import max_kv_tokens
from engine.types import Sequence


class WaitingLimits:
    """Refuses, with the numbers, what can never run and what cannot run soon enough."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCache,
        queue: WaitingQueue,
        running: RunningSet,
        max_model_len: int,
    ) -> None:
        self._max_waiting = config.max_num_waiting
        self._max_waiting_tokens = config.max_waiting_tokens
        self._kv = kv
        self._queue = queue
        self._running = running
        self._drain = DrainRate()
        self._max_model_len = max_model_len

    def check(self, seq: Sequence) -> None:
        """Raise what Scheduler.add() says. The further choices of a request come in with its first."""
        self._check_fits(seq)
        if seq.index == 0 and len(self._queue) >= self._running.num_free:
            self._check_queue(seq)

    def observe(self, now_s: float, num_tokens: int, backlogged: bool) -> None:
        """Once per step with a queue: tokens of the sequences admitted in it, and whether others still wait."""
        self._drain.observe(now_s, num_tokens, backlogged)

    def _check_fits(self, seq: Sequence) -> None:
        max_tokens = seq.request.sampling.max_tokens
        if seq.num_prompt < 1:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        if seq.num_prompt + min(max_tokens, 1) > self._max_model_len:
            raise ContextLengthError(
                f"{seq.num_prompt} prompt tokens leave no room for output: the context is {self._max_model_len} tokens",
                "prompt",
            )
        need = max_kv_tokens(seq)
        if not self._kv.can_ever_fit(need):
            room = self._kv.num_blocks * self._kv.block_size
            raise CapacityError(
                f"{seq.num_prompt} prompt tokens and {max_tokens} to generate need K/V for {need} tokens; "
                f"the cache holds {room} ({self._kv.num_blocks} blocks of {self._kv.block_size})",
                "max_tokens",
            )

    def _check_queue(self, seq: Sequence) -> None:
        queue = self._queue
        if len(queue) - self._running.num_free >= self._max_waiting:
            raise QueueFullError(f"{len(queue)} requests wait, max_num_waiting is {self._max_waiting}")
        if queue.num_tokens + len(seq.tokens) > self._max_waiting_tokens:
            raise QueueFullError(
                f"{queue.num_tokens} tokens wait and the request has {len(seq.tokens)}, "
                f"max_waiting_tokens is {self._max_waiting_tokens}"
            )
        if (deadline_s := seq.request.deadline_s) is not None:
            ahead = queue.tokens_ahead(queue.class_of(seq))
            if (wait_s := self._drain.least_wait_s(ahead)) > deadline_s:
                raise DeadlineError(
                    f"{ahead} tokens wait before this request, which takes at least {wait_s:.1f} s; "
                    f"its deadline is in {deadline_s:.1f} s"
                )
