"""A pool that nobody asks for anything has no replica; requests start one, once, and are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers_server import ADMIN, COMPLETIONS, MODEL, Server, asked, count, endless, events, until

from load_tests.stand_in import STAND_IN

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = (
    "replicas=0",
    f"engine.executor={STAND_IN}",
    "autoscaling.min_replicas=0",
    "autoscaling.guardrails={downscale_window_s: 3, downscale_cooldown_s: 1, idle_to_zero_s: 3, protect_start_s: 2}",
    "gateway.keepalive_s=0.2",
    ADMIN,
)


@pytest.fixture(scope="module")
def resting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("resting") / "server.log"
    with Server.running(log, *SETTINGS, config="cluster_configs/autoscale.yaml") as server:
        yield server


def pool(server: Server) -> dict[str, Any]:
    with server.http() as http:
        [found] = http.get("/admin/v1/pools").raise_for_status().json()["data"]
    assert isinstance(found, dict)
    return found


def at_rest(server: Server) -> bool:
    return pool(server)["status"] == "asleep" and not server.processes("ModelReplica")


def plain(server: Server) -> httpx.Response:
    with server.http() as http:
        return http.post(COMPLETIONS, json=count(max_tokens=3))


def test_it_rests_ready_and_the_next_request_is_served(resting: Server) -> None:
    until(lambda: at_rest(resting), "pool at rest")  # the requests that came while the server started have woken it
    assert resting.ready()
    with resting.http() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]
    with resting.http() as http, http.stream("POST", COMPLETIONS, json=endless()) as response:
        stream = events(response)  # it runs for as long as this is held
        assert response.status_code == 200 and json.loads(next(stream))["choices"]
        answer = plain(resting)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        assert len(resting.processes("ModelReplica")) == 1 and pool(resting)["status"] == "up"


def test_several_requests_wake_it_once_and_streams_are_kept_alive(resting: Server) -> None:
    until(lambda: at_rest(resting), "pool at rest")
    assert resting.ready()
    with ThreadPoolExecutor(8) as threads, resting.http() as http:
        body = count(max_tokens=60, ignore_eos=True, stream=True, stream_options={"include_usage": True})
        with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"  # it is being woken; the others join it
            others = [threads.submit(plain, resting) for _ in range(4)]
            told = [next(line for line in lines if line.startswith("data: "))]
            assert len(resting.processes("ModelReplica")) == 1
            told += [line for line in lines if line.startswith("data: ")]
        assert [other.result().status_code for other in others] == [200] * 4
    assert told[-1] == "data: [DONE]"
    assert json.loads(told[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 60


def test_a_request_that_gives_up_leaves_nothing_and_the_pool_goes_to_rest_again(resting: Server) -> None:
    until(lambda: at_rest(resting), "pool at rest")
    with asked(resting, endless()):
        until(lambda: resting.processes("ModelReplica"), "replica on its way")

    def arrived() -> dict[str, Any] | None:
        """Where nobody gets to look while it is up, it has left again."""
        return found if (found := pool(resting))["status"] == "up" or at_rest(resting) else None

    assert not any(replica["streams"] for replica in until(arrived, "replica that was on its way")["replicas"])
    until(lambda: at_rest(resting), "pool at rest")
    with resting.http() as http, http.stream("POST", COMPLETIONS, json=count(max_tokens=3, stream=True)) as response:
        assert list(events(response))[-1] == "[DONE]"
