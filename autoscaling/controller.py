"""One pool's controller: policy, guardrails, and what to do when either fails. Never raises."""

from __future__ import annotations

import math

from autoscaling.base import Decision, Proposal, ScalingPolicy, Signals
from autoscaling.guardrails import Guardrails


class Controller:
    """Whatever happens inside, `decide` gives a target: on a fault the last good one, with the fault as a reason.

    A fault is a policy that raises or gives anything but a finite number, or a pool in which replicas serve and none
    has reported for longer than samples stay fresh. Wishes are not remembered from faulty decisions.
    """

    def __init__(self, policy: ScalingPolicy, guardrails: Guardrails) -> None:
        self._policy = policy
        self._guardrails = guardrails

    def decide(self, signals: Signals, now_s: float) -> Decision:
        """The target from now on, in replicas. Never raises."""
        if signals.serving and not signals.reporting:
            return self._hold(signals, now_s, f"stale: no sample of {signals.serving} serving replicas")
        try:
            proposal = self._policy.decide(signals, now_s)
            if fault := _unusable(proposal):
                return self._hold(signals, now_s, fault)
            guarded = self._guardrails.apply(proposal, signals, now_s)
        except Exception as error:  # anything at all: a policy is the operator's code, and the loop serves every pool
            return self._hold(signals, now_s, f"{type(error).__name__}: {error}")
        return Decision(
            guarded.target, float(proposal.replicas), proposal.why, guarded.limits, None, dict(proposal.terms)
        )

    def _hold(self, signals: Signals, now_s: float, fault: str) -> Decision:
        params = self._guardrails.params
        target = max(params.min_replicas, min(params.max_replicas, signals.target))
        if target == 0 and signals.queued > 0:
            target = 1
        return Decision(target, None, "hold", (), fault)


def _unusable(proposal: object) -> str | None:
    if not isinstance(proposal, Proposal):
        return f"the policy gave {proposal!r}, not a Proposal"
    value: object = proposal.replicas
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"the policy gave {value!r} replicas"
    return None
