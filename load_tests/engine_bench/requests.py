"""Requests of random tokens, and what is read off their times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.stats import nearest_rank
from engine.types import GenerateRequest, SamplingParams


def request(name: str, prompt: int, output: int, rng: random.Random, vocab: int, priority: int = 0) -> GenerateRequest:
    ids = tuple(rng.randrange(vocab) for _ in range(prompt))
    return GenerateRequest(name, ids, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), priority)


def p95(values: Sequence[float]) -> float:
    """0 of nothing."""
    return nearest_rank(sorted(values), 0.95) if values else 0.0
