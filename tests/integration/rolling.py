"""A program that deploys an application with room for one more replica, and again with other settings while clients
keep asking, and counts what was not served.

Run by test_serve_drain, in a process of its own: Ray's switches are set once per process.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploying import WAIT_S, is_ready, raw_config, replicas, until, until_up

from deployments.cli.local_ray import LocalRay, free_port, remove_stale, set_environment
from load_tests.stand_in import STAND_IN

TOKENS = 20


def main() -> None:
    set_environment()
    import httpx

    port = free_port()

    def config(max_num_seqs: int) -> dict[str, Any]:
        sets = [f"http.port={port}", f"engine.max_num_seqs={max_num_seqs}", f"engine.executor={STAND_IN}"]
        sets += [
            "engine.executor_options.step_ms=5",
            "applications.0.deployments=[{name: ModelReplica-demo, max_surge_percent: 100}]",
        ]
        return raw_config("demo", sets)

    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)
    body = {"model": "demo", "prompt": "Count:", "max_tokens": TOKENS, "ignore_eos": True}
    over = threading.Event()
    outcomes: Counter[str] = Counter()

    def client(number: int) -> None:
        while not over.is_set():
            if number % 2:
                answer = http.post("/v1/completions", json=body)
                good = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == TOKENS
            else:
                answer = http.post("/v1/completions", json={**body, "stream": True})
                good = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
            outcomes["served" if good else f"{answer.status_code} {answer.text[:300]}"] += 1

    node = LocalRay(num_cpus=8)
    try:
        node.start()
        node.deploy(config(8))
        until_up(node)
        until(lambda: is_ready(http), "readiness")
        (old,) = replicas()
        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client, number) for number in range(4)]
            try:
                until(lambda: outcomes["served"] > 20, "answers")
                node.deploy(config(16))
                until(lambda: replicas() and old not in replicas(), "new replica alone")
                served = outcomes["served"]
                until(lambda: outcomes["served"] > served + 20, "answers of the new one")
            finally:
                over.set()
            for done in clients:
                done.result()
        print(outcomes)
        assert outcomes.keys() == {"served"}
        print("no request was lost")
    finally:
        node.stop(None)
        remove_stale()


if __name__ == "__main__":
    main()
