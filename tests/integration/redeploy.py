"""A program that deploys an application, and again with other settings while streams run, and checks those.

Run by test_serve_channel, in a process of its own: Ray's switches are set once per process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from deploying import WAIT_S, is_ready, raw_config, replicas, running, until, until_up

from deployments.cli.local_ray import LocalRay, free_port, remove_stale, set_environment
from load_tests.stand_in import STAND_IN

STREAMS, TOKENS = 4, 600


def main() -> None:
    set_environment()
    import httpx

    port = free_port()

    def config(max_num_seqs: int) -> dict[str, object]:
        sets = [f"http.port={port}", f"engine.max_num_seqs={max_num_seqs}", f"engine.executor={STAND_IN}"]
        sets.append("engine.executor_options.step_ms=10")
        return raw_config("demo", sets)

    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)
    body = {"model": "demo", "prompt": "Count:", "max_tokens": TOKENS, "ignore_eos": True}

    def stream(number: int) -> tuple[bool, int]:
        """Whether it was complete, and in how many pieces it came. Odd ones are not streamed."""
        if number % 2:
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            return answer["usage"]["completion_tokens"] == TOKENS, 1
        pieces = 0
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [""]
            for line in response.iter_lines():
                lines.append(line)
                pieces += line.startswith("data: {")
        return "data: [DONE]" in lines and not any('"error"' in line for line in lines), pieces

    node = LocalRay(num_cpus=8)
    try:
        node.start()
        node.deploy(config(8))
        until_up(node)
        until(lambda: is_ready(http), "readiness")
        (old,) = replicas()
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(stream, number) for number in range(STREAMS)]
            until(lambda: running(http) == STREAMS, "streams")
            node.deploy(config(16))
            results = [s.result() for s in streams]
        print(results)
        until(lambda: replicas() and old not in replicas(), "new replica")
        until_up(node)
        until(lambda: is_ready(http), "readiness of the new one")
        assert stream(1) == (True, 1)
        assert all(complete for complete, _ in results), results
        print("every stream was complete")
    finally:
        node.stop(None)
        remove_stale()


if __name__ == "__main__":
    main()
