"""The class that Ray Serve's controller calls for one pool: policies of this package in an `autoscaling_config`.

Serve calls it ten times a second, from the loop that also deploys, watches and routes for every application. So it
never raises, and thinks on a thread of its own: what it decides counts at the next call.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoscaling.base import Decision, Signals
from autoscaling.budget import BudgetTerms, PoolWish, SharedBudget, shared_budget
from autoscaling.controller import Controller
from autoscaling.decision_log import DecisionLog
from autoscaling.pool_watch import PoolWatch, Raw
from autoscaling.spec import PolicySpec

_EVERY_S = 1.0  # between decisions: replicas report every half second
_STUCK_S = 30.0  # a policy that thinks for longer is a fault


class ServePolicy:
    """`policy`: a mapping as in a policy's YAML file, see autoscaling.spec. One that is no such mapping, or a policy
    that fails, keeps the replicas there are; what is wrong stands in the log of decisions."""

    def __init__(
        self,
        pool: str,
        policy: Mapping[str, Any],
        budget: Mapping[str, Any] | None = None,
        *,
        executor: Executor | None = None,
        logs: Path | None = None,
    ) -> None:
        """Serve gives the first three. `budget`: the GPUs that it shares with the application's other pools, see
        autoscaling.budget.BudgetTerms. The others are for those who make it themselves: where to think, and in what
        directory to log (None: nowhere)."""
        self._pool = pool
        self._watch = PoolWatch()
        self._executor = executor or ThreadPoolExecutor(1, "autoscaling")
        self._thinking: Future[tuple[Signals, Decision]] | None = None
        self._began_s = 0.0
        self._now_s = 0.0
        self._decided: int | None = None
        self._fault: str | None = None
        self._logs = logs
        self._log: DecisionLog | None = None
        self._metrics: _Metrics | None = None
        self._controller: Controller | None = None
        self._member: _BudgetMember | None = None
        try:
            spec = PolicySpec.from_dict(policy, pool)
            if budget is not None:
                self._member = _BudgetMember(
                    pool, BudgetTerms.from_dict(budget, "budget"), spec.guardrails.min_replicas
                )
            self._controller = spec.controller()
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")

    @property
    def fault(self) -> str | None:
        """Why it keeps the number of replicas as it is, as in the log; None while it decides."""
        return self._fault

    @property
    def shares_budget(self) -> bool:
        """Whether other pools may have the GPUs that this one does not need."""
        return self._member is not None

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """`ctx`: Serve's AutoscalingContext. The number of replicas, and no state: that is here."""
        try:
            return self._target(ctx), {}
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")
            return ctx.target_num_replicas, {}

    def _target(self, ctx: Any) -> int:
        target: int = ctx.target_num_replicas
        if self._controller is None:
            return target
        now_s = self._now_s = max(self._now_s, ctx.current_time or time.time())
        if self._member is not None:
            self._member.update(ctx.app_name, target, now_s)
        if self._thinking is not None:
            if not self._thinking.done():
                if now_s - self._began_s > _STUCK_S:
                    self._complain(f"the policy has not answered for {_STUCK_S:.0f} s")
                return target
            signals, decision = self._thinking.result()
            self._thinking, self._decided = None, decision.target
            if signals.target != target:  # changed meanwhile, as when requests have woken the pool
                return target
            if self._member is not None:
                decision = self._member.limited(decision, now_s)
            self._note(signals, decision, now_s)
            return decision.target
        if now_s - self._began_s >= _EVERY_S - 0.05:  # Serve's calls are a tenth of a second apart
            self._began_s = now_s
            replicas = [replica.unique_id for replica in ctx.running_replicas]
            queued = float(ctx.total_queued_requests or 0.0)
            raw, last_up_s = _by_id(ctx.raw_metrics or {}), ctx.last_scale_up_time
            signals = self._watch.signals(now_s, raw, replicas, target, queued, last_up_s)
            if self._decided == 0 and target > 0:  # not by us
                self._decided = target
                self._note(replace(signals, target=0), Decision(target, None, "woken"), now_s)
            if self._watch.awaits_first(now_s):
                return target
            self._thinking = self._executor.submit(_decide, self._controller, signals, now_s)
        return target

    def _note(self, signals: Signals, decision: Decision, now_s: float) -> None:
        if self._log is None:
            self._log = DecisionLog(self._pool, _log_file(self._logs, self._pool))
            self._metrics = _Metrics(self._pool)
        self._log.write(signals, decision, now_s)
        if self._metrics is not None:
            self._metrics.write(signals, decision)

    def _complain(self, fault: str) -> None:
        """Once about each fault in turn."""
        if fault != self._fault:
            self._fault = fault
            logging.getLogger("ray.serve").error("autoscaling of %s keeps its replicas: %s", self._pool, fault)


class _BudgetMember:
    """One pool of those that share their application's budget."""

    def __init__(self, pool: str, terms: BudgetTerms, min_replicas: int) -> None:
        self._terms = terms
        self._wish = PoolWish(pool, 0, min_replicas, terms.gpus_per_replica, terms.priority)
        self._budget: SharedBudget | None = None

    def update(self, app: str, target: int, now_s: float) -> None:
        """Tells the budget what the pool wishes for. That includes replicas which the pool has although its policy
        never asked for them: those of its start, and the one that waiting requests have woken."""
        if self._budget is None:
            self._budget = shared_budget(app)
        if target > self._wish.wanted:
            self._wish = replace(self._wish, wanted=target)
        self._budget.update(self, self._wish, now_s)

    def limited(self, decision: Decision, now_s: float) -> Decision:
        """The decision, or as much of it as the budget allows. To be called after update()."""
        assert self._budget is not None
        self._wish = replace(self._wish, wanted=decision.target)
        self._budget.update(self, self._wish, now_s)
        granted = self._budget.grant(self._wish.name, self._terms.gpus, now_s)
        if granted >= decision.target:
            return decision
        return replace(decision, target=granted, limits=(*decision.limits, "gpu_budget"))


def _decide(controller: Controller, signals: Signals, now_s: float) -> tuple[Signals, Decision]:
    return signals, controller.decide(signals, now_s)


def _by_id(raw: Mapping[str, Mapping[Any, Any]]) -> Raw:
    return {name: {replica.unique_id: values for replica, values in by.items()} for name, by in raw.items()}


def _log_file(logs: Path | None, pool: str) -> Path | None:
    return logs and logs / f"autoscaling_{re.sub(r'[^A-Za-z0-9_.-]+', '-', pool)}.log"


class _Metrics:
    """In Ray's metrics, with the prefix `ray_`."""

    def __init__(self, pool: str) -> None:
        from ray.util.metrics import Counter, Gauge

        self._pool = {"pool": pool}
        self._target = Gauge("sluicegate_autoscaling_target", "replicas wanted, within limits", ("pool",))
        self._proposed = Gauge("sluicegate_autoscaling_proposed", "replicas the policy would have", ("pool",))
        self._signal = Gauge("sluicegate_autoscaling_signal", "what it went by, unknown ones apart", ("pool", "signal"))
        self._decisions = Counter("sluicegate_autoscaling_decisions", "by their reason", ("pool", "why"))
        self._limited = Counter("sluicegate_autoscaling_limited", "decisions that a limit changed", ("pool", "limit"))
        self._faults = Counter("sluicegate_autoscaling_faults", "decisions that kept the target", ("pool",))

    def write(self, signals: Signals, decision: Decision) -> None:
        self._target.set(decision.target, self._pool)
        if decision.proposed is not None:
            self._proposed.set(decision.proposed, self._pool)
        for name in Signals.__dataclass_fields__:
            if (value := getattr(signals, name)) is not None:
                self._signal.set(float(value), {**self._pool, "signal": name})
        self._decisions.inc(1, {**self._pool, "why": decision.why})
        for limit in decision.limits:
            self._limited.inc(1, {**self._pool, "limit": limit})
        if decision.fault is not None:
            self._faults.inc(1, self._pool)
