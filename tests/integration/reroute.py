"""A program that deploys an application and then again with nothing but another `user_config` of its router.

Run by test_serve_routing, in a process of its own: Ray's switches are set once per process.
"""

from __future__ import annotations

from typing import Any

from deploying import WAIT_S, is_ready, raw_config, until, until_up

from deployments.cli import processes
from deployments.cli.local_ray import LocalRay, free_port, remove_stale, set_environment
from load_tests.stand_in import STAND_IN


def main() -> None:
    set_environment()
    import httpx

    port = free_port()
    sets = [f"http.port={port}", f"engine.executor={STAND_IN}", "engine.executor_options.step_ms=1"]

    def config(routes: dict[str, Any]) -> dict[str, Any]:
        raw = raw_config("pool", sets)
        raw["applications"][0]["deployments"] = [{"name": "ModelRouter", "user_config": {"routes": routes}}]
        return raw

    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)

    def served(name: str) -> bool:
        if not is_ready(http):
            return False
        try:
            answer = http.post("/v1/completions", json={"model": name, "prompt": "Count:", "max_tokens": 2})
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    def pids() -> set[int]:
        kinds = ("ModelReplica", "ModelRouter", "Gateway")
        return {p for p in processes.descendants() if any(kind in processes.command(p) for kind in kinds)}

    node = LocalRay(num_cpus=8)
    try:
        node.start()
        node.deploy(config({"first": {"pools": ["pool"]}}))
        until_up(node)
        until(lambda: served("first"), "first answer")
        assert not served("second") and not served("pool")
        before = pids()
        assert len(before) == 3
        node.deploy(config({"second": {"pools": ["pool"]}}))
        until(lambda: served("second"), "answer of the second route")
        until(lambda: not served("first"), "end of the first route")
        until_up(node)
        assert pids() == before, "a process has been restarted"
        print("routes have changed")
    finally:
        node.stop(None)
        remove_stale()


if __name__ == "__main__":
    main()
