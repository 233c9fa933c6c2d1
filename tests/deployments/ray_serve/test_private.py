from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import ray
import ray.util

from deployments.ray_serve import private
from deployments.ray_serve.flags import local_env, serve_env
from deployments.ray_serve.haproxy import prepare

GUARD = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def test_serve_knows_every_switch(tmp_path: Path) -> None:
    from ray.serve._private import constants

    names = {*local_env(), *prepare(tmp_path / "h", "haproxy", "127.0.0.1", (1, 2, 3))}
    names = {name for name in names if name.startswith("RAY_SERVE_")}
    assert len(names) > 10
    assert not {
        name for name in names if not hasattr(constants, name) and not hasattr(constants, name[len("RAY_SERVE_") :])
    }


def test_switches_that_are_not_set_are_named_with_the_remedy() -> None:
    (fault,) = private.switch_faults({})
    assert all(name in fault for name in serve_env())
    assert fault.endswith('not set. Start Ray in a shell that has run eval "$(sluice env)"')


def test_a_switch_without_effect_is_named_with_rays_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import constants

    given = serve_env()
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", True)
    monkeypatch.setattr(constants, "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", False)
    monkeypatch.setattr(constants, "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", False)
    monkeypatch.setattr(constants, "RAY_SERVE_LOG_TO_STDERR", False)
    monkeypatch.setattr(constants, "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE", 1000)
    monkeypatch.setattr(constants, GUARD, given[GUARD])
    assert private.switch_faults(given) == []
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", False)
    monkeypatch.delattr(constants, "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE")
    assert private.switch_faults(given) == [
        f"RAY_SERVE_USE_GRPC_BY_DEFAULT=1 has no effect in Ray {ray.__version__}",
        f"RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE=1000 has no effect in Ray {ray.__version__}",
    ]


def test_what_somebody_has_set_otherwise_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import constants

    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", False)
    given = serve_env() | {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}
    assert not [fault for fault in private.switch_faults(given) if "GRPC" in fault]


def test_faults_stand_in_serves_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in serve_env():
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        private.log_switch_faults("gateway")
    (record,) = caplog.records
    assert record.getMessage().startswith("switches of Ray in the gateway: RAY_SERVE_USE_GRPC_BY_DEFAULT, ")


def test_a_node_that_others_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = local_env()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    (fault,) = private.node_faults(given)
    assert re.fullmatch(r"RAY_\w+=0 has no effect in Ray \S+: its node listens on 10\.0\.0\.7, not on loopback", fault)
    assert private.node_faults({}) == []
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    assert private.node_faults(given) == []


@pytest.mark.parametrize("answered", [None, private.UNUSABLE_ID])
def test_a_proxy_without_the_guard_is_known_by_the_request_id_it_lets_through(answered: str | None) -> None:
    (fault,) = private.guard_faults(answered, serve_env())
    assert fault.endswith(f"has no effect in Ray {ray.__version__}: nothing bounds the headers of requests")
    assert private.guard_faults("req_0123", serve_env()) == []


@pytest.mark.parametrize("chosen", [{GUARD: "mine.middlewares"}, {"RAY_SERVE_ENABLE_HA_PROXY": "1"}])
def test_no_guard_is_missed_where_there_is_none_to_be(chosen: dict[str, str]) -> None:
    assert private.guard_faults(None, serve_env() | chosen) == []
