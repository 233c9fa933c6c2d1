"""Policies, which choose the replica of a pool that gets a request.

Each is one file and a line in config.application.ROUTING_POLICIES.

A policy is made once per pool and gateway. It sees what its own gateway knows, decides in microseconds, and never
raises.
"""

from __future__ import annotations

from deployments.config.application import ROUTING_POLICIES
from deployments.routing.policies.base import Policy
from engine.registry import Registry

POLICIES: Registry[Policy] = ROUTING_POLICIES
