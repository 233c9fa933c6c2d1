"""A model's `autoscaling` in a config file, and what Serve is told for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from autoscaling.guardrails import GuardrailParams
from autoscaling.settings import PolicyError
from autoscaling.spec import BOUNDS, policy_class
from deployments.config.strict import StrictModel

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig

_ADAPTER = "deployments.ray_serve.scaling_policy:ScalingPolicy"
_PUSH_S = 0.5  # how often replicas report
_LOOK_BACK_S = 2.0  # they measure five times as often as this, but no more often than they report


class ScalingConfig(StrictModel):
    """Automatic scaling of one pool. The same mapping is a policy file of `sluice autoscale`, where the two bounds may
    also stand among the guardrails."""

    policy: str = "slo"
    """What decides on the number of replicas: `slo`, `queue_depth`, `ongoing`, `schedule`, `predictive` or
    `composite`. See docs/autoscaling.md."""
    min_replicas: int = Field(1, ge=0)
    """The fewest replicas. 0: the pool may be without any, and the next request starts one."""
    max_replicas: int = Field(8, ge=1)
    """The most replicas."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the policy, each policy's own."""
    guardrails: dict[str, Any] = Field(default_factory=dict)
    """Limits to what the policy may do."""

    @model_validator(mode="before")
    @classmethod
    def _lift_bounds(cls, given: Any) -> Any:
        """Policy files may have them among the guardrails."""
        own = given.get("guardrails") if isinstance(given, Mapping) else None
        if not isinstance(own, Mapping):
            return given
        bounds = {key: own[key] for key in BOUNDS if key in own and key not in given}
        return {**given, **bounds, "guardrails": {key: value for key, value in own.items() if key not in bounds}}

    @field_validator("policy")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            policy_class(name, "")
        except PolicyError as error:
            raise ValueError(str(error).removeprefix(".policy: ")) from None
        return name

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "policy" in info.data:
            _checked(lambda: policy_class(info.data["policy"], "").Params.from_dict(params, ""))
        return params

    @field_validator("guardrails")
    @classmethod
    def _check_guardrails(cls, guardrails: dict[str, Any]) -> dict[str, Any]:
        if bounds := [key for key in BOUNDS if key in guardrails]:
            raise ValueError(f"{bounds[0]}: is given twice, also beside guardrails")
        _checked(lambda: GuardrailParams.from_dict(guardrails, ""))
        return guardrails

    @model_validator(mode="after")
    def _check_bounds(self) -> ScalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must be at most max_replicas {self.max_replicas}, got {self.min_replicas}")
        return self

    def for_serve(self, pool: str, initial_replicas: int, budget: Mapping[str, Any] | None = None) -> AutoscalingConfig:
        """`budget`: GpuBudget.terms(). Serve's own delays and factors are off: guardrails do that. Where it is told
        `initial_replicas`, Serve goes back to them whenever the pool's settings change; else it keeps those there are,
        and begins with the least."""
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        first = min(self.max_replicas, initial_replicas)
        given = {"pool": pool, "policy": self.model_dump(), "budget": budget}
        policy = AutoscalingPolicy(policy_function=_ADAPTER, policy_kwargs=given)  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # Ray 2.60 deprecates metrics_interval_s for RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, but its
            # replicas do not read that variable: they push by this setting alone.
            warnings.simplefilter("ignore", DeprecationWarning)
            return AutoscalingConfig(
                min_replicas=self.min_replicas,
                max_replicas=self.max_replicas,
                initial_replicas=first if first > self.min_replicas else None,
                metrics_interval_s=_PUSH_S,
                look_back_period_s=_LOOK_BACK_S,
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                policy=policy,
            )


class PoolBudget(StrictModel):
    """One pool's part in the GPU budget."""

    priority: int = 0
    """Smaller is more important."""
    gpus_per_replica: float | None = Field(None, gt=0)
    """GPUs of the budget that one replica takes. By default what it reserves in Ray (`num_gpus`)."""


class GpuBudget(StrictModel):
    """GPUs that the application's pools may have together. When they want more, the more important ones get them."""

    gpus: float = Field(gt=0)
    """How many GPUs there are for all pools."""
    pools: Mapping[str, PoolBudget] = {}
    """Pool name to its part. A pool that is not named has the defaults."""

    def per_replica(self, pool: str, reserved: float) -> float:
        """`reserved`: what a replica reserves in Ray."""
        own = self.pools.get(pool, PoolBudget()).gpus_per_replica
        return reserved if own is None else own

    def terms(self, pool: str, reserved: float, fixed: float) -> dict[str, Any] | None:
        """What the pool's policy is told; None: it takes nothing of the budget. `fixed`: what pools have that do not
        scale."""
        each = self.per_replica(pool, reserved)
        if not each:
            return None
        priority = self.pools.get(pool, PoolBudget()).priority
        return {"gpus": self.gpus - fixed, "gpus_per_replica": each, "priority": priority}


def _checked(make: Callable[[], object]) -> None:
    try:
        make()
    except PolicyError as error:
        raise ValueError(str(error).removeprefix(": ").removeprefix(".")) from None
