"""What became of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestOutcome:
    """Times are seconds of time.perf_counter(). `due`: when it should have been sent; latencies count from there, so
    that a late client never flatters the server. `events`: when text arrived; one event may carry several tokens.
    `end`: the last byte, or the failure. `phase`: its place in the scenario. `text` is kept only on demand."""

    due: float
    sent: float = 0.0
    end: float = 0.0
    events: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    phase: int = 0
    turn: int = 0
    text: list[str] | None = None

    @property
    def ttft_s(self) -> float:
        return self.events[0] - self.due

    @property
    def e2e_s(self) -> float:
        return self.end - self.due

    @property
    def tokens(self) -> int:
        """Output tokens. A server that reports no usage is taken to send one per event."""
        return len(self.events) if self.output_tokens is None else self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None when there is no second."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else None
