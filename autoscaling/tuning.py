"""A search of a policy's settings for those that hold the SLO at the least cost, by optuna."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from autoscaling.report.summary import Summary, summarise
from autoscaling.settings import PolicyError
from autoscaling.simulator.run import Setup, simulate
from autoscaling.spec import PolicySpec
from autoscaling.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, by ratio if `log`."""

    low: float
    high: float
    log: bool = False


SPACES: dict[str, dict[str, Range]] = {
    "slo": {
        "utilisation": Range(0.4, 0.9),
        "growth_quantile": Range(0.8, 1.0),
        "clear_s": Range(5.0, 120.0, log=True),
    },
    "queue_depth": {"waiting_per_replica": Range(0.5, 64.0, log=True), "seats_share": Range(0.1, 0.95)},
    "ongoing": {
        "target_ongoing_requests": Range(1.0, 512.0, log=True),
        "upscale_delay_s": Range(0.0, 60.0),
        "downscale_delay_s": Range(30.0, 900.0, log=True),
    },
    "predictive": {"utilisation": Range(0.4, 0.9), "headroom": Range(0.0, 0.5)},
}
GUARDRAILS = {"downscale_window_s": Range(30.0, 1200.0, log=True)}  # for policies that heed them


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were tried, and what a simulation with them gave."""

    spec: PolicySpec
    summary: Summary


def tune(
    spec: PolicySpec,
    trace: Trace,
    setup: Setup,
    ttft_slo_s: float,
    trials: int,
    on_trial: Callable[[int, Sequence[Trial]], None] | None = None,
) -> tuple[Trial, ...]:
    """Every set of settings tried that no other beats in both attainment and replica-hours, the cheapest first.
    The first trial is `spec` as it is. Raises PolicyError."""
    import optuna

    if spec.policy not in SPACES:
        raise PolicyError(f"policy: {spec.policy} has no settings to search; those that have: {', '.join(SPACES)}")
    raw = spec.policy == "ongoing"
    ranges = SPACES[spec.policy] | ({} if raw else GUARDRAILS)
    done: list[Trial] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        drawn = {name: trial.suggest_float(name, r.low, r.high, log=r.log) for name, r in ranges.items()}
        drawn = {name: float(f"{value:.4g}") for name, value in drawn.items()}
        own = {name: value for name, value in drawn.items() if name not in GUARDRAILS}
        guard: dict[str, Any] = {name: value for name, value in drawn.items() if name in GUARDRAILS}
        tried = replace(
            spec.with_params(f"{spec.label} #{trial.number}", **own), guardrails=replace(spec.guardrails, **guard)
        )
        summary = summarise(tried.label, simulate(trace, tried.controller(), setup), ttft_slo_s)
        done.append(Trial(tried, summary))
        if on_trial:
            on_trial(len(done), done)
        return summary.slo_attainment, summary.replica_hours

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=setup.seed, n_startup_trials=max(5, trials // 4))
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    settings = asdict(spec.params) | asdict(spec.guardrails)
    study.enqueue_trial({name: min(r.high, max(r.low, settings[name])) for name, r in ranges.items()})
    study.optimize(objective, n_trials=trials)
    return pareto(done)


def pareto(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Those that no other beats, the cheapest first."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.summary.replica_hours, -t.summary.slo_attainment)):
        if not best or trial.summary.slo_attainment > best[-1].summary.slo_attainment:
            best.append(trial)
    return tuple(best)


def as_yaml(spec: PolicySpec) -> str:
    """A file for `--policy`: all settings, so that later defaults do not change what was found."""
    given: dict[str, Any] = {
        "policy": spec.policy,
        "params": asdict(spec.params),
        "guardrails": asdict(spec.guardrails),
    }
    return yaml.safe_dump(given, sort_keys=False)
