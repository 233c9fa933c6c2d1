"""One Serve replica of one pool: hosts an AsyncEngine and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve

from deployments.config import ModelConfig
from deployments.replica_info import ReplicaInfo
from deployments.telemetry import EngineTelemetry
from deployments.wire import pack
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.types import EngineStats, GenerateRequest

log = logging.getLogger("ray.serve")

_STALL_S = 120.0  # a step that takes longer is no longer progress


class ModelReplica:
    """Loads the model in its constructor, so that Serve calls it RUNNING only when it can answer."""

    async def __init__(self, config: ModelConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        engine = await asyncio.to_thread(Engine, config.engine)
        self._engine = AsyncEngine(engine)
        self._telemetry = EngineTelemetry(self._engine, config.name, serve.get_replica_context().replica_id.unique_id)
        self._publishing = asyncio.create_task(self._telemetry.run())

    async def generate(self, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[list[Any]]:
        """One stream, packed for the wire, for all of one HTTP request's prompts and choices. See
        AsyncEngine.generate()."""
        stream = self._engine.generate(requests)
        try:
            async for deltas in stream:
                yield pack(deltas)
        finally:
            # Not an await that a cancellation could cut short: the abort must always reach the engine.
            self._engine.abort(*(r.request_id for r in requests))
            with suppress(RuntimeError):
                await stream.aclose()  # type: ignore[attr-defined]

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def describe(self) -> ReplicaInfo:
        """Raises when the engine is unfit to take requests: gateways then send none."""
        await self.check_health()
        capacity = self._engine.engine.capacity
        room = capacity.num_blocks * self._engine.engine.config.block_size
        return ReplicaInfo(min(capacity.max_model_len, room), f"fp_{capacity.fingerprint[:10]}")

    async def metric_families(self) -> list[Metric]:
        return self._telemetry.families()

    async def check_health(self) -> None:
        self._engine.check_health()
        if (stalled := self._engine.stalled_s()) > _STALL_S:
            raise RuntimeError(f"no step has finished for {stalled:.0f} s")

    async def record_routing_stats(self) -> dict[str, Any]:
        s = self._engine.stats()
        return {"waiting": s.waiting, "running": s.running, "kv_usage": s.kv_usage, "pending_tokens": s.pending_tokens}

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
        """Serve calls this after the drain."""
        if hasattr(self, "_engine"):
            self._publishing.cancel()
            await asyncio.to_thread(self._engine.close)
