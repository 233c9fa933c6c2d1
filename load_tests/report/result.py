"""A finished run as plain data: what result.json holds and what the other reports are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from load_tests.outcome import RequestOutcome
from load_tests.runner import Run
from load_tests.stats import Summary, summarize


@dataclass(frozen=True, slots=True)
class Result:
    """`total`: over the measured phases. `phases`: by name, each with the requests due in it."""

    total: Summary
    phases: dict[str, Summary]


def result_of(run: Run) -> Result:
    slo = run.scenario.slo
    by_phase: list[list[RequestOutcome]] = [[] for _ in run.phases]
    for outcome in run.outcomes:
        by_phase[outcome.phase].append(outcome)
    return Result(
        total=summarize(measured(run), slo),
        phases={phase.name: summarize(own, slo) for phase, own in zip(run.phases, by_phase, strict=True)},
    )


def measured(run: Run) -> list[RequestOutcome]:
    return [o for o in run.outcomes if run.phases[o.phase].measured]


def cpu_us_per_token(run: Run) -> float:
    """What the generator itself costs: process CPU time over all output tokens, warm-up included."""
    return run.cpu_s * 1e6 / max(1, sum(o.tokens for o in run.outcomes))


def as_json(run: Run, result: Result) -> dict[str, Any]:
    """No key is in it."""
    return {
        "scenario": run.scenario.model_dump(mode="json"),
        "base_url": run.base_url,
        "model": run.model,
        "started_at": datetime.fromtimestamp(run.started_at, UTC).isoformat(timespec="seconds"),
        "prompts": asdict(run.form),
        "generator": {"cpu_s": round(run.cpu_s, 3), "cpu_us_per_token": round(cpu_us_per_token(run), 1)},
        "total": asdict(result.total),
        "phases": {name: asdict(summary) for name, summary in result.phases.items()},
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """One object per request, by due time; times in seconds from the start of the first phase."""
    start = run.phases[0].start if run.phases else 0.0
    for o in sorted(run.outcomes, key=lambda o: o.due):
        tpot = o.tpot_s if o.events else None
        yield {
            "phase": run.phases[o.phase].name,
            "turn": o.turn,
            "due_s": round(o.due - start, 5),
            "sent_s": round(o.sent - start, 5),
            "ttft_ms": round(o.ttft_s * 1000, 2) if o.events else None,
            "tpot_ms": round(tpot * 1000, 2) if tpot is not None else None,
            "e2e_ms": round(o.e2e_s * 1000, 2),
            "prompt_tokens": o.prompt_tokens,
            "cached_tokens": o.cached_tokens,
            "output_tokens": o.tokens,
            "error": o.error,
        }
