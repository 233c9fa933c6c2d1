"""What has been generated for a request so far: which choices have ended, how, after how many tokens."""

from __future__ import annotations

from typing import Any

from deployments.api.errors import cut_short, internal
from deployments.api.requests import PreparedRequest
from engine.types import FinishReason, Timings, TokenDelta

FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class GenerationProgress:
    """Fed every delta of one request, in order."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._n = prepared.n
        self._request_index = {request.request_id: i for i, request in enumerate(prepared.requests)}
        self._completion = [0] * (prepared.n * len(prepared.requests))
        self._cached = [0] * len(prepared.requests)
        self._reasons: list[str | None] = [None] * len(self._completion)
        self._open = len(self._completion)
        self.prompt_tokens = sum(len(request.prompt) for request in prepared.requests)
        self.timings: Timings | None = None

    def add(self, delta: TokenDelta) -> int:
        """The delta's choice, counted over all of its requests. Raises ApiError when the engine gave the choice up."""
        request = self._request_index[delta.request_id]
        choice = request * self._n + delta.index
        self._completion[choice] = delta.num_completion_tokens
        self._cached[request] = delta.num_cached_tokens
        if delta.timings is not None:
            self.timings = _slower(self.timings, delta.timings)
        match delta.finish_reason:
            case None:
                return choice
            case FinishReason.ERROR | FinishReason.FAULT:
                raise internal()
            case FinishReason.ABORT:
                raise cut_short()
        self._reasons[choice] = FINISH[delta.finish_reason]
        self._open -= 1
        return choice

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return self._open <= 0

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, those that were found in a prefix cache."""
        return sum(self._cached)

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(self._completion)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of the choices that have ended, in OpenAI's words."""
        return tuple(reason for reason in self._reasons if reason is not None)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once, whatever its number of choices."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def _slower(a: Timings | None, b: Timings) -> Timings:
    return b if a is None or b.queue_s + b.prefill_s + b.decode_s > a.queue_s + a.prefill_s + a.decode_s else a
