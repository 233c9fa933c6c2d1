"""Signals of made-up pools, and what of Serve the adapter sees."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

from autoscaling.base import ReplicaSample, Signals, pool_signals


def sample(at_s: float = 0.0, **known: float | None) -> ReplicaSample:
    calm = {
        "waiting": 0.0, "running": 4.0, "pending_tokens": 0.0, "backlog_s": 0.0, "utilisation": 0.35,
        "seats_used": 0.1, "kv_usage": 0.1, "arrival_rate": 5.0, "ttft_p50_s": 0.1, "ttft_p95_s": 0.3,
        "itl_p95_s": 0.02, "startup_s": 30.0,
    }  # fmt: skip
    return ReplicaSample(at_s, **{**calm, **known})


def pool(replicas: int, now_s: float = 0.0, target: int | None = None, **known: Any) -> Signals:
    """`replicas` that all report the same, as `sample` has it."""
    extra = {name: known.pop(name) for name in ("starting", "queued", "silent") if name in known}
    return pool_signals(
        [sample(now_s, **known) for _ in range(replicas)],
        now_s,
        serving=replicas,
        target=replicas if target is None else target,
        **{"starting": 0, **extra},
    )


class Inline(Executor):
    """Thinks at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Id(NamedTuple):
    unique_id: str


class Point(NamedTuple):
    timestamp: float
    value: Any
