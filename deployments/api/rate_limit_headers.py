"""How limits are told to clients: the x-ratelimit headers and the 429s, in OpenAI's words and formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deployments.api.errors import ApiError, retry_after
from deployments.limits.base import LimitKind, LimitState, Refusal

_PER = {
    LimitKind.REQUESTS: "requests per min (RPM)",
    LimitKind.TOKENS: "tokens per min (TPM)",
    LimitKind.CONCURRENT: "concurrent sequences",
}
_TOO_LARGE = {
    LimitKind.REQUESTS: "The number of requests",
    LimitKind.TOKENS: "The input or output tokens",
    LimitKind.CONCURRENT: "The number of prompts or choices ('n')",
}
_TYPE = {LimitKind.REQUESTS: "requests", LimitKind.TOKENS: "tokens", LimitKind.CONCURRENT: "requests"}


def duration(seconds: float) -> str:
    """`20ms`, `1s`, `6m0s`, `7m12.5s`; rounded up to milliseconds."""
    ms = math.ceil(round(seconds * 1000, 3))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{shown}s" if minutes else f"{shown}s"


def headers(states: Sequence[LimitState]) -> dict[str, str]:
    """Of requests and of tokens the limit with the least left. Kinds that have no limit have no headers."""
    found = {}
    for kind in (LimitKind.REQUESTS, LimitKind.TOKENS):
        of_kind = [state for state in states if state.limit.kind is kind]
        if of_kind:
            tightest = min(of_kind, key=lambda state: (state.remaining, state.limit.maximum))
            found[f"x-ratelimit-limit-{kind}"] = str(tightest.limit.maximum)
            found[f"x-ratelimit-remaining-{kind}"] = str(tightest.remaining)
            found[f"x-ratelimit-reset-{kind}"] = duration(tightest.reset_s)
    return found


def too_many(refusal: Refusal, model: str) -> ApiError:
    """The 429. Retrying what can never fit is advised against."""
    state, wait_s = refusal.state, refusal.retry_after_s
    limit = state.limit
    where = f"for {model} in {limit.subject} on {_PER[limit.kind]}"
    if wait_s is None:
        message = (
            f"Request too large {where}: Limit {limit.maximum}, Requested {refusal.requested}. "
            f"{_TOO_LARGE[limit.kind]} must be reduced in order to run successfully."
        )
        return ApiError(429, message, _TYPE[limit.kind], None, "rate_limit_exceeded", {"x-should-retry": "false"})
    message = (
        f"Rate limit reached {where}: Limit {limit.maximum}, Used {state.used}, Requested {refusal.requested}. "
        f"Please try again in {duration(wait_s)}."
    )
    return ApiError(429, message, _TYPE[limit.kind], None, "rate_limit_exceeded", retry_after(wait_s))
