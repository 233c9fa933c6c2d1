"""What `sluice bench` runs: one phase, from a few numbers instead of a scenario file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from load_tests.arrivals import Closed, Poisson
from load_tests.errors import LoadError
from load_tests.lengths import Fixed
from load_tests.runner import Progress, Target, run
from load_tests.scenario import Phase, Scenario
from load_tests.stats import Summary, summarize

__all__ = ["BenchConfig", "LoadError", "as_json", "bench"]


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


def scenario_of(config: BenchConfig) -> Scenario:
    closed = Closed(kind="closed", concurrency=config.concurrency)
    phase = Phase(
        name="bench",
        arrivals=closed if config.rate is None else Poisson(kind="poisson", rate=config.rate),
        prompt=Fixed(kind="fixed", tokens=config.prompt_tokens),
        output=Fixed(kind="fixed", tokens=config.output_tokens),
        requests=config.requests,
    )
    return Scenario(name="bench", seed=config.seed, timeout_s=config.timeout_s, phases=[phase])


async def bench(config: BenchConfig, progress: Progress) -> tuple[str, Summary]:
    """The model measured and what it did. Raises LoadError when not even a first request works."""
    target = Target(config.base_url, config.model, config.api_key)
    done = await run(scenario_of(config), target, progress)
    return done.model, summarize(done.outcomes)


def as_json(config: BenchConfig, model: str, summary: Summary) -> dict[str, Any]:
    """What --json writes. The key stays out of it."""
    return {"config": asdict(config) | {"api_key": None, "model": model}, **asdict(summary)}
