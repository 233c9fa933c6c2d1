"""A private Ray and Serve on this machine: started for one `sluice serve`, gone with it."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deployments.cli import processes
from deployments.ray_serve import haproxy, private, way_in
from deployments.ray_serve.flags import local_env
from deployments.ray_serve.way_in import WayIn

_PREFIX = "sluice-"  # short: paths of unix sockets below it must stay under 107 bytes
_OBJECT_STORE_BYTES = 100 * 2**20  # requests and tokens travel by gRPC, not through the object store
_ERROR_EVENT_S = 10.0  # for gateways to hear of the end of their engines and tell clients, on a busy machine too
_END_GRACE_S = 3.0
_STARTS = 2
_NEW_S = 10.0  # for which a folder is nobody's leavings
_PORTS_FROM = 20000  # above those that Ray gives its workers
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SERVES_PROXY = WayIn("it is the simplest")


class StartError(Exception):
    """The application did not come up. The message is one line for the user."""


class LocalRay:
    """Owns its processes and a directory below /tmp, which has the logs. Everything listens on loopback, but for the
    HTTP port, which listens on the host of what is deployed."""

    def __init__(self, num_cpus: int, host: str = "127.0.0.1", way: WayIn = _SERVES_PROXY) -> None:
        """`num_cpus` is how much the actors may reserve together: a number for Ray's scheduler, no limit. `host` and
        `way`: where requests come in, and through what."""
        self._num_cpus = num_cpus
        self._host = host
        self._way = way
        self._dir: Path | None = None
        self._lock: int | None = None  # on the folder, while this process lives
        self._apps: list[str] = []
        self._raylet: int | None = None  # its process
        self.metrics_port = 0  # known after start()

    @property
    def logs(self) -> str:
        """The folder of Serve's log files."""
        return f"{self._dir}/session_latest/logs/serve"

    def start(self) -> None:
        """Raises StartError. Tries again where Ray fails: it picks ports for its daemons before these bind them, and
        when somebody else is quicker, its node ends without a word."""
        remove_stale()
        self._dir = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        self._lock = lock(self._dir)
        if self._way.program is not None:
            ports = [free_port() for _ in range(3)]
            settings = haproxy.prepare(self._dir / "h", self._way.program, self._host, ports)
            _set_defaults(settings)
            os.environ |= {name: settings[name] for name in (way_in.SWITCH, haproxy.PROGRAM)}  # the launcher must be it
        fault = ""
        for _ in range(_STARTS):
            try:
                self._init()
                return
            except Exception as error:  # Ray raises bare ones too
                fault = next(iter(str(error).splitlines()), repr(error))
            _end()
        raise StartError(f"Ray did not start: {fault}")

    def _init(self) -> None:
        assert self._dir is not None
        self.metrics_port = free_port()
        private.start_node(self._num_cpus, _OBJECT_STORE_BYTES, self._dir, self.metrics_port)
        self._raylet = processes.find(private.RAYLET)

    def deploy(self, raw: Mapping[str, Any]) -> None:
        """Hands `raw` to Serve the way `serve deploy` does; returns before the replicas are up.

        Raises StartError when this Ray has not heeded a switch that the product relies on.
        """
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.schema import ServeDeploySchema

        # Those for HAProxy were set after this process had imported Serve; gateways look at them.
        mine = {name: os.environ[name] for name in local_env() if name in os.environ}
        if faults := [*private.switch_faults(mine), *private.node_faults(mine)]:
            raise StartError("; ".join(faults))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if self._way.program is not None:  # gateways are behind HAProxy, which finds them on loopback only
            raw = {**raw, "http_options": {**raw.get("http_options", {}), "host": haproxy.LOOPBACK}}
        config = ServeDeploySchema.model_validate(raw)
        try:
            serve.start(
                proxy_location=config.proxy_location,
                http_options=config.http_options.model_dump(),
                grpc_options=config.grpc_options.model_dump(),
                logging_config=config.logging_config,
                controller_options=config.controller_options,
            )
        except RayError as error:  # a proxy that does not start, with its own words at the end
            raise StartError(_reason(str(error))) from None
        self._apps = [app.name for app in config.applications]
        private.deploy(config)

    def poll(self) -> str:
        """One line on what is not up yet; empty when all is. Raises StartError when it never will be."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        applications = serve.status().applications
        waiting = []
        for name in self._apps:
            app = applications.get(name)
            if app is None:
                waiting.append(name)
                continue
            if app.status == ApplicationStatus.DEPLOY_FAILED:
                messages = [d.message for d in app.deployments.values() if d.status.value == "DEPLOY_FAILED"]
                raise StartError(_reason("\n".join(messages) or app.message))
            if app.status != ApplicationStatus.RUNNING:
                waiting += [n for n, d in app.deployments.items() if d.status.value != "HEALTHY"] or [name]
        return ", ".join(waiting)

    def alive(self) -> bool:
        """Whether the node's own daemon still runs: nothing works without it."""
        return self._raylet is not None and private.RAYLET in processes.command(self._raylet)

    def stop(self, drain_s: float | None) -> None:
        """Takes no new requests, lets running ones end for `drain_s` (None: there are none), then ends every process
        started here."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            if drain_s is not None:
                with suppress(RayError, RayServeException):  # Ray has died meanwhile: there is nothing to wait for
                    self._drain(drain_s)
        finally:
            _end()
            if self._dir is not None:
                shutil.rmtree(self._dir, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _drain(self, drain_s: float) -> None:
        for name in self._apps:
            private.delete(name)
        if not _gone(drain_s):
            # Engines first: the gateways then tell their clients so, instead of just hanging up.
            replicas = [p for p in processes.descendants() if "ModelReplica" in processes.command(p)]
            processes.send(replicas, signal.SIGKILL)
            _gone(_ERROR_EVENT_S)


def _end() -> None:
    """Ends every process started here."""
    import ray

    ray.shutdown()
    processes.end_all(_END_GRACE_S)


def _gone(within_s: float) -> bool:
    """Waits for Serve to say that every application has ended its requests and left."""
    from ray import serve

    deadline = time.monotonic() + within_s
    while serve.status().applications:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def set_environment() -> None:
    """Must come before the first import of ray, which reads its switches then. What the user has set stays."""
    _set_defaults(local_env())


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def free_port() -> int:
    """One that nobody listens on, outside the range from which the system gives ports to whoever asks for any: between
    this and the bind, which may be seconds later, Ray's daemons ask for dozens."""
    lowest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    for port in random.sample(range(_PORTS_FROM, max(lowest, _PORTS_FROM + 1000)), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def lock(folder: Path) -> int | None:
    """Takes a folder as this process's own: a descriptor whose end gives it back. None when it is another's."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def remove_stale(within: Path = Path("/tmp")) -> None:
    """Folders of runs that were killed before they could clean up. The process in a folder's name is not enough to know
    one by: containers that share /tmp number their processes apart."""
    for folder in within.glob(f"{_PREFIX}[0-9]*-*"):
        if Path(f"/proc/{folder.name.split('-')[1]}").exists():
            continue
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime < _NEW_S:
                continue  # its run may be about to lock it
        if (file := lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(file)


def _reason(message: str) -> str:
    """The last exception line of Serve's report, which is a traceback inside a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (errors or lines or ["the application failed to deploy"])[-1]
