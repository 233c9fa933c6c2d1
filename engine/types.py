"""The nouns of the engine. Frozen types cross process boundaries; Sequence never does."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Where a sequence stands. PREEMPTED is waiting again after having run."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a choice ended: end of sequence or stop string, length limit, abort by the caller, an error of the engine, or
    a fault of this sequence alone, such as logits that are not numbers: no other engine would do better."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    FAULT = "fault"


UNFINISHED = frozenset((FinishReason.ABORT, FinishReason.ERROR, FinishReason.FAULT))
"""The reasons of choices that did not come to their end."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Already validated and defaulted: no None means "default".

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 are off. `logprobs` is None for none, k >= 0 for
    the chosen token's plus the k best. `prompt_logprobs` likewise for the prompt. `seed` None: the engine
    draws one. `n` choices are sampled independently from the same prompt. `text_before`: the bytes of a character that
    the text shown before this one has left incomplete, and that this one goes on with.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    text_before: bytes = b""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Gateway -> replica. Everything the engine needs, nothing of HTTP.

    `cache_salt` separates prefix caches: two requests share blocks only if their salts are equal. The
    server derives it from the tenant; a client never chooses it alone. `deadline_s` is seconds from
    arrival at the engine: a request that cannot get its first token by then is refused. Smaller `priority`
    is more important. `tenant` is who shares fairly with whom, if sharing is on. The last `resumed_tokens` of
    `prompt` are not prompt but output that another engine has given: this one goes on behind them, and its text
    begins with theirs. Then `n` must be 1.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    resumed_tokens: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt proper, without resumed output."""
        return len(self.prompt) - self.resumed_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model (before temperature and penalties), with the
    best alternatives, most likely first. `logprob` is finite: impossible tokens are clamped to -9999."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, seconds. queue: arrival -> first scheduled; prefill: first scheduled
    -> first token; decode: first -> last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Replica -> gateway. One increment of one choice; the last one of a choice carries finish_reason.

    `token_ids` are all tokens generated since the last delta. `text` and `logprobs` may lag behind them
    while a partial character or a possible stop string is held back; by the last delta they are complete
    (cut at the stop string). `num_completion_tokens` counts every token generated so far, also those whose
    text a stop string removed. The first delta of choice 0 carries `prompt_logprobs` when asked for
    (entry 0 is None: nothing precedes the first token). A choice's first and last delta have `timings`.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    timings: Timings | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request being generated. Owned by the scheduler, mutated only there.

    `tokens` is prompt + output. `num_computed` counts tokens whose K/V is in the cache. `num_cached` is the
    prefix-cache hit of the *first* admission (reuse from earlier requests; never recompute after preemption).
    `table` is `blocks` as a plan carries it, None when it must be made anew. `max_len` and `stop_ids` are what
    ends it, made from the request when it is queued.
    """

    seq_id: int
    request: GenerateRequest
    tokens: list[int]
    num_prompt: int
    index: int = 0
    seed: int = 0
    arrival_s: float = 0.0
    num_computed: int = 0
    num_cached: int = 0
    drafts: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] | None = None
    max_len: int = 0
    stop_ids: frozenset[int] = frozenset()
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    admitted_before: bool = False

    @property
    def num_pending(self) -> int:
        """Tokens still to run. Prefill, chunk, decode and verify are all this one number."""
        return len(self.tokens) + len(self.drafts) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What a rank must know of a sequence before its first slice. `output`: what of its tokens is output already.
    `end_ids`: the tokens that may not come before `sampling.min_tokens`."""

    seq_id: int
    sampling: SamplingParams
    seed: int
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    end_ids: frozenset[int] = frozenset()


class SeqSlice(NamedTuple):
    """One sequence's share of one step: run `token_ids` at positions start, start+1, ...

    `block_ids` covers every position up to the end of the slice (negative: its block is gone, and is not read).
    `sample`: the last token's logits yield
    the next token. `num_drafts` of the token_ids (at the end) are unverified drafts.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sample: bool
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Engine -> every rank, once per step. `finished` sequences are forgotten before the slices run.

    `moves` (host slot, slot on disk) come first of all. `stores` (device block, host slot) are read before anything
    else of this plan writes a block. `loads` (slot, device block) come after the stores, so that a slot may be stored
    and loaded by one plan; no slice of this plan touches a block being loaded, and every later plan may. A plan of
    copies alone has no slices.
    """

    step_id: int
    slices: tuple[SeqSlice, ...]
    new: tuple[NewSequence, ...] = ()
    finished: tuple[int, ...] = ()
    stores: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    moves: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices: what counts against the token budget."""
        return sum(len(s.token_ids) for s in self.slices)


class SliceResult(NamedTuple):
    """What one slice gave. `token_ids` is empty for a prompt chunk. `logprobs` aligns with token_ids when
    asked for. `prompt_logprobs[j]` is the logprob of prompt token start + j + 1 (the token *after* row j),
    for those rows whose next token is a prompt token; empty unless asked for. `drafts` are the proposer's
    guesses for the tokens after `token_ids`. `fault`: why this sequence cannot go on; then there are no tokens."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rank 0 -> engine. `slices` aligns with StepPlan.slices."""

    step_id: int
    slices: tuple[SliceResult, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's load and counters at one moment; the replica makes its load report and its metrics from it.

    `waiting` and `running` are sequences, `kv_blocks_*` and `host_blocks_*` are blocks; `pending_tokens` are to be
    prefilled before every live sequence decodes. All other counts run from the start:

    * `num_preemptions`; `num_swaps` of them kept their K/V in host memory, the others are recomputed.
    * `prompt_tokens`, and `cached_tokens` of them were found in the prefix cache, `host_hits` of those in host memory.
    * `kv_blocks_stored` were copied to host memory, `kv_blocks_spilled` of them because their prefix was evicted;
      `kv_blocks_loaded` came back. `kv_blocks_to_disk` and `kv_blocks_from_disk` went on and came back from there.
    * `num_arrived`: valid requests, whether there was room for them or not. `num_expired`: sequences that were ended
      because of their deadline.
    * `num_steps` took `step_s` seconds together. `num_prompt_steps` of them computed prompts or left some waiting;
      these took `prompt_step_s` seconds and computed `prompt_step_tokens` tokens of prompts.

    `shortest_step_s` is the quickest step that computed no prompt, None before there was one.
    """

    waiting: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    pending_tokens: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    num_swaps: int = 0
    num_expired: int = 0
    host_hits: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    kv_blocks_stored: int = 0
    kv_blocks_spilled: int = 0
    kv_blocks_loaded: int = 0
    kv_blocks_to_disk: int = 0
    kv_blocks_from_disk: int = 0
    num_arrived: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    shortest_step_s: float | None = None
    num_prompt_steps: int = 0
    prompt_step_s: float = 0.0
    prompt_step_tokens: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by live sequences, 0..1. Free cached blocks do not count."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    @property
    def host_kv_usage(self) -> float:
        """Share of host blocks held by preempted sequences, 0..1. Evicted prefixes kept there do not count."""
        return self.host_blocks_used / self.host_blocks_total if self.host_blocks_total else 0.0
