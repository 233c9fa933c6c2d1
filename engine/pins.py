"""Prefixes that are to be in the cache before anybody asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import InvalidRequestError
from engine.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


def check_length(num_tokens: int, block_size: int) -> None:
    """Check a prefix to pin. Raises InvalidRequestError for less than a block: nothing of it can be kept."""
    if num_tokens < block_size:
        raise InvalidRequestError(
            f"{num_tokens} tokens are less than a block of {block_size}: nothing to pin", "prompt"
        )


def preload(engine: Engine, token_ids: Sequence[int], salt: str = "") -> int:
    """Engine.pin(), and compute what is pinned now, as no request's work. For an engine that has no other work yet.
    Raises what pin(), add() and check_length() do."""
    check_length(len(token_ids), engine.config.block_size)
    count = engine.pin(token_ids, salt)
    try:
        whole = tuple(token_ids[:count])
        engine.add(GenerateRequest("preload", whole, SamplingParams(max_tokens=0), cache_salt=salt))
    except BaseException:
        engine.unpin(token_ids, salt)
        raise
    while engine.has_work:
        engine.step()
    engine.recorder.drain_finished()
    return count
