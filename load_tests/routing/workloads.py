"""What is asked of the simulated pool. Synthetic calls are drawn from a generator; recorded ones are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from autoscaling.traces.formats import MOONCAKE_BLOCK_TOKENS, read_trace

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `keys` name its prompt's full blocks, in order: calls share a prefix as far as their keys agree."""

    at_s: float
    keys: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RoutingWorkload:
    """`block_tokens` is what one key stands for. Calls are in order of time."""

    name: str
    calls: Sequence[Call]
    block_tokens: int = _BLOCK


def shared_prefixes(
    rng: random.Random, *, calls: int = 2000, groups: int = 40, prefix: int = 1024, own: int = 128, rate: float = 40.0
) -> RoutingWorkload:
    """`groups` system prompts of `prefix` tokens, some far more popular than others, each followed by a text of its
    own; Poisson arrivals."""
    popularity = [1 / (i + 1) ** 0.8 for i in range(groups)]
    picks = rng.choices(range(groups), popularity, k=calls)
    times = _poisson(rng, rate, calls)
    return RoutingWorkload(
        "shared prefixes",
        [_call(at, f"group {g}", prefix, i, own, rng) for i, (at, g) in enumerate(zip(times, picks, strict=True))],
    )


def nothing_shared(
    rng: random.Random, *, calls: int = 2000, shortest: int = 64, longest: int = 2048, rate: float = 40.0
) -> RoutingWorkload:
    """Prompts of very different lengths that have nothing in common."""
    lengths = [rng.randint(shortest, longest) for _ in range(calls)]
    times = _poisson(rng, rate, calls)
    return RoutingWorkload(
        "nothing shared",
        [_call(at, f"call {i}", n, i, 0, rng) for i, (at, n) in enumerate(zip(times, lengths, strict=True))],
    )


def burst(size: int = 32, prompt: int = 2048, output: int = 64) -> RoutingWorkload:
    """The same prompt `size` times in the same instant."""
    keys = tuple(_key("burst", i) for i in range((prompt - 1) // _BLOCK))
    return RoutingWorkload("burst", [Call(0.0, keys, prompt, output)] * size)


def hot_prefix(
    rng: random.Random, *, calls: int = 400, prefix: int = 500, own: int = 64, rate: float, share: float = 0.9
) -> RoutingWorkload:
    """Most calls begin alike, the others with nothing in common."""
    made = []
    for i, at in enumerate(_poisson(rng, rate, calls)):
        common = rng.random() < share
        made.append(_call(at, "common" if common else f"call {i}", prefix, i, own, rng))
    return RoutingWorkload("hot prefix", made)


def mooncake(path: Path, *, speed: float = 1.0, calls: int | None = None) -> RoutingWorkload:
    """Recorded traffic whose hash ids say which blocks are shared, `speed` times as fast. Raises TraceError."""
    rows = read_trace(path)[:calls]
    return RoutingWorkload(
        "Mooncake trace",
        [
            Call(r.at_s / speed, tuple(b.to_bytes(8, "big") for b in full), r.prompt_tokens, r.output_tokens)
            for r in rows
            for full in [r.blocks[: (r.prompt_tokens - 1) // MOONCAKE_BLOCK_TOKENS]]
        ],
        MOONCAKE_BLOCK_TOKENS,
    )


def _call(at_s: float, common: str, prefix: int, number: int, own: int, rng: random.Random) -> Call:
    shared = prefix // _BLOCK
    blocks = (prefix + own - 1) // _BLOCK
    keys = tuple(_key(common, i) if i < shared else _key(f"{common} {number}", i) for i in range(blocks))
    return Call(at_s, keys, prefix + own, rng.randint(16, 128))


def _key(name: str, block: int) -> bytes:
    return f"{name} {block}".encode()


def _poisson(rng: random.Random, rate: float, calls: int) -> list[float]:
    return list(accumulate(rng.expovariate(rate) for _ in range(calls)))
