"""One Serve replica of one pool: hosts an AsyncEngine and the channel that gateways reach it by."""

from __future__ import annotations

import asyncio
import secrets

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.util import get_node_ip_address

from deployments.channel.server import ChannelServer
from deployments.config import ModelConfig
from deployments.replica_info import Address, ReplicaInfo
from deployments.telemetry import EngineTelemetry
from engine.async_engine import AsyncEngine
from engine.engine import Engine

_MARGIN_S = 2.0  # for what comes before and after the drain within graceful_shutdown_timeout_s
_STALL_S = 120.0  # a step that takes longer is no longer progress


class ModelReplica:
    """Loads the model in its constructor, so that Serve calls it RUNNING only when it can answer."""

    async def __init__(self, config: ModelConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._shutdown_s = config.graceful_shutdown_timeout_s
        engine = await asyncio.to_thread(Engine, config.engine)
        self._engine = AsyncEngine(engine)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._telemetry = EngineTelemetry(self._engine, config.name, replica_id)
        self._publishing = asyncio.create_task(self._telemetry.run())
        secret = secrets.token_bytes(32)
        self._channel = ChannelServer(self._engine, secret, config.max_ongoing_requests)
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._address = Address(replica_id, host, await self._channel.start(host), secret)

    async def describe(self) -> ReplicaInfo:
        """Raises when the engine is unfit to take requests: gateways then send none."""
        await self.check_health()
        capacity = self._engine.engine.capacity
        room = capacity.num_blocks * self._engine.engine.config.block_size
        return ReplicaInfo(
            min(capacity.max_model_len, room),
            f"fp_{capacity.fingerprint[:10]}",
            self._address,
            tuple(sorted(self._engine.engine.prefix_root.items())),
        )

    async def metric_families(self) -> list[Metric]:
        return self._telemetry.families()

    async def check_health(self) -> None:
        self._engine.check_health()
        if (stalled := self._engine.stalled_s()) > _STALL_S:
            raise RuntimeError(f"no step has finished for {stalled:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        s = self._engine.stats()
        return {
            "waiting": s.waiting,
            "running": s.running,
            "pending_tokens": s.pending_tokens,
            "kv_usage": s.kv_usage,
            "ttft_p95_s": s.ttft_p95_s,
            "itl_p95_s": s.itl_p95_s,
        }

    async def __del__(self) -> None:
        """Serve awaits this once it has taken the replica out and its own calls have ended. Streams are none of those:
        they may go on here, until shortly before Serve would kill the process. What then still runs is cut short, which
        its gateway is told."""
        if hasattr(self, "_address"):
            margin_s = min(_MARGIN_S, self._shutdown_s / 4)
            await self._channel.drain(self._shutdown_s - 2 * margin_s)
            self._publishing.cancel()
            await asyncio.to_thread(self._engine.close)
            await self._channel.close(margin_s)
