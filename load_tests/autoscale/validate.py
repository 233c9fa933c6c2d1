"""Real against predicted, trace by trace. A run is one draw: whether a decision falls before or after some request
moves the next ones. So both sides are medians of several, with the least and the most beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from autoscaling.report.summary import summarise
from autoscaling.report.tables import markdown_table
from autoscaling.service_model import ServiceModel
from autoscaling.simulator.run import Setup, simulate
from autoscaling.spec import PolicySpec
from autoscaling.traces.trace import Trace, load_trace
from load_tests.autoscale.real import Measured, measure
from load_tests.autoscale.traffic import make_trace, within, write_trace
from load_tests.errors import LoadError

PROFILE: Mapping[str, Any] = {
    "base_s": 0.02,
    "prefill_token_s": 0.0002,
    "prefill_pair_s": 0.0,
    "decode_seq_s": 0.0015,
    "decode_context_s": 1e-7,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "kv_tokens": 160_000,
    "max_num_waiting": 4096,
    "about": "made up: a replica of it takes two requests a second and 30 steps, so that several fit two cores",
}
POLICY: Mapping[str, Any] = {
    "policy": "slo",
    "min_replicas": 1,
    "max_replicas": 5,
    "params": {"ttft_slo_s": 1.0, "startup_s": 8.0},
    "guardrails": {"downscale_window_s": 30.0, "downscale_cooldown_s": 5.0},
}
_MAX_PROMPT, _MAX_OUTPUT = 4000, 400
_CLOSE = 0.2
_SEEDS = 20


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """`ttft_*` in seconds at the client. `max_replicas` and `mean_replicas`: those that cost, starting and draining
    ones included."""

    ttft_p50_s: float
    ttft_p95_s: float
    slo_attainment: float
    mean_replicas: float
    max_replicas: float
    scale_events: float


def median(runs: Sequence[ScalingFigures]) -> ScalingFigures:
    return ScalingFigures(*(float(np.median([getattr(run, f.name) for run in runs])) for f in fields(ScalingFigures)))


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """`real` and `predicted`: run by run, and seed by seed. `off`: the median of the predicted over that of the
    real, less 1."""

    trace: str
    notes: tuple[str, ...]
    requests: int
    failed: int
    overhead_s: float
    startup_s: float
    server_cpu: float
    real: tuple[ScalingFigures, ...]
    predicted: tuple[ScalingFigures, ...]

    @property
    def off(self) -> dict[str, float]:
        names = ("ttft_p50_s", "ttft_p95_s", "mean_replicas", "max_replicas")
        real, predicted = median(self.real), median(self.predicted)
        return {n: getattr(predicted, n) / getattr(real, n) - 1 for n in names}

    @property
    def close(self) -> bool:
        return all(abs(value) <= _CLOSE for value in self.off.values())

    def as_dict(self) -> dict[str, Any]:
        medians = {"real_median": asdict(median(self.real)), "predicted_median": asdict(median(self.predicted))}
        return {**asdict(self), **medians, "off": self.off, "close": self.close}


def validate(
    traces: Sequence[str], seconds: float, rate: float, seed: int, repeat: int, say: Callable[[str], None]
) -> Iterator[TraceComparison]:
    """Each as soon as it is known: minutes apart. Raises LoadError."""
    made = [within(make_trace(name, seconds, rate, seed), _MAX_PROMPT, _MAX_OUTPUT) for name in traces]
    for trace in made:
        yield _one(trace, repeat, say)


def _one(trace: Trace, repeat: int, say: Callable[[str], None]) -> TraceComparison:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "trace.csv"
        write_trace(trace, file)
        played = load_trace(file)
        runs = for_real(trace, repeat, say, lambda: measure(trace, PROFILE, POLICY, Path(name), say))
    startups_s = [s for run in runs for s in run.startups_s] or [POLICY["params"]["startup_s"]]
    startup_s = float(np.mean(startups_s))
    predicted = [predict(played, run.overhead_s, startup_s, startups_s=run.startups_s) for run in runs]
    return comparison(trace, runs, startup_s, predicted, POLICY)


def for_real(trace: Trace, repeat: int, say: Callable[[str], None], run: Callable[[], Measured]) -> list[Measured]:
    """What `run` gives, so many times. Raises LoadError when nothing was answered."""
    runs = []
    for i in range(repeat):
        say(f"{trace.name}: {len(trace)} requests in {trace.duration_s:.0f} s, for real, {i + 1} of {repeat}")
        runs.append(run())
        if not runs[-1].ttft_s:
            raise LoadError(f"{trace.name}: no request was answered: {runs[-1].failed[:1]}")
    return runs


def comparison(
    trace: Trace,
    runs: Sequence[Measured],
    startup_s: float,
    predicted: Sequence[Sequence[ScalingFigures]],
    policy: Mapping[str, Any],
) -> TraceComparison:
    """`predicted`: of each run, with several seeds. `startup_s`: the mean."""
    return TraceComparison(
        trace.name,
        trace.notes,
        len(trace),
        sum(len(run.failed) for run in runs),
        float(np.mean([run.overhead_s for run in runs])),
        startup_s,
        sum(run.cpu_s for run in runs) / trace.duration_s / len(runs),
        tuple(seen(run, len(trace), policy) for run in runs),
        tuple(figures for seeds in predicted for figures in seeds),
    )


def seen(measured: Measured, requests: int, policy: Mapping[str, Any] = POLICY) -> ScalingFigures:
    ttft = np.array(measured.ttft_s)
    return ScalingFigures(
        float(np.quantile(ttft, 0.5)),
        float(np.quantile(ttft, 0.95)),
        float(np.count_nonzero(ttft <= policy["params"]["ttft_slo_s"])) / requests,
        float(np.mean(measured.replicas)),
        max(measured.replicas),
        len(measured.decisions),
    )


def predict(
    trace: Trace,
    overhead_s: float,
    startup_s: float,
    profile: Mapping[str, Any] = PROFILE,
    policy: Mapping[str, Any] = POLICY,
    startups_s: Sequence[float] = (),
) -> tuple[ScalingFigures, ...]:
    """Told the delays that were measured, and nothing else: what each start took, as far as known in turn, and
    `startup_s` beyond those. One for each seed."""
    model = ServiceModel.from_dict({**profile, "overhead_s": overhead_s, "startup_s": startup_s}, "profile")
    spec = PolicySpec.from_dict(policy, "policy")
    slo_s = policy["params"]["ttft_slo_s"]
    setups = [Setup(model, startups_s=tuple(startups_s), seed=seed) for seed in range(_SEEDS)]
    return tuple(_predicted(trace, spec, setup, slo_s) for setup in setups)


def _predicted(trace: Trace, spec: PolicySpec, setup: Setup, slo_s: float) -> ScalingFigures:
    outcome = simulate(trace, spec.controller(), setup)
    said = summarise(spec.label, outcome, slo_s)
    assert said.ttft_p50_s is not None and said.ttft_p95_s is not None
    return ScalingFigures(
        said.ttft_p50_s,
        said.ttft_p95_s,
        said.slo_attainment,
        outcome.replica_s / trace.duration_s,
        int(outcome.timeline.present.max()),
        said.scale_events,
    )


def markdown(results: Sequence[TraceComparison]) -> str:
    heads = ("trace", "requests", "", "TTFT p50", "p95", "SLO met", "mean replicas", "max", "changes")
    rows: list[tuple[str, ...]] = []
    for r in results:
        real = f"real, {len(r.real)} runs" if len(r.real) > 1 else "real"
        rows.append((r.trace, str(r.requests), real, *_cells(r.real)))
        rows.append(("", "", f"predicted, {len(r.predicted)} seeds", *_cells(r.predicted)))
        off = r.off
        cells = (f"{off['ttft_p50_s']:+.0%}", f"{off['ttft_p95_s']:+.0%}", "", f"{off['mean_replicas']:+.0%}")
        rows.append(("", "", "off", *cells, f"{off['max_replicas']:+.0%}", ""))
    return markdown_table(heads, rows)


_FORMATS = ("{:.3f} s", "{:.3f} s", "{:.1%}", "{:.2f}", "{:.1f}", "{:.1f}")


def _cells(runs: Sequence[ScalingFigures]) -> list[str]:
    """The median; of several the least and the most too."""
    cells = []
    for field, text in zip(fields(ScalingFigures), _FORMATS, strict=True):
        values = [getattr(run, field.name) for run in runs]
        low, high = (text.format(value).removesuffix(" s") for value in (min(values), max(values)))
        cells.append(text.format(np.median(values)) + (f" ({low} to {high})" if low != high else ""))
    return cells
