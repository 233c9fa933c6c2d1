"""Which replica of a pool gets a request: one pure policy per file, and a line in POLICIES.

A policy is made once per pool and gateway. It sees what its own gateway knows, decides in microseconds, and never
raises.
"""

from __future__ import annotations

from deployments.routing.policies.base import Policy
from engine.registry import Registry

POLICIES: Registry[Policy] = Registry(
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
