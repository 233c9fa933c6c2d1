"""One Serve replica of a pool: hosts an AsyncEngine, and the channel by which gateways reach it."""

from __future__ import annotations

import asyncio
import secrets
import time

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.util import get_node_ip_address

from deployments.channel.replica_info import Address, ReplicaInfo, ReplicaState
from deployments.channel.server import ChannelServer
from deployments.config.application import ModelConfig
from deployments.ray_serve import private
from deployments.ray_serve.loopback import keep_on_loopback
from deployments.replica.load import LoadMeter
from deployments.replica.pins import Pin, pin_all
from deployments.replica.telemetry import EngineTelemetry
from engine.async_engine import AsyncEngine
from engine.engine import Engine

_MARGIN_S = 2.0  # kept of graceful_shutdown_timeout_s before the drain, and as much after it to close all connections
# A step counts as hung when it takes longer than this, and than so many times the slowest one so far.
_STALL_S = 30.0
_STALL_CPU_S = 120.0  # on a CPU, where the first chunk of a long prompt alone may take a minute with a large model
_STALL_STEPS = 10


class ModelReplica:
    """Loads the model in its constructor, so that Serve counts the replica as RUNNING only when it can answer."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ModelConfig, pins: tuple[Pin, ...]
    ) -> None:
        keep_on_loopback()
        began_s = time.monotonic()
        private.log_switch_faults("replica")
        self._shutdown_s = config.graceful_shutdown_timeout_s
        self._stall_s = _STALL_S if config.gpus_per_replica else _STALL_CPU_S
        engine = await asyncio.to_thread(Engine, config.engine)
        await asyncio.to_thread(pin_all, engine, pins)
        self._engine = AsyncEngine(engine)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._startup_s = time.monotonic() - began_s
        self._load = LoadMeter(config.engine.max_num_seqs, self._startup_s)
        self._telemetry = EngineTelemetry(self._engine, config.name, replica_id, self._load)
        self._publishing = asyncio.create_task(self._telemetry.run())
        secret = secrets.token_bytes(32)
        self._channel = ChannelServer(self._engine, secret, config.max_ongoing_requests)
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        self._address = Address(replica_id, host, await self._channel.start(host, config.channel_ports), secret)

    async def describe(self) -> ReplicaInfo:
        """What gateways need to connect. Raises what check_health() raises: gateways then send no requests here."""
        await self.check_health()
        capacity = self._engine.engine.capacity
        room = capacity.num_blocks * self._engine.engine.config.block_size
        return ReplicaInfo(
            min(capacity.max_model_len, room),
            f"fp_{capacity.fingerprint[:10]}",
            self._address,
            tuple(sorted(self._engine.engine.prefix_root.items())),
            self._startup_s,
        )

    async def state(self) -> ReplicaState:
        """What the admin API shows of this replica."""
        stats = self._engine.stats()
        channel = self._channel
        return ReplicaState(self._address.replica_id, channel.status, channel.num_streams, stats.running, stats.waiting)

    async def drain(self, replica_id: str | None, within_s: float | None) -> ReplicaState:
        """Drains this replica if `replica_id` is its id or None, see ChannelServer.take_out(). Returns its state."""
        if replica_id in (None, self._address.replica_id):
            self._channel.take_out(within_s)
        return await self.state()

    async def undrain(self, replica_id: str | None) -> ReplicaState:
        """Undoes drain(). Returns the replica's state."""
        if replica_id in (None, self._address.replica_id):
            self._channel.put_back()
        return await self.state()

    async def metric_families(self) -> list[Metric]:
        """The replica's metrics, which a gateway adds to its own answer."""
        return self._telemetry.families()

    async def check_health(self) -> None:
        """Serve calls this regularly.

        Raises EngineDeadError when the engine has ended, and RuntimeError when a step hangs.
        """
        self._engine.check_health()
        if (stalled := self._engine.stalled_s()) > max(self._stall_s, _STALL_STEPS * self._engine.slowest_step_s):
            raise RuntimeError(f"no step has finished for {stalled:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns this replica's load, which Serve hands to the autoscaling policy. Serve calls this regularly."""
        self._telemetry.publish()
        return self._load.sample()

    async def __del__(self) -> None:
        """Serve awaits this after it has taken the replica out of rotation and the calls made through it have ended.

        Streams are no such calls. They go on until shortly before Serve would kill the process; those that still run
        then are ended, and their gateways are told so.
        """
        if hasattr(self, "_address"):
            margin_s = min(_MARGIN_S, self._shutdown_s / 4)
            await self._channel.drain(self._shutdown_s - 2 * margin_s)
            self._publishing.cancel()
            await asyncio.to_thread(self._engine.close)
            await self._channel.close(margin_s)
