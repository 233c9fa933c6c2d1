"""One record per finished HTTP request, and the notes it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.types import Timings

CLIENT_GONE = 499  # the status in logs and metrics of an answer nobody waited for


@dataclass(frozen=True, slots=True)
class RequestLog:
    """What became of one HTTP request. `number` is no other request's of this process. Times in seconds. `model` is
    None unless it is one that is served, so that it is safe as a metric label. `status` is what was sent, 499 when the
    client left early; a stream that broke after its 200 has `error`. `tenant` is the id of the key, of `project` of
    `org`. `ttft_s` counts from the request's arrival to the first delta, and `parts_s` splits that time; `queue_s`,
    `prefill_s` and `decode_s` are the engine's own, of the slowest choice."""

    number: int
    request_id: str
    method: str
    path: str
    status: int
    tenant: str | None
    org: str | None
    project: str | None
    model: str | None
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]
    error: str | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    total_s: float
    parts_s: dict[str, float]


@dataclass(slots=True)
class RequestTrace:
    """The record of a request in progress. RequestMiddleware makes it and logs it; the endpoint fills it in."""

    number: int
    request_id: str
    method: str
    path: str
    started_s: float
    marked_s: float
    status: int = 0
    tenant: str | None = None
    org: str | None = None
    project: str | None = None
    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    usage: Callable[[], tuple[int, int]] = lambda: (0, 0)  # cached tokens and completion tokens so far
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None
    timings: Timings | None = None
    ttft_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)  # for the answer, whatever it is
    parts_s: dict[str, float] = field(default_factory=dict)

    def mark(self, part: str, now_s: float) -> None:
        """The time since the last mark was spent on `part`."""
        self.parts_s[part] = now_s - self.marked_s
        self.marked_s = now_s

    def known_parts_s(self) -> dict[str, float]:
        """`parts_s`, and what the engine says of its part of them: queue and prefill."""
        if self.timings is None:
            return self.parts_s
        return self.parts_s | {"queue": self.timings.queue_s, "prefill": self.timings.prefill_s}

    def record(self, now_s: float) -> RequestLog:
        """What the log keeps of the request, which ends at `now_s`. Of one that still runs: as far as it has come."""
        timings = self.timings
        cached_tokens, completion_tokens = self.usage()
        return RequestLog(
            number=self.number,
            request_id=self.request_id,
            method=self.method,
            path=self.path,
            status=self.status,
            tenant=self.tenant,
            org=self.org,
            project=self.project,
            model=self.model,
            stream=self.stream,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            finish_reasons=self.finish_reasons,
            error=self.error,
            queue_s=None if timings is None else timings.queue_s,
            prefill_s=None if timings is None else timings.prefill_s,
            decode_s=None if timings is None else timings.decode_s,
            ttft_s=self.ttft_s,
            total_s=now_s - self.started_s,
            parts_s=self.parts_s,
        )
