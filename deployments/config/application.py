"""The application's settings: what stands under `args:` in a Serve config file. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from deployments.config.autoscaling import GpuBudget, ScalingConfig
from deployments.config.gateway import GatewayConfig
from deployments.config.pinned_prompts import PinnedPrompt
from deployments.config.strict import StrictModel
from deployments.config.tiers import DEFAULT_TIER
from deployments.config.upstream import UpstreamConfig
from engine.config import EngineConfig
from engine.registry import Registry

Port = Annotated[int, Field(ge=1, le=65535)]

# As deployments.routing.policies has them.
ROUTING_POLICIES: Registry[Any] = Registry(
    "routing policy",
    {
        "latency": "deployments.routing.policies.latency:Latency",
        "least_loaded": "deployments.routing.policies.least_loaded:LeastLoaded",
        "power_of_two": "deployments.routing.policies.power_of_two:PowerOfTwo",
        "prefix_affinity": "deployments.routing.policies.prefix_affinity:PrefixAffinity",
        "round_robin": "deployments.routing.policies.round_robin:RoundRobin",
        "session": "deployments.routing.policies.session:Session",
    },
)
"""By the names for the setting `routing_policy`. Whoever routes imports the classes, not whoever checks a config."""


class ModelConfig(StrictModel):
    """One pool: equal replicas of one model."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^\S+$")
    """The model id that clients send, unless a route says otherwise."""
    replicas: int = Field(1, ge=0)
    """How many replicas there are. With `autoscaling` it is the number at first and after each change of the pool's
    settings, if it is more than `autoscaling.min_replicas`. 0 needs `autoscaling.min_replicas: 0`."""
    max_ongoing_requests: int = Field(1024, ge=1)
    """The most requests that are handed to one replica at a time. The engine queues those that it cannot run yet."""
    num_cpus: float = Field(1.0, ge=0)
    """CPUs that one replica reserves in Ray's scheduler. The number of threads is `engine.num_threads`."""
    num_gpus: float | None = Field(None, ge=0)
    """GPUs that one replica reserves in Ray's scheduler. By default one for each rank (`engine.tensor_parallel_size`)
    when the engine runs on CUDA, else none."""
    routing_policy: str = "prefix_affinity"
    """How a gateway chooses among the replicas: `latency`, `least_loaded`, `power_of_two`, `prefix_affinity`,
    `round_robin` or `session`."""
    max_queue_s: float | None = Field(60.0, gt=0)
    """Seconds of work that may wait in the pool. Beyond it requests are refused with status 503, those of less
    important tiers earlier. null: requests are refused only when the engines' queues are full."""
    health_check_period_s: float = Field(1.0, gt=0)
    """Seconds between two health checks of a replica by Serve."""
    graceful_shutdown_timeout_s: float = Field(600.0, ge=0)
    """Seconds that a leaving replica waits for the generations that it still runs."""
    autoscaling: ScalingConfig | None = None
    """Changes the number of replicas within bounds. By default the number is fixed."""
    cold_start_timeout_s: float = Field(300.0, ge=0)
    """Seconds that a request waits for the first replica of a pool that has none (`autoscaling.min_replicas: 0`)."""
    channel_ports: tuple[Port, Port] | None = None
    """The first and the last port of which each replica takes a free one for the gateways' connections, for firewalls.
    A node needs as many as it has replicas of all pools with this range. By default any free port."""
    pinned_prompts: tuple[PinnedPrompt, ...] = ()
    """Prompts that stay in the prefix cache of every replica from its start. They may take half of its blocks."""
    generation_config: Literal["auto", "none"] = "auto"
    """Where sampling settings come from that a request leaves out (`temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty`). `auto`: from the model directory's generation_config.json, as far as it has them, else
    OpenAI's defaults. `none`: always OpenAI's. GGUF files have no such settings."""
    engine: EngineConfig
    """The engine of each replica."""

    @field_validator("routing_policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        if name not in ROUTING_POLICIES.names():
            raise ValueError(f"unknown routing policy {name!r}; known: {', '.join(ROUTING_POLICIES.names())}")
        return name

    @field_validator("channel_ports")
    @classmethod
    def _check_ports(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"the first port must not be above the last, got {ports[0]} and {ports[1]}")
        return ports

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
        """The most replicas that it may have."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @property
    def gpus_per_replica(self) -> float:
        """`num_gpus`, or what the engine's device implies. `auto` asks the machine this runs on."""
        if self.num_gpus is not None:
            return self.num_gpus
        device = self.engine.device
        on_gpu = device.startswith("cuda") or (device == "auto" and _has_gpu())
        return float(self.engine.tensor_parallel_size) if on_gpu else 0.0


class ServeConfig(StrictModel):
    """One application: what stands under `args:` of `import_path: deployments.app:build`. How requests are divided
    among pools and upstreams is not here but in the `user_config` of the deployment ModelRouter (RoutingConfig)."""

    models: tuple[ModelConfig, ...] = ()
    """The pools, one entry for each model. At least one, unless an upstream has a tokenizer of its own."""
    gpu_budget: GpuBudget | None = None
    """GPUs that the pools share by priority. By default each pool scales alone."""
    upstreams: tuple[UpstreamConfig, ...] = ()
    """External servers with OpenAI's API, which routes may name."""
    gateway: GatewayConfig = GatewayConfig()
    """The HTTP API: keys, tiers, limits and bounds of requests."""
    allow_unauthenticated_ray: bool = False
    """Whether to run on a Ray cluster that asks for no token. Then whoever reaches a port of its nodes can run code on
    them. `sluice serve` and `sluice env` make Ray ask for one."""
    gateway_replicas: int = Field(1, ge=1)
    """How many gateway processes there are. More than one cannot use `gateway.limits.store: memory`."""

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
        """The upstreams that can serve a model without a pool."""
        return tuple(upstream.name for upstream in self.upstreams if upstream.standalone)

    @property
    def tier_priorities(self) -> dict[str, int]:
        """Tier to priority; without tiers, that of the one there is."""
        return {name: tier.priority for name, tier in self.gateway.tiers.items()} or {DEFAULT_TIER: 0}


def _has_gpu() -> bool:
    # Not torch.cuda: the builder must not pay for torch, nor hold a CUDA context.
    return any(Path("/dev").glob("nvidia[0-9]*"))
