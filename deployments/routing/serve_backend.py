"""The gateway's backend on Ray Serve: plans with its copy of the routing table, and lets the dispatcher do the rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.channel.replica_info import ReplicaInfo, ReplicaState, UnavailableReason
from deployments.config.application import ModelConfig
from deployments.config.routing_table import Route, RoutingTable
from deployments.config.upstream import UpstreamConfig
from deployments.observe.metrics import exposition
from deployments.ray_serve.private import ask_all
from deployments.routing.cold_start import ColdStart, serve_trouble
from deployments.routing.destinations import Destination, RoutedRequest, UpstreamDestination
from deployments.routing.dispatch import Dispatcher
from deployments.routing.errors import RETRY_AFTER_S, ModelUnavailableError, UnableError, UnknownModelError
from deployments.routing.hints import RoutingHints
from deployments.routing.plan import RouteRequest, Unfit, plan
from deployments.routing.policies import POLICIES
from deployments.routing.pool import POLL_S, Pool
from deployments.routing.pool_destination import PoolDestination
from deployments.routing.served_model import ServedModel
from deployments.routing.table_feed import follow
from deployments.upstream.client import Upstream
from engine.errors import ContextLengthError
from engine.types import GenerateRequest, TokenDelta

_METRICS_TIMEOUT_S = 2.0  # seconds that one process may take to answer a scrape
_LOOK_S = 0.02  # seconds between two looks at whether all replicas are connected


@dataclass(frozen=True, slots=True)
class GraphHandles:
    """The deployments that a gateway calls: `pools` by name, and `gateways`, to which it belongs itself."""

    router: DeploymentHandle[Any]
    pools: Mapping[str, DeploymentHandle[Any]]
    gateways: DeploymentHandle[Any]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a gateway runs. Empty strings: not known."""

    zone: str = ""
    region: str = ""


class ServeBackend:
    """See api.backend.Backend. A gateway replica makes one, on its event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        configs: Sequence[ModelConfig],
        upstreams: Sequence[UpstreamConfig],
        handles: GraphHandles,
        location: Location | None = None,
        on_usable: Callable[[str, int], None] = lambda pool, replicas: None,
        poll_s: float = POLL_S,
    ) -> None:
        """Connects to the router and the pools in the background.

        `models`: by name, the model of each pool and of each upstream that can stand alone. `on_usable` is called with
        the name of a pool and the number of its replicas that would take a request from this gateway. `poll_s`:
        seconds between two questions to the router, and to Serve about a pool. Raises ValueError when the key of an
        upstream cannot be read.
        """
        self._gateways = handles.gateways
        self._by_pool = dict(models)
        self._models: dict[str, ServedModel] = {}
        self._table: RoutingTable | None = None  # as the router gave it
        self._known: RoutingTable | None = None  # with what the pools say of themselves
        self._location = location or Location()
        self._on_usable = on_usable
        self._poll_s = poll_s
        clock = asyncio.get_running_loop().time
        self._pools = {c.name: self._pool(c, handles.pools[c.name], clock) for c in configs}
        destinations: dict[str, Destination] = {
            c.name: PoolDestination(self._pools[c.name], c.max_queue_s, clock) for c in configs
        }
        self._upstreams = [Upstream(config) for config in upstreams]
        destinations |= {upstream.config.name: UpstreamDestination(upstream) for upstream in self._upstreams}
        self._dispatcher = Dispatcher(destinations, clock)
        self._watch = [asyncio.create_task(pool.watch()) for pool in self._pools.values()]
        self._watch.append(asyncio.create_task(follow(handles.router, self._use, poll_s)))

    async def close(self) -> None:
        """Ends all connections and tasks of this gateway. No request may be under way."""
        for task in self._watch:
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)
        await self._dispatcher.close()
        for pool in self._pools.values():
            pool.close()
        for upstream in self._upstreams:
            await upstream.close()

    def models(self) -> Mapping[str, ServedModel]:
        """See Backend."""
        return self._models

    async def acquaint(self, within_s: float) -> None:
        """Returns when the table has come and all replicas that run are connected, or after `within_s` seconds.

        A gateway that joins others must not refuse requests that they would take.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._known is None or not all(pool.acquainted for pool in self._pools.values()):
                    await asyncio.sleep(_LOOK_S)

    async def ready(self) -> bool:
        """See Backend.

        A drained pool does not matter while another one serves. A pool without replicas counts as ready, unless
        replicas have failed to start.
        """
        fit = [pool.up or ((cold := pool.cold_start) is not None and not cold.failing) for pool in self._pools.values()]
        drained = [pool.drained for pool in self._pools.values()]
        up = not fit or (any(fit) and all(f or d for f, d in zip(fit, drained, strict=True)))
        return self._known is not None and up

    async def awaken(self, model_id: str) -> None:
        """See Backend."""
        route = self._known.routes.get(model_id) if self._known is not None else None
        names = () if route is None else (*(share.target for share in route.shares), *route.fallbacks)
        pools = [self._pools[name] for name in names if name in self._pools]
        cold = next((cold for pool in pools if (cold := pool.cold_start) is not None), None)
        if cold is None:
            raise ModelUnavailableError(RETRY_AFTER_S)
        await cold.wait()

    def unavailable_reason(self, pool: str) -> UnavailableReason:
        """See Backend."""
        return self._pools[pool].unavailable_reason

    def generate(
        self, model_id: str, requests: tuple[GenerateRequest, ...], streamed: bool, hints: RoutingHints
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """See Backend."""
        if self._known is None:
            raise ModelUnavailableError(RETRY_AFTER_S)
        first = requests[0]
        num_tokens = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
        route = plan(
            RouteRequest(
                model_id,
                first.request_id,
                hints.session,
                hints.tier,
                num_tokens,
                hints.needs,
                self._location.zone,
                self._location.region,
            ),
            self._known,
        )
        if route is None:
            raise UnknownModelError(model_id)
        if route.unfit is not None:
            raise self._unfit(route.unfit, model_id, num_tokens)
        return self._dispatcher.generate(RoutedRequest(requests, streamed, hints), route)

    async def pools(self) -> Mapping[str, Sequence[ReplicaState]]:
        """See Backend."""
        states = await asyncio.gather(*(pool.states() for pool in self._pools.values()))
        return dict(zip(self._pools, states, strict=True))

    async def drain(self, pool: str, replica_id: str | None, within_s: float | None) -> Sequence[ReplicaState]:
        """See Backend."""
        return await self._pools[pool].drain(replica_id, within_s)

    async def undrain(self, pool: str, replica_id: str | None) -> Sequence[ReplicaState]:
        """See Backend."""
        return await self._pools[pool].undrain(replica_id)

    async def metrics(self) -> bytes | None:
        """See Backend. Asks all processes of the application now.

        A process that fails or does not answer in time is left out.
        """
        handles = [*(pool.handle for pool in self._pools.values()), self._gateways]
        answers = await asyncio.gather(
            *(ask_all(handle, "metric_families", within_s=_METRICS_TIMEOUT_S) for handle in handles),
            return_exceptions=True,
        )
        said = (families for a in answers if not isinstance(a, BaseException) for families in a)
        return exposition(families for families in said if not isinstance(families, BaseException))

    def _unfit(self, why: Unfit, model_id: str, num_tokens: int) -> Exception:
        match why:
            case Unfit.TIER:
                return UnknownModelError(model_id)
            case Unfit.ABILITY:
                return UnableError(model_id)
        limit = self._models[model_id].max_model_len
        return ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, you requested {num_tokens} tokens. "
            "Please reduce the length of the prompt or completion.",
            "prompt",
        )

    # --------------------------------------------------------------------------------- the table and what pools say

    def _use(self, table: RoutingTable) -> None:
        self._table = table
        self._refresh()

    def _refresh(self) -> None:
        if self._table is None:
            return
        room = {name: served.max_model_len for name, served in self._by_pool.items() if served.max_model_len}
        self._known = self._table.with_room(room)
        self._models = {model: self._served(route, self._known) for model, route in self._known.routes.items()}

    def _served(self, route: Route, table: RoutingTable) -> ServedModel:
        """A route as clients see it: text and defaults of its first pool, and the longest context of all."""
        targets = [table.targets[name] for name in (*(share.target for share in route.shares), *route.fallbacks)]
        longest = max((t.longest or 0 for t in targets if t.room is not None), default=0)
        return replace(self._by_pool[route.shares[0].target], id=route.model, max_model_len=longest)

    def _pool(self, config: ModelConfig, handle: DeploymentHandle[Any], clock: Callable[[], float]) -> Pool:
        name = config.name

        def learn(info: ReplicaInfo) -> None:
            self._by_pool[name] = replace(
                self._by_pool[name], max_model_len=info.max_model_len, fingerprint=info.fingerprint
            )
            self._refresh()

        policy = POLICIES.get(config.routing_policy)()
        cold = None
        if config.may_rest:
            most = config.max_ongoing_requests
            cold = ColdStart(name, handle, serve_trouble(handle), config.cold_start_timeout_s, most, clock)
        usable = partial(self._on_usable, name)
        return Pool(name, handle, policy, learn, random.Random(), config.engine.block_size, cold, usable, self._poll_s)
