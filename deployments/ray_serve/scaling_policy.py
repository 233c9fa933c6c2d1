"""The scaling policy that Serve's controller calls: autoscaling's adapter, logging beside Serve's own logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from autoscaling.serve_adapter import ServePolicy
from deployments.ray_serve import private


class ScalingPolicy(ServePolicy):
    """Named by its import path in what Serve is told; see ServePolicy for the arguments."""

    def __init__(self, pool: str, policy: Mapping[str, Any], budget: Mapping[str, Any] | None = None) -> None:
        super().__init__(pool, policy, budget, logs=private.logs_dir() if ray.is_initialized() else None)
