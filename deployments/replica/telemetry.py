"""Feeds a replica's metrics and its load from its engine's counters and samples."""

from __future__ import annotations

import asyncio
import time

from prometheus_client.metrics_core import Metric

from deployments.observe.metrics import ENGINE_METRICS, Metrics
from deployments.observe.process import PROCESS_METRICS, publish
from deployments.replica.load import LoadMeter
from engine.async_engine import AsyncEngine
from engine.stats import FinishedRequest, Recorder
from engine.types import EngineStats

_EVERY_S = 0.2  # seconds between two publications; LoadMeter wants several a second


class EngineTelemetry:
    """Publishes one engine's metrics and keeps `load` current, on the event loop rather than on the step thread."""

    def __init__(self, engine: AsyncEngine, model: str, replica: str, load: LoadMeter) -> None:
        self._engine = engine
        self._model = model
        self._load = load
        self._metrics = Metrics({**ENGINE_METRICS, **PROCESS_METRICS}, replica)
        self._seen = EngineStats()

    async def run(self) -> None:
        """Publishes regularly until cancelled. That keeps Ray's exporter current, and the engine's recorder short."""
        while True:
            self.publish()
            await asyncio.sleep(_EVERY_S)

    def families(self) -> list[Metric]:
        """The metrics at this moment."""
        self.publish()
        publish(self._metrics)
        return self._metrics.families()

    def publish(self) -> None:
        """Brings the metrics and `load` up to date with the engine."""
        now, seen, metrics, model = self._engine.stats(), self._seen, self._metrics, self._model
        metrics.set("sluicegate_requests_running", now.running, model=model)
        metrics.set("sluicegate_requests_waiting", now.waiting, model=model)
        metrics.set("sluicegate_kv_usage", now.kv_usage, model=model)
        metrics.set("sluicegate_pending_tokens", now.pending_tokens, model=model)
        metrics.inc("sluicegate_prompt_tokens", now.prompt_tokens - seen.prompt_tokens, model=model)
        metrics.inc("sluicegate_generated_tokens", now.generated_tokens - seen.generated_tokens, model=model)
        metrics.inc("sluicegate_cached_tokens", now.cached_tokens - seen.cached_tokens, model=model)
        metrics.inc("sluicegate_preemptions", now.num_preemptions - seen.num_preemptions, model=model)
        metrics.inc("sluicegate_swaps", now.num_swaps - seen.num_swaps, model=model)
        metrics.inc("sluicegate_deadlines_missed", now.num_expired - seen.num_expired, model=model)
        metrics.set("sluicegate_host_kv_usage", now.host_kv_usage, model=model)
        metrics.inc("sluicegate_host_hit_tokens", now.host_hits - seen.host_hits, model=model)
        metrics.inc("sluicegate_kv_blocks_stored", now.kv_blocks_stored - seen.kv_blocks_stored, model=model)
        metrics.inc("sluicegate_kv_blocks_spilled", now.kv_blocks_spilled - seen.kv_blocks_spilled, model=model)
        metrics.inc("sluicegate_kv_blocks_to_disk", now.kv_blocks_to_disk - seen.kv_blocks_to_disk, model=model)
        metrics.inc("sluicegate_kv_blocks_from_disk", now.kv_blocks_from_disk - seen.kv_blocks_from_disk, model=model)
        metrics.inc("sluicegate_kv_blocks_loaded", now.kv_blocks_loaded - seen.kv_blocks_loaded, model=model)
        self._seen = now
        recorder = self._engine.engine.recorder
        ttft_s, itl_s = Recorder.drain(recorder.ttft_s), Recorder.drain(recorder.itl_s)
        self._load.update(time.monotonic(), now, ttft_s, itl_s)
        for sample in ttft_s:
            metrics.observe("sluicegate_ttft_seconds", sample, model=model)
        for sample in itl_s:
            metrics.observe("sluicegate_itl_seconds", sample, model=model)
        for request in recorder.drain_finished():
            self._request(request)

    def _request(self, request: FinishedRequest) -> None:
        metrics, model, timings = self._metrics, self._model, request.timings
        metrics.inc("sluicegate_requests", 1, model=model, finished_reason=request.reason.value)
        metrics.observe("sluicegate_e2e_seconds", request.e2e_s, model=model)
        metrics.observe("sluicegate_queue_seconds", timings.queue_s, model=model)
        metrics.observe("sluicegate_prefill_seconds", timings.prefill_s, model=model)
        metrics.observe("sluicegate_decode_seconds", timings.decode_s, model=model)
