"""The engine's synchronous core: requests in, steps, deltas out. One thread owns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import CapacityError, ConfigError, ContextLengthError, EngineError, InvalidRequestError
from engine.executor.base import Executor, executor_class
from engine.kv.manager import PagedKVCache
from engine.kv.transfer import BlockAccess, KVTransfer, LocalTransfer
from engine.live import LiveChoice, LiveRequest
from engine.models.locate import resolve
from engine.offline import Completion, completion
from engine.runner.random import choice_seed, derive_seed
from engine.sampling_bounds import check_sampling
from engine.scheduler.scheduler import Scheduler, SeqUpdate
from engine.stats import Recorder, StepMeter
from engine.text import TextModel, load_text
from engine.text.output import TextStream
from engine.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Sequence,
    TokenDelta,
)


class Engine:
    """Runs requests, one step at a time: schedule, run the plan, take in its result, make text.

    Every accepted request ends in exactly one terminal delta per choice, and everything it held is free by
    then. Not thread-safe: AsyncEngine gives it a thread of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None = None,
        text: TextModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.text = text or load_text(str(resolve(config.model)), config.tokenizer)
        self._clock = clock
        self._executor = executor or executor_class(config.executor)(config)
        self.capacity = self._executor.start()
        self.prefix_root: Mapping[str, str] = {
            "model": self.capacity.fingerprint,
            "kv_dtype": config.kv_cache_dtype,
        }
        self._kv = PagedKVCache(
            self.capacity.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            self.prefix_root,
            self.capacity.num_host_slots,
            self.capacity.window,
            self.capacity.num_disk_slots,
        )
        # A model's config and its tokenizer may name different tokens; either ends a text.
        eos_ids = self.capacity.eos_ids | self.text.eos_ids
        self._scheduler = Scheduler(config, self._kv, self.capacity.max_model_len, eos_ids, self.capacity.copy_s)
        self._live: dict[str, LiveRequest] = {}
        self._by_seq: dict[int, LiveRequest] = {}
        self._undelivered: list[TokenDelta] = []  # of the step in progress, or of one that failed
        self._next_seq_id = 0
        self._seedless = 0
        self.recorder = Recorder()
        self._meter = StepMeter()
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = self._num_expired = self._num_arrived = 0

    # ------------------------------------------------------------------------------------------- requests

    def add(self, request: GenerateRequest, arrival_s: float | None = None) -> None:
        """Accept a request. `arrival_s`: when it came, by the engine's clock, if not just now. Raises
        InvalidRequestError (also ContextLengthError, CapacityError), QueueFullError or DeadlineError, and then holds
        nothing of it. A request whose deadline passes while it waits ends with an error instead."""
        params = self._validated(request)
        self._num_arrived += 1
        if params.seed is None:
            seed = derive_seed(self.config.seed, self._seedless)
            self._seedless += 1
        else:
            seed = params.seed
        live = LiveRequest(request, self._clock() if arrival_s is None else arrival_s)
        if params.prompt_logprobs is not None:
            live.prompt_logprobs = [None] * len(request.prompt)
        self._live[request.request_id] = live
        try:
            for index in range(params.n):
                self._add_choice(live, params, index, choice_seed(seed, index))
        except BaseException:
            self._drop(live)
            raise

    def _add_choice(self, live: LiveRequest, params: SamplingParams, index: int, seed: int) -> None:
        # The prompt is scored once, by the first choice; the others may then use the prefix cache.
        own = params if index == 0 else replace(params, prompt_logprobs=None)
        text = TextStream(self.text.tokenizer, own)
        for token in live.request.prompt[live.request.num_prompt :]:
            if text.push(token, None, False):
                raise InvalidRequestError("the resumed tokens hold a stop string: nothing follows them", "prompt")
        seq = Sequence(
            seq_id=self._next_seq_id,
            request=replace(live.request, sampling=own),
            tokens=list(live.request.prompt),
            num_prompt=live.request.num_prompt,
            index=index,
            seed=seed,
            arrival_s=live.arrival_s,
        )
        self._next_seq_id += 1
        self._scheduler.add(seq)
        live.choices[seq.seq_id] = LiveChoice(seq, text, live.request.resumed_tokens)
        self._by_seq[seq.seq_id] = live

    def _validated(self, request: GenerateRequest) -> SamplingParams:
        params, num_prompt, resumed = request.sampling, request.num_prompt, request.resumed_tokens
        limit, vocab = self.capacity.max_model_len, self.capacity.vocab_size
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running", "request_id")
        if num_prompt < 1:
            raise InvalidRequestError("prompt must hold at least one token", "prompt")
        if resumed < 0 or (resumed and (params.n > 1 or resumed >= params.max_tokens)):
            raise InvalidRequestError("resumed_tokens must be less than max_tokens, and n 1", "resumed_tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab})", "prompt")
        check_sampling(params, vocab)
        if num_prompt + params.max_tokens > limit or num_prompt > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + params.max_tokens} tokens ({num_prompt} in the prompt, {params.max_tokens} in the "
                "completion). Please reduce the length of the prompt or completion.",
                "prompt",
            )
        return params

    def _drop(self, live: LiveRequest) -> None:
        for seq_id in list(live.choices):
            self._scheduler.finish(seq_id, FinishReason.ABORT)
            self._by_seq.pop(seq_id, None)
        self._live.pop(live.request.request_id, None)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> list[TokenDelta]:
        """End a request now, whatever its state; idempotent. Returns its terminal deltas (text held back is
        flushed, so that what was generated is not lost)."""
        live = self._live.get(request_id)
        if live is None:
            return []
        now = self._clock()
        deltas = []
        for choice in list(live.choices.values()):
            self._scheduler.finish(choice.seq.seq_id, reason)
            deltas.append(self._terminal(live, choice, (), reason, now, error))
        return deltas

    def abort_all(self, reason: FinishReason, error: str | None = None) -> list[TokenDelta]:
        """Abort every request. Returns all their terminal deltas."""
        deltas, self._undelivered = self._undelivered, []
        return deltas + [d for request_id in list(self._live) for d in self.abort(request_id, reason, error)]

    # ---------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, so that step() is to be called."""
        return bool(self._live)

    def step(self) -> list[TokenDelta]:
        """Run one step. Returns the new deltas; [] when there was nothing to run."""
        now = self._clock()
        for seq in self._scheduler.missed(now):
            self._undelivered.append(self._expire(seq, now))
        plan = self._scheduler.schedule(now)
        if plan is not None:
            result = self._executor.submit(plan).result()
            began, now = now, self._clock()
            self._meter.add(plan, now - began, self._scheduler.num_waiting)
            for update in self._scheduler.update(plan, result, now):
                if (delta := self._output(update, now)) is not None:
                    self._undelivered.append(delta)
        deltas, self._undelivered = self._undelivered, []
        return deltas

    def _expire(self, seq: Sequence, now: float) -> TokenDelta:
        self._num_expired += 1
        self._scheduler.finish(seq.seq_id, FinishReason.ERROR)
        live = self._by_seq[seq.seq_id]
        error = f"no first token was possible within the deadline of {seq.request.deadline_s} s after arrival"
        return self._terminal(live, live.choices[seq.seq_id], (), FinishReason.ERROR, now, error)

    def _output(self, update: SeqUpdate, now: float) -> TokenDelta | None:
        live = self._by_seq.get(update.seq.seq_id)
        if live is None:
            return None
        choice = live.choices[update.seq.seq_id]
        at = update.prompt_logprob_start
        live.prompt_logprobs[at : at + len(update.prompt_logprobs)] = update.prompt_logprobs
        if not update.token_ids and update.finish_reason is None:
            return None
        reason = update.finish_reason
        taken = 0
        for i, token in enumerate(update.token_ids):
            ends = reason is FinishReason.STOP and i == len(update.token_ids) - 1
            entry = update.logprobs[i] if update.logprobs else None
            taken += 1
            if choice.text.push(token, entry, ends):
                if reason is None:
                    self._scheduler.finish(update.seq.seq_id, FinishReason.STOP)
                reason = FinishReason.STOP
                break
        tokens = update.token_ids[:taken]
        self._time_tokens(live, choice, len(tokens), now)
        if reason is not None:
            return self._terminal(live, choice, tokens, reason, now, update.fault)
        first = choice.num_completion == len(tokens)
        return live.delta(choice, tokens, timings=choice.timings(live.arrival_s, now) if first else None)

    def _time_tokens(self, live: LiveRequest, choice: LiveChoice, count: int, now: float) -> None:
        if not count:
            return
        if live.first_token_s is None:
            live.first_token_s = now
            live.num_cached = choice.seq.num_cached
            self._prompt_tokens += len(live.request.prompt)
            self._cached_tokens += live.num_cached
            self.recorder.ttft_s.append(now - live.arrival_s)
        if choice.last_token_s is not None:
            self.recorder.itl_s.append((now - choice.last_token_s) / count)
        choice.last_token_s = now
        choice.num_completion += count
        live.num_completion += count
        self._generated_tokens += count

    def _terminal(
        self,
        live: LiveRequest,
        choice: LiveChoice,
        tokens: tuple[int, ...],
        reason: FinishReason,
        now: float,
        error: str | None = None,
    ) -> TokenDelta:
        choice.text.finish()
        timings = choice.timings(live.arrival_s, now)
        delta = live.delta(choice, tokens, reason, error, timings)
        del self._by_seq[choice.seq.seq_id]
        if live.close(choice, reason, timings):
            del self._live[live.request.request_id]
            self.recorder.finished.append(live.record(now))
        return delta

    # ------------------------------------------------------------------------------------------- the rest

    def stats(self) -> EngineStats:
        """Load and counters at this moment."""
        s, kv, meter = self._scheduler, self._kv, self._meter
        return EngineStats(
            waiting=s.num_waiting,
            running=s.num_running,
            kv_blocks_used=kv.num_used,
            kv_blocks_total=self.capacity.num_blocks,
            pending_tokens=s.pending_tokens,
            num_preemptions=s.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            num_swaps=s.num_swaps,
            num_expired=self._num_expired,
            host_hits=kv.host_hits,
            host_blocks_used=kv.host.num_used,
            host_blocks_total=kv.host.pool.num_blocks,
            kv_blocks_stored=kv.host.num_stored,
            kv_blocks_spilled=kv.host.num_spilled,
            kv_blocks_loaded=kv.host.num_loaded,
            kv_blocks_to_disk=kv.host.num_to_disk,
            kv_blocks_from_disk=kv.host.num_from_disk,
            num_arrived=self._num_arrived,
            num_steps=meter.num_steps,
            step_s=meter.step_s,
            shortest_step_s=meter.shortest_step_s,
            num_prompt_steps=meter.num_prompt_steps,
            prompt_step_s=meter.prompt_step_s,
            prompt_step_tokens=meter.prompt_step_tokens,
        )

    def cached_prefixes(self) -> list[bytes]:
        """The digests of all blocks that the prefix cache can give out. Any thread may ask."""
        return self._kv.published()

    def pin(self, token_ids: Seq[int], salt: str = "") -> int:
        """Keep the K/V of a prefix, from the first request on that computes it, for as long as there are other
        blocks to evict. Idempotent. Returns how many of the tokens are in whole blocks and so pinned. Raises
        ConfigError without prefix caching, CapacityError when more than half of the cache would be pinned."""
        if not self.config.enable_prefix_caching:
            raise ConfigError("pinning a prefix needs enable_prefix_caching, which is off")
        digests, most = self._kv.digests(token_ids, salt), self.capacity.num_blocks // 2
        new = [digest for digest in digests if not self._kv.is_pinned(digest)]
        if self._kv.num_pinned + len(new) > most:
            raise CapacityError(
                f"{len(new)} blocks to pin besides {self._kv.num_pinned}; at most {most} of "
                f"{self.capacity.num_blocks} may be",
                "token_ids",
            )
        self._kv.pin(new)
        return len(digests) * self.config.block_size

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks' worth of pinned prefixes, whether or not they have been computed yet."""
        return self._kv.num_pinned

    def unpin(self, token_ids: Seq[int], salt: str = "") -> None:
        """Undo pin(). What is cached stays until its blocks are needed."""
        self._kv.unpin(self._kv.digests(token_ids, salt))

    def transfer(self) -> KVTransfer:
        """What moves prefixes to and from other engines. Raises ConfigError if the executor or the settings do not
        allow it."""
        access = self._executor
        if not isinstance(access, BlockAccess):
            raise ConfigError(f"executor {self.config.executor!r} does not let blocks be moved")
        if not self.config.enable_prefix_caching:
            raise ConfigError("moving prefixes needs enable_prefix_caching, which is off")
        return LocalTransfer(self._kv, access)

    def check_health(self) -> None:
        """Raise what the executor raises if a rank is lost."""
        self._executor.check_health()

    def close(self) -> None:
        """Free the executor's model and cache. The engine is of no use afterwards."""
        self._executor.shutdown()

    def generate(
        self, prompts: Seq[str | Iterable[int]], sampling: SamplingParams | Seq[SamplingParams]
    ) -> list[Completion]:
        """Run all prompts (text or ids) to their end; results are in input order.

        A refused prompt is a Completion with `error` and does not disturb the others. Not to be mixed with add() and
        step(): it takes all deltas of the engine.
        """
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        outcomes: dict[str, Completion | list[TokenDelta]] = {}
        try:
            for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                ids = self.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                request_id = f"offline-{i}"
                try:
                    self.add(GenerateRequest(request_id, tuple(ids), own))
                    outcomes[request_id] = []
                except EngineError as error:
                    outcomes[request_id] = Completion(error=error)
            while self.has_work:
                for delta in self.step():
                    into = outcomes[delta.request_id]
                    assert isinstance(into, list)
                    into.append(delta)
        except BaseException:  # an interrupt too: what was begun must not stand in the way of the next call
            for request_id in outcomes:
                self.abort(request_id)
            raise
        return [o if isinstance(o, Completion) else completion(o) for o in outcomes.values()]
