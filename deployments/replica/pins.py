"""Pinned prompts: they are in a replica's prefix cache before its first request, and stay there.

Organisations share no cached prefixes, so a prompt is computed and kept once for each organisation that is to have it,
with the salt that the gateway gives that organisation's requests.
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
    """An entry of pinned_prompts cannot be pinned. The message names it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One prompt, and the cache salts under which it is to be pinned."""

    prompt: PinnedPrompt
    salts: tuple[str, ...]


def pins_of(prompts: Sequence[PinnedPrompt], gateway: GatewayConfig) -> tuple[Pin, ...]:
    """The pins of all prompts. Raises ValueError for an API key that cannot be used."""
    return tuple(Pin(prompt, tuple(_salts(prompt, gateway))) for prompt in prompts)


def _salts(prompt: PinnedPrompt, gateway: GatewayConfig) -> Iterator[str]:
    orgs = prompt.orgs
    if orgs is None:
        orgs = StaticKeys(gateway.api_keys).orgs or (ANONYMOUS.org,)
    for org in orgs:
        yield cache_salt(org, prompt.cache_salt)


def pin_all(engine: Engine, pins: Sequence[Pin]) -> int:
    """Computes and pins all prompts. Returns how many tokens are pinned, counted once per salt. Raises PinError."""
    count = 0
    for i, pin in enumerate(pins):
        try:
            ids = prefix_ids(engine.text, pin.prompt)
            count += sum(preload(engine, ids, salt) for salt in pin.salts)
        except EngineError as error:
            raise PinError(f"pinned_prompts[{i}]: {error}") from error
    return count
