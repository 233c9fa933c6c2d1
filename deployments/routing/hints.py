"""What routing needs of a client's HTTP request beside the engine's requests that are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SESSION_HEADER = b"x-session-id"
_MAX_SESSION = 256  # characters; it is hashed for every request

# Request fields that only our own engine honours, and the ability that a destination needs for each.
_FIELDS = {
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "echo": "echo",
    "tools": "tools",
    "response_format": "json",
    "logit_bias": "token_ids",
    "stop_token_ids": "token_ids",
}


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """`path` and `fields` are sent to upstreams: the path behind /v1, and those fields of the client's body that are
    understood here.

    Requests of the same `session` belong together.
    """

    path: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    tier: str = "default"
    session: str | None = None

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that a destination must have. Plain text in and out needs none."""
        needs = {ability for name, ability in _FIELDS.items() if self.fields.get(name) not in (None, False, [], {})}
        if self.fields.get("response_format") == {"type": "text"}:
            needs.discard("json")
        if not _is_text(self.fields.get("prompt")):
            needs.add("token_ids")
        return frozenset(needs)


def session_of(headers: list[tuple[bytes, bytes]], fields: Mapping[str, Any]) -> str | None:
    """The session: the header X-Session-Id, or the body's `prompt_cache_key` or `user`. None without any of them."""
    for name, raw in headers:
        if name == _SESSION_HEADER and 0 < len(raw) <= _MAX_SESSION:
            return raw.decode("latin-1")
    for key in ("prompt_cache_key", "user"):
        if isinstance(value := fields.get(key), str) and value:
            return value[:_MAX_SESSION]
    return None


def _is_text(prompt: Any) -> bool:
    return prompt is None or isinstance(prompt, str) or all(isinstance(item, str) for item in prompt)
