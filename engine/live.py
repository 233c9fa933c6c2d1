"""What the engine remembers of a request between its acceptance and its last delta."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.stats import FinishedRequest
from engine.text.output import TextStream
from engine.types import FinishReason, GenerateRequest, Sequence, Timings, TokenDelta, TokenLogprob

_SEVERITY = tuple(FinishReason)  # the worst last


@dataclass(slots=True)
class LiveChoice:
    """One sequence's output side."""

    seq: Sequence
    text: TextStream
    num_completion: int = 0
    last_token_s: float | None = None

    def timings(self, arrival_s: float, now_s: float) -> Timings:
        """Where the choice's time went until now, in seconds."""
        scheduled = self.seq.first_scheduled_s if self.seq.first_scheduled_s is not None else now_s
        first = self.seq.first_token_s if self.seq.first_token_s is not None else now_s
        return Timings(scheduled - arrival_s, first - scheduled, now_s - first, self.seq.num_preemptions)


@dataclass(slots=True)
class LiveRequest:
    """One accepted request until its last choice has ended. `choices`: the unfinished ones, by seq_id."""

    request: GenerateRequest
    arrival_s: float
    choices: dict[int, LiveChoice] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    worst: FinishReason = FinishReason.STOP
    num_completion: int = 0
    num_cached: int = 0
    first_token_s: float | None = None
    timings: Timings = field(default_factory=Timings)

    def delta(
        self,
        choice: LiveChoice,
        tokens: tuple[int, ...],
        reason: FinishReason | None = None,
        error: str | None = None,
        timings: Timings | None = None,
    ) -> TokenDelta:
        """Takes the choice's releasable text. The first delta of choice 0 carries the prompt's logprobs."""
        text, logprobs = choice.text.take()
        first = choice.seq.index == 0 and choice.num_completion == len(tokens)
        return TokenDelta(
            request_id=self.request.request_id,
            index=choice.seq.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if first else (),
            finish_reason=reason,
            error=error,
            num_prompt_tokens=self.request.num_prompt,
            num_cached_tokens=self.num_cached,
            num_completion_tokens=choice.num_completion,
            timings=timings,
        )

    def close(self, choice: LiveChoice, reason: FinishReason, timings: Timings) -> bool:
        """Forget an ended choice. True: it was the last one."""
        del self.choices[choice.seq.seq_id]
        self.worst = max(self.worst, reason, key=_SEVERITY.index)
        if choice.seq.index == 0:
            self.timings = timings
        return not self.choices

    def record(self, now_s: float) -> FinishedRequest:
        """The request's summary, made when its last choice has ended."""
        return FinishedRequest(
            request_id=self.request.request_id,
            reason=self.worst,
            num_prompt_tokens=self.request.num_prompt,
            num_cached_tokens=self.num_cached,
            num_completion_tokens=self.num_completion,
            e2e_s=now_s - self.arrival_s,
            ttft_s=self.first_token_s - self.arrival_s if self.first_token_s is not None else None,
            timings=self.timings,
        )
