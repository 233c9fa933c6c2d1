"""The admin API's view of what runs, and replicas taken out of rotation over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_accounts import ROOT_KEY, bearer, gateway, keyed
from helpers_gateway import MODEL, FakeBackend, admin_client, client, error_of
from pydantic import TypeAdapter

from deployments.admin.pools import POOL_OPERATIONS
from deployments.config.gateway import GatewayConfig, StaticKey

POOLS, DRAIN = "/admin/v1/pools", "/admin/v1/drain"


def checked(response: httpx.Response, path: str) -> dict[str, Any]:
    """The answer, after holding it to the description."""
    assert response.status_code == 200, response.text
    [operation] = [o for o in POOL_OPERATIONS if o.path == path]
    TypeAdapter(operation.answers[200]).validate_json(response.content)
    body: dict[str, Any] = response.json()
    return body


def statuses(pool: dict[str, Any]) -> list[str]:
    return [replica["status"] for replica in pool["replicas"]]


async def test_one_replica_and_all_of_them() -> None:
    backend = FakeBackend()
    async with admin_client(backend) as http:
        [pool] = checked(await http.get(POOLS), POOLS)["data"]
        assert pool["id"] == MODEL and statuses(pool) == ["active", "active"]
        assert pool["replicas"][0].items() >= {"id": "r1", "streams": 2, "running": 3, "waiting": 1}.items()
        body = {"pool": MODEL, "replica": "r2", "timeout_s": 5}
        assert statuses(checked(await http.post(DRAIN, json=body), DRAIN)) == ["active", "draining"]
        assert statuses(checked(await http.post(DRAIN, json={"pool": MODEL}), DRAIN)) == ["draining", "draining"]
        back = {"pool": MODEL, "draining": False}
        assert statuses(checked(await http.post(DRAIN, json=back), DRAIN)) == ["active", "active"]
    assert backend.drains == [(MODEL, "r2", 5.0), (MODEL, None, None), (MODEL, None)]


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, "pool", "pool"),
        ({"pool": "none"}, 404, "pool", f"'{MODEL}'"),
        ({"pool": MODEL, "replica": "r3"}, 404, "replica", "'r1', 'r2'"),
        ({"pool": MODEL, "timeout_s": -1}, 400, "timeout_s", "timeout_s"),
        ({"pool": MODEL, "draining": "yes"}, 400, "draining", "draining"),
        ({"pool": MODEL, "timeout": 1}, 400, "timeout", "timeout"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], status: int, param: str, says: str) -> None:
    backend = FakeBackend()
    async with admin_client(backend) as http:
        error = error_of(await http.post(DRAIN, json=body), status)
    assert error["param"] == param and says in error["message"] and not backend.drains


async def test_it_takes_the_scope_admin() -> None:
    keys = (StaticKey(key="sk-user", scopes=("inference",)), StaticKey(key="sk-root", scopes=("admin",)))
    backend = FakeBackend()
    async with client(backend, GatewayConfig(api_keys=keys)) as http:
        for headers, status in (({}, 401), (bearer("sk-user"), 403)):
            error_of(await http.get(POOLS, headers=headers), status)
            error_of(await http.post(DRAIN, json={"pool": MODEL}, headers=headers), status)
        assert not backend.drains
        checked(await http.post(DRAIN, json={"pool": MODEL}, headers=bearer("sk-root")), DRAIN)


async def test_it_stands_in_the_audit_log(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        checked(await http.post(DRAIN, json={"pool": MODEL, "replica": "r1", "timeout_s": 9}), DRAIN)
        checked(await http.post(DRAIN, json={"pool": MODEL, "draining": False}), DRAIN)
        error_of(await http.post(DRAIN, json={"pool": "none"}, headers=bearer(ROOT_KEY)), 404)
        entries = (await http.get("/admin/v1/audit")).json()["data"]
    told = [(entry["action"], entry["target"], entry["detail"]["timeout_s"]) for entry in entries]
    assert told == [("replica.undrain", MODEL, None), ("replica.drain", f"{MODEL}/r1", 9.0)]
    assert all(entry["actor"].startswith("key-") and entry["request_id"] for entry in entries)
