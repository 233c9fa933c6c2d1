"""Ray's and Serve's process-wide switches.

They are part of the product: every process needs the same ones, so they must be in the environment before Ray starts.
`sluice serve` sets them itself; a cluster takes them from `eval "$(sluice env)"` before `ray start`. Each process
checks that they have taken effect, see private.switch_faults().
"""

from __future__ import annotations

import secrets

from deployments.ray_serve import loopback

_SERVE = {
    # A streamed message costs Serve CPU time; these cut it to about a fifth of the default.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    # Milliseconds: how stale Ray's own metrics may be. 1000 is the least Ray accepts; its own default is 10000.
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray lowers the priority of its workers' processes (15): anything else on the machine would slow every token.
    "RAY_worker_niceness": "0",
    # Header limits and clean request ids inside Serve's HTTP proxy, before any deployment is called.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.ray_serve.proxy_guard.middlewares",
}
_REPLICA = {
    # The engine shares its cores with Ray and HTTP. OpenMP threads that spin while they wait would slow a step
    # by orders of magnitude whenever something else wants the core; a short spin bridges back-to-back kernels.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def serve_env() -> dict[str, str]:
    """For every process of the cluster: driver, controller, proxies, replicas."""
    return dict(_SERVE)


def cluster_env() -> dict[str, str]:
    """For the shell that starts and operates a cluster. Ray guards a cluster by a token, but its own commands only
    send one when told to."""
    return _SERVE | {"RAY_AUTH_MODE": "token"}


def local_env() -> dict[str, str]:
    """For all processes of a private Ray on this machine."""
    return _SERVE | {
        # Ray then takes the loopback address for this node, and none of its ports is reachable from outside.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        loopback.SWITCH: "1",  # nor any of Serve's
        # A token of this run's own, instead of one written to the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # A model that does not load now will not load at the third try either: say so at once.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    }


def replica_env() -> dict[str, str]:
    """For the processes that hold an engine, on top of serve_env()."""
    return dict(_REPLICA)
