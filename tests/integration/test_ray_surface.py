"""All that the product uses of Ray without its documentation promising it, touched once on a real Serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_server import run_beside

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = run_beside("ray_surface.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_application_is_deployed_and_taken_out_again(facts: dict[str, Any]) -> None:
    assert facts["started"] and facts["deleted"]  # an asynchronous __init__ and __del__ were awaited


@pytest.mark.parametrize("process", ["driver", "controller", "proxy", "replica"])
def test_every_process_of_serve_has_heeded_the_switches(facts: dict[str, Any], process: str) -> None:
    assert facts[process]["faults"] == []


def test_processes_are_known_by_their_titles(facts: dict[str, Any]) -> None:
    assert facts["driver"]["alive"] and facts["replica title"]


def test_logs_lie_where_every_process_says(facts: dict[str, Any]) -> None:
    assert {facts[process]["logs"] for process in ("controller", "proxy", "replica")} == {facts["logs"]}


def test_messages_take_the_cheap_path(facts: dict[str, Any]) -> None:
    assert facts["grpc"] is True
    replica = facts["replica"]
    assert not replica["separate router"]
    assert replica["log buffers"] == [1000] and replica["to stderr"] == []


def test_replicas_run_at_the_priority_of_whoever_started_the_server(facts: dict[str, Any]) -> None:
    assert facts["replica"]["niceness"] == facts["driver"]["niceness"]


def test_a_call_reaches_all_replicas(facts: dict[str, Any]) -> None:
    assert facts["replica"]["broadcast"]


def test_a_call_to_a_replica_that_dies_fails_in_a_known_way(facts: dict[str, Any]) -> None:
    assert "call error" in facts and facts["replaced"]


def test_the_proxy_runs_the_guard_and_what_the_gateway_tells_it_arrives(facts: dict[str, Any]) -> None:
    assert facts["guard"] == [] and facts["slow reader is cut"]


def test_replicas_report_as_often_as_the_scaling_policy_is_made_for(facts: dict[str, Any]) -> None:
    assert 0.3 < sorted(facts["gaps"])[len(facts["gaps"]) // 2] < 1.0  # half a second is asked for


def test_metrics_reach_rays_exporter_within_seconds(facts: dict[str, Any]) -> None:
    assert facts["metrics"]


def test_the_node_is_on_loopback_and_asks_for_a_token(facts: dict[str, Any]) -> None:
    assert facts["replica"]["address"] == "127.0.0.1"
    assert facts["token faults"] == []
    assert facts["http host"] == "127.0.0.1"
    assert "token" in facts["another token"].lower()
