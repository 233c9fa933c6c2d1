"""Runs a workload against an endpoint: closed loop (a fixed number at a time) or open loop (a fixed rate)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from load_tests.bench.client import Endpoint, Outcome, v1
from load_tests.bench.stats import Summary, summarize
from load_tests.bench.workload import poisson_arrivals, prompt, words_for

_SAMPLE_WORDS = 200
_TICK_S = 1.0

Progress = Callable[[int, int, float], None]  # requests ended, requests in all, output tokens per second so far


class BenchError(Exception):
    """The endpoint cannot be measured. The message is one line."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """`rate` None is the closed loop with `concurrency` requests at a time; otherwise requests are sent at Poisson
    times, `rate` per second, however slow the answers are. `model` None takes the first the server lists."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    requests: int = 32
    prompt_tokens: int = 256
    output_tokens: int = 64
    rate: float | None = None
    seed: int = 0
    timeout_s: float = 600.0


async def bench(config: BenchConfig, progress: Progress) -> tuple[str, Summary]:
    """The model measured and what it did. Raises BenchError when not even a first request works."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model = config.model or await first_model(session, config.base_url)
        endpoint = Endpoint(session, config.base_url, model, config.timeout_s)
        rng = random.Random(config.seed)
        probe = await endpoint.negotiate(prompt(rng, min(_SAMPLE_WORDS, config.prompt_tokens)))
        if probe.error is not None:
            raise BenchError(f"{config.base_url}: the first request failed: {probe.error}")
        words = words_for(config.prompt_tokens, min(_SAMPLE_WORDS, config.prompt_tokens), probe.prompt_tokens)
        prompts = [prompt(rng, words) for _ in range(config.requests)]
        outcomes: list[Outcome] = []
        ticker = asyncio.create_task(_report(outcomes, config.requests, progress))
        try:
            if config.rate is None:
                await _closed_loop(endpoint, config, prompts, outcomes)
            else:
                due = list(poisson_arrivals(rng, config.rate, config.requests))
                await _open_loop(endpoint, config, prompts, due, outcomes)
        finally:
            ticker.cancel()
        return model, summarize(outcomes)


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """Raises BenchError."""
    url = f"{v1(base_url)}/models"
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                raise BenchError(f"{url} answers {answer.status}")
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError(f"{url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url} lists no model") from None


async def _closed_loop(
    endpoint: Endpoint, config: BenchConfig, prompts: Sequence[str], outcomes: list[Outcome]
) -> None:
    todo = iter(prompts)

    async def client() -> None:
        for text in todo:
            outcomes.append(await endpoint.complete(text, config.output_tokens, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(config.concurrency, len(prompts))):
            group.create_task(client())


async def _open_loop(
    endpoint: Endpoint, config: BenchConfig, prompts: Sequence[str], due: Sequence[float], outcomes: list[Outcome]
) -> None:
    start = time.perf_counter()

    async def one(text: str, at: float) -> None:
        outcomes.append(await endpoint.complete(text, config.output_tokens, at))

    async with asyncio.TaskGroup() as group:
        for text, offset in zip(prompts, due, strict=True):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            group.create_task(one(text, start + offset))


async def _report(outcomes: Sequence[Outcome], total: int, progress: Progress) -> None:
    start = time.perf_counter()
    while True:
        await asyncio.sleep(_TICK_S)
        tokens = sum(o.output_tokens or len(o.events) for o in outcomes)
        progress(len(outcomes), total, tokens / (time.perf_counter() - start))


def as_json(config: BenchConfig, model: str, summary: Summary) -> dict[str, Any]:
    """What --json writes. The key stays out of it."""
    return {"config": asdict(config) | {"api_key": None, "model": model}, **asdict(summary)}
