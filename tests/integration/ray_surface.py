"""A program that starts a real Ray Serve as `sluice serve` does, with an application that tells what it sees there,
and prints one JSON object of facts. For test_ray_surface, in a process of its own: Ray's switches are set once per
process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.cli import processes
from deployments.cli.local_ray import LocalRay, free_port, remove_stale, set_environment
from deployments.ray_serve import private

WAIT_S = 60.0
APP, GAUGE = "probe", "sluicegate_probe"
JOIN = "import os, ray; os.environ['RAY_AUTH_TOKEN'] = '0' * 64; ray.init(address=os.environ['ADDRESS'])"


class Probe:
    """An ingress that is asked what its process is like."""

    async def __init__(self, folder: str) -> None:
        from ray.serve import metrics

        self._folder = Path(folder)
        self._asked: list[float] = []
        self._gauge = metrics.Gauge(GAUGE, "set now and then")

    async def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            from deployments.ray_serve.proxy_guard import SEND_TIMEOUT

            if scope["type"] == "lifespan":
                while (event := (await receive())["type"]) and await send({"type": f"{event}.complete"}) is None:
                    if event == "lifespan.shutdown":
                        return
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 200, "headers": headers, SEND_TIMEOUT: 1.0})
            try:
                for _ in range(2000):
                    await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                (self._folder / "cut").touch()
                raise

        return app

    async def facts(self) -> dict[str, Any]:
        from ray import serve
        from ray.util import get_node_ip_address

        handlers = logging.getLogger("ray.serve").handlers
        handle = serve.get_deployment_handle("Probe", app_name=APP)
        answers = await private.ask_all(handle, "pid", within_s=WAIT_S)
        return {
            "faults": [*private.switch_faults(), *private.node_faults()],
            "logs": str(private.logs_dir()),
            "log buffers": [h.capacity for h in handlers if isinstance(h, logging.handlers.MemoryHandler)],
            "to stderr": [h.stream.name for h in handlers if type(h) is logging.StreamHandler],
            "separate router": handle._is_router_running_in_separate_loop(),
            "address": get_node_ip_address(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "broadcast": answers == [os.getpid()],
        }

    async def pid(self) -> int:
        return os.getpid()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        self._asked.append(time.monotonic())
        return {}

    async def gaps(self) -> list[float]:
        """Seconds between Serve's questions for autoscaling statistics."""
        self._gauge.set(len(self._asked))
        return [b - a for a, b in zip(self._asked, self._asked[1:], strict=False)]

    async def die(self) -> None:
        os._exit(1)

    async def __del__(self) -> None:
        await asyncio.sleep(0.01)
        (self._folder / "deleted").touch()


def build(args: dict[str, Any]) -> Any:
    """The application."""
    from ray import serve

    from deployments.config.autoscaling import ScalingConfig

    scaling = ScalingConfig(min_replicas=1, max_replicas=1).for_serve("probe", 1).model_dump()
    deployment = serve.deployment(serve.ingress()(Probe)).options(name="Probe", autoscaling_config=scaling)
    return deployment.bind(args["folder"])


def in_process(actor: str) -> dict[str, Any]:
    """What a process of Serve's own sees, by the name of its actor."""
    import ray

    def look(_: Any) -> dict[str, Any]:
        from ray.serve.schema import LoggingConfig  # noqa: F401  # Serve has read its switches

        from deployments.ray_serve import private

        return {"faults": private.switch_faults(), "logs": str(private.logs_dir())}

    return dict(ray.get(ray.get_actor(actor, "serve").__ray_call__.remote(look), timeout=WAIT_S))


class Asking:
    """Calls the application's methods over a handle, from an event loop of its own: a handle whose router has no loop
    of its own, as switched on here, needs one around it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, method: str) -> Any:
        return self._run(self._call(method))

    def by_grpc(self) -> Any:
        """True when calls do not travel as Ray's own, which have references to objects."""
        return self._run(self._by_grpc())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _call(self, method: str) -> Any:
        return await self._handle(method).remote()

    async def _by_grpc(self) -> Any:
        from ray import serve

        try:
            await serve.get_app_handle(APP).options(method_name="pid").remote()._to_object_ref()
        except Exception as error:
            return "by_reference" in str(error) or repr(error)
        return False

    def _handle(self, method: str) -> Any:
        from ray import serve

        options = {"request_serialization": "pickle", "response_serialization": "pickle"}
        return serve.get_app_handle(APP).options(method_name=method, **options)


def until(condition: Callable[[], Any], wait_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + wait_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


def main() -> None:
    set_environment()
    import ray
    from ray import serve

    from deployments.ray_serve.handles import CALL_ERRORS

    port = free_port()
    node = LocalRay(num_cpus=4)
    facts: dict[str, Any] = {}
    try:
        began = time.monotonic()
        node.start()
        folder = Path(node.logs).parents[2]
        raw = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {"name": APP, "import_path": "tests.integration.ray_surface:build", "args": {"folder": str(folder)}}
            ],
        }
        node.deploy(raw)
        until(lambda: not node.poll())
        facts["started"] = node.poll() == ""
        facts["driver"] = {"faults": [*private.switch_faults(), *private.node_faults()], "alive": node.alive()}
        facts["driver"]["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
        ask = Asking()
        facts["replica"] = ask("facts")
        facts["logs"] = str(Path(node.logs).resolve())
        facts["replica title"] = [
            p for p in processes.descendants() if "ServeReplica:probe:Probe" in processes.command(p)
        ] == [ask("pid")]
        controller = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "CONTROLLER" in a["name"]]
        proxies = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "PROXY" in a["name"]]
        facts["controller"] = in_process(*controller)
        facts["proxy"] = in_process(*proxies)
        facts["grpc"] = ask.by_grpc()
        health = urllib.request.Request(f"http://127.0.0.1:{port}/-/healthz")
        health.add_header("X-Request-Id", private.UNUSABLE_ID)
        with urllib.request.urlopen(health, timeout=WAIT_S) as answer:
            facts["guard"] = private.guard_faults(answer.headers["X-Request-Id"])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=WAIT_S):  # reads nothing of the answer
            facts["slow reader is cut"] = until((folder / "cut").exists, 20)
        env = os.environ | {"ADDRESS": ray.get_runtime_context().gcs_address}
        joined = subprocess.run(
            [sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        facts["token faults"] = private.token_faults()
        facts["http host"] = private.http_host()
        facts["another token"] = joined.stderr[-2000:] if joined.returncode else "let in"
        until(lambda: len(ask("gaps")) > 4)
        facts["gaps"] = ask("gaps")
        exporter = f"http://127.0.0.1:{node.metrics_port}/metrics"
        facts["metrics"] = until(lambda: f"ray_{GAUGE}" in urllib.request.urlopen(exporter).read().decode(), 20)
        old = ask("pid")
        try:
            ask("die")
        except CALL_ERRORS as error:
            facts["call error"] = type(error).__name__

        def replaced() -> bool:
            try:
                return bool(ask("pid") != old)
            except CALL_ERRORS:
                return False

        facts["replaced"] = until(replaced)
        private.delete(APP)
        facts["deleted"] = until(lambda: not serve.status().applications and (folder / "deleted").exists())
        facts["seconds"] = time.monotonic() - began
    finally:
        print(json.dumps(facts))
        node.stop(None)
        remove_stale()


if __name__ == "__main__":
    main()
