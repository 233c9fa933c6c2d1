"""What feeds a gateway's metrics: its answers, limits and pools."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from deployments.observe.metrics import GATEWAY_METRICS, Metrics
from deployments.observe.process import PROCESS_METRICS, publish
from deployments.observe.request_log import RequestLog


class GatewayTelemetry:
    """Counts every HTTP answer, and shows what the gateway sees of its pools. Label values are bounded: unknown models
    count as "none"."""

    def __init__(self, replica: str, way_in: str) -> None:
        """`way_in`: the kind of HTTP proxy that this gateway's requests come through."""
        self._metrics = Metrics({**GATEWAY_METRICS, **PROCESS_METRICS}, replica)
        self._metrics.set("sluicegate_http_proxy_info", 1, kind=way_in)

    def finished(self, record: RequestLog) -> None:
        """Counts an answer."""
        self._metrics.inc("sluicegate_http_requests", 1, model=record.model or "none", status=str(record.status))

    def verdict(self, tier: str, verdict: str, tokens: int) -> None:
        """Counts what the limits said to a request of this tier, and the tokens that it took from them."""
        self._metrics.inc("sluicegate_admissions", 1, tier=tier, verdict=verdict)
        self._metrics.inc("sluicegate_tokens_reserved", tokens, tier=tier)

    def settled(self, tier: str, tokens: int) -> None:
        """Counts the tokens that an admitted request really took."""
        self._metrics.inc("sluicegate_tokens_settled", tokens, tier=tier)

    def usable(self, pool: str, replicas: int) -> None:
        """Shows how many replicas of the pool take requests."""
        self._metrics.set("sluicegate_usable_replicas", replicas, model=pool)

    def families(self) -> list[Metric]:
        """A snapshot of all metrics."""
        publish(self._metrics)
        return self._metrics.families()
