"""Keeps the replicas of a private Serve off all addresses but the loopback one.

Each Serve replica opens a gRPC port for calls between deployments on all addresses. Who calls it needs the run's token,
but on one machine nobody from outside needs to reach it at all, and Serve has no setting for that: so the function of
Ray's that opens the port is replaced in the replica's process. tests/integration/test_serve_sockets.py holds Ray to it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

SWITCH = "SLUICE_LOOPBACK_ONLY"
"""`1` in the environment: this Serve is one machine's own. `sluice serve` sets it."""


def keep_on_loopback() -> None:
    """To be called in a deployment's constructor, before Serve opens the replica's port. Does nothing in a cluster."""
    if os.environ.get(SWITCH) != "1":
        return
    replica: Any = import_module("ray.serve._private.replica")
    bind = replica.add_port_to_grpc_server

    def bind_on_loopback(server: Any, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = bind_on_loopback
