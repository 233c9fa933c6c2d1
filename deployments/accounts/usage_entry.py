"""One finished request as the ledger keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """`uid` is the gateway's own and unique: an entry that arrives twice counts once. `at`: when the request ended,
    seconds since 1970. `status`: what was sent, 499 when the client left early. Tokens are those that are charged."""

    uid: str
    at: float
    org: str
    project: str
    key_id: str
    model: str
    path: str
    request_id: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float

    @property
    def tokens(self) -> int:
        """What a budget is charged."""
        return self.prompt_tokens + self.completion_tokens
