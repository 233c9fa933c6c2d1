"""The application's settings: what stands under `args:` in a Serve config file. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.config.autoscaling import GpuBudget, ScalingConfig
from deployments.config.gateway import GatewayConfig
from deployments.config.pinned_prompts import PinnedPrompt
from deployments.config.tiers import DEFAULT_TIER
from deployments.config.upstream import UpstreamConfig
from deployments.routing.policies import POLICIES
from engine.config import EngineConfig


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Strict):
    """One pool of equal replicas of one model.

    `name` is the id clients send. `num_cpus` and `num_gpus` are what one replica reserves in Ray's scheduler, no
    more: threads are `engine.num_threads`. `num_gpus` None becomes one GPU per tensor-parallel rank when the engine
    runs on CUDA. `max_ongoing_requests` bounds the requests handed to one replica; the engine queues those it
    cannot run yet. `graceful_shutdown_timeout_s` is the longest generation a leaving replica waits for.
    `routing_policy`: how a gateway chooses among the replicas, a name in deployments.routing.policies. `max_queue_s`:
    when as much work waits, in seconds, requests are refused, those of lower tiers earlier; None: never for that.
    `pinned_prompts`: kept in the prefix cache of every replica from its start, in half of its blocks at most.
    `autoscaling`: the number of replicas changes, within its bounds; `replicas`, if more than the least, is how many
    there are at first and after a change of the pool's settings. `cold_start_timeout_s`: how long a request waits for
    the first replica of a pool that has none, where `autoscaling.min_replicas` is 0.
    """

    name: str = Field(min_length=1, max_length=200, pattern=r"^\S+$")
    replicas: int = Field(1, ge=0)
    max_ongoing_requests: int = Field(1024, ge=1)
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    routing_policy: str = "prefix_affinity"
    max_queue_s: float | None = Field(60.0, gt=0)
    health_check_period_s: float = Field(1.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(600.0, ge=0)
    autoscaling: ScalingConfig | None = None
    cold_start_timeout_s: float = Field(300.0, ge=0)
    pinned_prompts: tuple[PinnedPrompt, ...] = ()
    engine: EngineConfig

    @field_validator("routing_policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        POLICIES.get(name)
        return name

    @model_validator(mode="after")
    def _check_pins(self) -> Self:
        if self.pinned_prompts and not self.engine.enable_prefix_caching:
            raise ValueError("pinned_prompts need engine.enable_prefix_caching, which is off")
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.replicas == 0 and not self.may_rest:
            raise ValueError("replicas must be at least 1, got 0; without any needs autoscaling.min_replicas 0")
        return self

    @property
    def may_rest(self) -> bool:
        """Whether it may be without any replica."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @property
    def gpus_per_replica(self) -> float:
        """`num_gpus`, or what the engine's device implies. `auto` asks the machine this runs on."""
        if self.num_gpus is not None:
            return self.num_gpus
        device = self.engine.device
        on_gpu = device.startswith("cuda") or (device == "auto" and _has_gpu())
        return float(self.engine.tensor_parallel_size) if on_gpu else 0.0


class ServeConfig(_Strict):
    """All of one application: `models` are pools served side by side behind one gateway, and `upstreams` external
    servers that routes may name; with an upstream that can stand alone there need be no pool. `gpu_budget` is shared by
    the pools. How requests are divided among pools and upstreams is the `user_config` of the deployment ModelRouter
    (see router.config); without it each pool, and each upstream that can stand alone, is a model of its own name."""

    models: tuple[ModelConfig, ...] = ()
    gpu_budget: GpuBudget | None = None
    upstreams: tuple[UpstreamConfig, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    gateway_replicas: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if not self.models and not self.standalone_upstreams:
            raise ValueError(
                "models must name at least one model, or upstreams one with a tokenizer and a max_model_len"
            )
        names = [model.name for model in self.models] + [upstream.name for upstream in self.upstreams]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models and upstreams must have different names; {twice[0]!r} is given twice")
        if self.gateway.keys.database and not self.gateway.api_keys:
            for i, model in enumerate(self.models):
                if any(prompt.orgs is None for prompt in model.pinned_prompts):
                    raise ValueError(
                        f"models entry {i} has pinned_prompts without orgs: with keys in a database, name those that "
                        "are to have them"
                    )
        if self.gateway_replicas > 1 and self.gateway.has_limits and self.gateway.limits.store == "memory":
            raise ValueError(
                "gateway limits.store memory counts in each gateway apart; with several gateway_replicas "
                "use actor or redis"
            )
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.gpu_budget
        if budget is None:
            return self
        names = [model.name for model in self.models]
        if unknown := [name for name in budget.pools if name not in names]:
            raise ValueError(f"gpu_budget.pools names {unknown[0]!r}, which is none of models: {', '.join(names)}")
        left = budget.gpus - sum(self._least_gpus(model) for model in self.models)
        if left < 0:
            raise ValueError(
                f"gpu_budget.gpus must be at least {budget.gpus - left:g}, which the least replicas of all pools take, "
                f"got {budget.gpus:g}"
            )
        for model in self.models:
            each = budget.per_replica(model.name, model.gpus_per_replica)
            if model.may_rest and each > left:
                raise ValueError(
                    f"gpu_budget.gpus {budget.gpus:g} never has room for {model.name!r}: a replica takes {each:g}, and "
                    f"the least replicas of other pools leave {left:g}"
                )
        return self

    def budget_terms(self, model: ModelConfig) -> dict[str, Any] | None:
        """See GpuBudget.terms()."""
        if self.gpu_budget is None:
            return None
        fixed = sum(self._least_gpus(other) for other in self.models if other.autoscaling is None)
        return self.gpu_budget.terms(model.name, model.gpus_per_replica, fixed)

    def _least_gpus(self, model: ModelConfig) -> float:
        assert self.gpu_budget is not None
        least = model.replicas if model.autoscaling is None else model.autoscaling.min_replicas
        return least * self.gpu_budget.per_replica(model.name, model.gpus_per_replica)

    @property
    def standalone_upstreams(self) -> tuple[str, ...]:
        return tuple(upstream.name for upstream in self.upstreams if upstream.standalone)

    @property
    def tier_priorities(self) -> dict[str, int]:
        return {name: tier.priority for name, tier in self.gateway.tiers.items()} or {DEFAULT_TIER: 0}


def _has_gpu() -> bool:
    # Not torch.cuda: the builder must not pay for torch, nor hold a CUDA context.
    return any(Path("/dev").glob("nvidia[0-9]*"))
