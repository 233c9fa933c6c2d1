"""Every metric the product exports: one table, kept twice.

Each process writes to its own prometheus_client registry, which GET /metrics gathers at once and exactly, and to
Ray's metrics, which reach a cluster's Prometheus through the nodes' exporters (prefix `ray_`, up to a second late).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from ray.serve import metrics as ray_metrics

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Definition:
    """`labels` are beyond `replica`, which every metric has. `buckets` make it a histogram."""

    kind: str
    help: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()


ENGINE_METRICS: Mapping[str, Definition] = {
    "sluicegate_ttft_seconds": Definition("histogram", "arrival at the engine -> first token", buckets=_FIRST),
    "sluicegate_itl_seconds": Definition("histogram", "gap between two tokens of one choice", buckets=_SHORT),
    "sluicegate_e2e_seconds": Definition("histogram", "arrival at the engine -> end", buckets=_LONG),
    "sluicegate_queue_seconds": Definition("histogram", "arrival at the engine -> first scheduled", buckets=_LONG),
    "sluicegate_prefill_seconds": Definition("histogram", "first scheduled -> first token", buckets=_LONG),
    "sluicegate_decode_seconds": Definition("histogram", "first token -> last token", buckets=_LONG),
    "sluicegate_requests_running": Definition("gauge", "sequences in the running batch"),
    "sluicegate_requests_waiting": Definition("gauge", "sequences queued or preempted"),
    "sluicegate_kv_usage": Definition("gauge", "share of KV blocks held by live sequences, 0..1"),
    "sluicegate_pending_tokens": Definition("gauge", "tokens waiting for prefill"),
    "sluicegate_requests": Definition(
        "counter", "requests ended, by finished_reason: stop, length, abort, error", ("model", "finished_reason")
    ),
    "sluicegate_prompt_tokens": Definition("counter", "prompt tokens of requests that got a first token"),
    "sluicegate_generated_tokens": Definition("counter", "tokens generated"),
    "sluicegate_cached_tokens": Definition("counter", "prompt tokens served from the prefix cache"),
    "sluicegate_preemptions": Definition("counter", "sequences preempted for want of a seat or KV blocks"),
    "sluicegate_swaps": Definition("counter", "preemptions that kept their K/V in host memory"),
    "sluicegate_deadlines_missed": Definition("counter", "sequences ended in the queue because of their deadline"),
    "sluicegate_host_kv_usage": Definition("gauge", "share of host KV blocks held by preempted sequences, 0..1"),
    "sluicegate_host_hit_tokens": Definition("counter", "cached prompt tokens that came back from host memory"),
    "sluicegate_kv_blocks_stored": Definition("counter", "KV blocks copied to host memory"),
    "sluicegate_kv_blocks_spilled": Definition("counter", "those of the blocks stored that were evicted prefixes"),
    "sluicegate_kv_blocks_to_disk": Definition("counter", "KV blocks moved from host memory to disk"),
    "sluicegate_kv_blocks_from_disk": Definition("counter", "those of the KV blocks copied back that came from disk"),
    "sluicegate_kv_blocks_loaded": Definition("counter", "KV blocks copied back from host memory"),
}
GATEWAY_METRICS: Mapping[str, Definition] = {
    "sluicegate_http_requests": Definition("counter", "HTTP requests by status, refused ones too", ("model", "status")),
    "sluicegate_http_proxy_info": Definition("gauge", "1, by the way requests come in: haproxy, serve", ("kind",)),
    "sluicegate_usable_replicas": Definition("gauge", "replicas that this gateway would send a request to now"),
    "sluicegate_admissions": Definition(
        "counter",
        "requests that have limits, by verdict: admitted, requests, tokens, concurrent, too_large, store_down",
        ("tier", "verdict"),
    ),
    "sluicegate_tokens_reserved": Definition("counter", "tokens taken from limits on admission", ("tier",)),
    "sluicegate_tokens_settled": Definition("counter", "tokens that admitted requests really took", ("tier",)),
}


class Metrics:
    """One process's metrics of one table. Not thread-safe beyond what single updates need."""

    def __init__(self, table: Mapping[str, Definition], replica: str) -> None:
        self._replica = replica
        self._registry = CollectorRegistry()
        self._local: dict[str, Any] = {}
        self._ray: dict[str, Any] = {}
        for name, d in table.items():
            extra: dict[str, Any] = {"buckets": d.buckets} if d.buckets else {}
            kind = {"histogram": Histogram, "gauge": Gauge, "counter": Counter}[d.kind]
            self._local[name] = kind(name, d.help, (*d.labels, "replica"), registry=self._registry, **extra)
            bounds: dict[str, Any] = {"boundaries": list(d.buckets)} if d.buckets else {}
            ray_kind: Any = getattr(ray_metrics, d.kind.capitalize())
            self._ray[name] = ray_kind(name, d.help, tag_keys=d.labels, **bounds)

    def inc(self, name: str, amount: float, **labels: str) -> None:
        """Adds to a counter."""
        if amount > 0:
            self._local[name].labels(**labels, replica=self._replica).inc(amount)
            self._ray[name].inc(amount, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._local[name].labels(**labels, replica=self._replica).set(value)
        self._ray[name].set(value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds a sample to a histogram."""
        self._local[name].labels(**labels, replica=self._replica).observe(value)
        self._ray[name].observe(value, labels)

    def families(self) -> list[Metric]:
        """A snapshot that can be pickled and merged with other processes'."""
        return list(self._registry.collect())


class _Merged:
    """What generate_latest() wants of a registry, over snapshots of many processes."""

    def __init__(self, snapshots: Iterable[list[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for family in (f for snapshot in snapshots for f in snapshot):
            into = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [s for s in family.samples if not s.name.endswith("_created")]

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def exposition(snapshots: Iterable[list[Metric]]) -> bytes:
    """Prometheus text format of all snapshots together."""
    return generate_latest(_Merged(snapshots))
