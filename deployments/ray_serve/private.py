"""Every name of Ray that its documentation does not promise, so that the list is this one file.

Beside it there are the environment switches in `flags` and `haproxy`, what `proxy_guard` relies on, and the one
function that `loopback` replaces. The test
tests/integration/test_ray_surface.py touches all of it on a real Serve and fails when a name is gone, which is why
Ray is pinned to the minor version that the test has seen.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.ray_serve.flags import local_env, serve_env
from deployments.ray_serve.way_in import kind

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

RAYLET = "raylet"
"""Part of the title of the process whose end is the end of a Ray node."""
REPLICA = "ServeReplica"
"""Part of the titles of replicas' processes; the names of application and deployment follow it."""
UNUSABLE_ID = "not a usable id!"
"""A request id that the proxy guard replaces, see request_head."""

_GUARD = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_PREFIX = "RAY_SERVE_"
_HAPROXY = "RAY_SERVE_HAPROXY_"
_RENAMED = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "MAX_PER_REPLICA_RETRY_COUNT"}


def start_node(num_cpus: int, object_store_bytes: int, folder: Path, metrics_port: int) -> None:
    """Starts a Ray node with this process as its driver. `folder` takes its sockets and logs. Raises what Ray raises,
    which may be any exception."""
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
        _metrics_export_port=metrics_port,
    )


def deploy(config: ServeDeploySchema) -> None:
    """What `serve deploy` does, without Ray's dashboard in between. Serve must have been started. Returns before the
    replicas are up."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None  # it raises when Serve was not started
    client.deploy_apps(config)


def http_host() -> str | None:
    """The address that the HTTP proxy of the Serve that runs here listens on. None where none runs."""
    import ray
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    return None if client is None else str(client.http_config.host)


async def ask_all(handle: Any, method: str, *args: Any, within_s: float) -> list[Any]:
    """What each replica of a deployment answers; in the place of an answer an exception, TimeoutError where none came
    in time. Raises what a broadcast raises: DeploymentUnavailableError where there is no replica.

    A broadcast's own results_async() gives no answer of any when one replica hangs.
    """

    async def answer(result: Any) -> Any:
        async with asyncio.timeout(within_s):
            return await result.get_async()

    async with asyncio.timeout(within_s):
        results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    return await asyncio.gather(*map(answer, results), return_exceptions=True)


def delete(app_name: str) -> None:
    """Has Serve take an application out, and does not wait for it."""
    from ray import serve

    serve.delete(app_name, _blocking=False)


def logs_dir() -> Path:
    """The folder of Serve's log files, in a process of Serve's."""
    from ray.serve._private.logging_utils import get_serve_logs_dir

    return Path(get_serve_logs_dir())


def switch_faults(environment: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with Ray's switches in this process, a sentence each: those of the product that its environment
    lacks, and those that Serve has not read from it. A switch that somebody set to another value is no fault."""
    from ray.serve._private import constants

    given = os.environ if environment is None else environment
    faults = []
    if missing := [name for name in serve_env() if name not in given]:
        faults.append(f'{", ".join(missing)}: not set. Start Ray in a shell that has run eval "$(sluice env)"')
    for name, text in given.items():
        if _ours(name) and not _heeded(constants, name, text):
            faults.append(f"{name}={text} has no effect in Ray {_version()}")
    return faults


def node_faults(environment: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with this process's Ray node, a sentence each: that others can reach its ports although its
    environment says that they must not."""
    from ray.util import get_node_ip_address

    given = os.environ if environment is None else environment
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    if given.get(_LOOPBACK) != "0" or ip_address(address).is_loopback:
        return []
    return [f"{_LOOPBACK}=0 has no effect in Ray {_version()}: its node listens on {address}, not on loopback"]


def token_faults() -> list[str]:
    """What is wrong with the authentication between Ray's processes, a sentence each. Without it, whoever reaches a
    port of a replica can run code there: Serve unpickles what it is sent."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if is_token_auth_enabled():
        return []
    return [
        "Ray asks for no token, so whoever reaches a port of this cluster could run code on it: start Ray in a shell "
        'that has run eval "$(sluice env)", or set allow_unauthenticated_ray: true if nobody else reaches its ports'
    ]


def guard_faults(request_id_in_answer: str | None, environment: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with Serve's HTTP proxy, a sentence each, by the request id in its own answer to a request that had
    UNUSABLE_ID: only the guard replaces that one. HAProxy, which may stand in its place, has no guard."""
    given = os.environ if environment is None else environment
    guard = serve_env()[_GUARD]
    replaced = (request_id_in_answer or "").startswith("req_")
    if replaced or given.get(_GUARD) != guard or kind(given) == "haproxy":
        return []
    return [f"{_GUARD}={guard} has no effect in Ray {_version()}: nothing bounds the headers of requests"]


def log_switch_faults(process: str) -> None:
    """Warns in Serve's log of what is wrong in this process, named `process` there. What comes of it is more CPU time
    for each message, or answers of Serve's own that are not in OpenAI's shape."""
    log = logging.getLogger("ray.serve")
    for fault in switch_faults():
        log.warning("switches of Ray in the %s: %s", process, fault)


def _version() -> str:
    import ray

    return str(ray.__version__)


def _ours(name: str) -> bool:
    """Whether it is the product that sets this variable of Serve's."""
    return name.startswith(_HAPROXY) or (name.startswith(_PREFIX) and name in local_env())


def _heeded(constants: Any, name: str, text: str) -> bool:
    """Whether Serve's constant for an environment variable has the value that the variable has."""
    value = getattr(constants, _RENAMED.get(name, name), None)
    if isinstance(value, bool):
        return value == (text == "1")
    if isinstance(value, int | float):
        return value == float(text)
    return value == text
