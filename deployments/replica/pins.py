"""Prompts that are in the prefix cache of a replica before its first request, and stay there.

Organisations share no cache, so a prompt is computed and kept once for each that is to have it: under the very salt
that the gateway gives that organisation's requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import ANONYMOUS, cache_salt
from deployments.config.gateway import GatewayConfig
from deployments.config.pinned_prompts import PinnedPrompt, prefix_ids
from engine.engine import Engine
from engine.errors import EngineError
from engine.pins import preload


class PinError(ValueError):
    """Names the entry of pinned_prompts that cannot be pinned."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One prompt and the salts of those that are to have it."""

    prompt: PinnedPrompt
    salts: tuple[str, ...]


def pins_of(prompts: Sequence[PinnedPrompt], gateway: GatewayConfig) -> tuple[Pin, ...]:
    """Raises ValueError for an API key that cannot be used."""
    return tuple(Pin(prompt, tuple(_salts(prompt, gateway))) for prompt in prompts)


def _salts(prompt: PinnedPrompt, gateway: GatewayConfig) -> Iterator[str]:
    orgs = prompt.orgs
    if orgs is None:
        orgs = StaticKeys(gateway.api_keys).orgs or (ANONYMOUS.org,)
    for org in orgs:
        yield cache_salt(org, prompt.cache_salt)


def pin_all(engine: Engine, pins: Sequence[Pin]) -> int:
    """Returns how many tokens are pinned, counted once for each salt. Raises PinError."""
    count = 0
    for i, pin in enumerate(pins):
        try:
            ids = prefix_ids(engine.text, pin.prompt)
            count += sum(preload(engine, ids, salt) for salt in pin.salts)
        except EngineError as error:
            raise PinError(f"pinned_prompts[{i}]: {error}") from error
    return count
