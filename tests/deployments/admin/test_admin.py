"""The admin API: what it answers, what it refuses, and that it is described."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_accounts import ROOT_KEY, bearer, gateway, keyed, soon
from helpers_gateway import COUNT, MODEL, error_of
from pydantic import TypeAdapter

from deployments.admin.pools import POOL_OPERATIONS
from deployments.admin.routes import ADMIN_OPERATIONS
from deployments.api.openapi import OPERATIONS, document
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import Tier

KEYS = "/admin/v1/keys"
COMP = "/v1/completions"


def checked(response: httpx.Response, method: str, path: str) -> dict[str, Any]:
    """The answer, after holding it to the description."""
    assert response.status_code == 200, response.text
    [operation] = [o for o in ADMIN_OPERATIONS if (o.method, o.path) == (method, path)]
    TypeAdapter(operation.answers[200]).validate_json(response.content)
    assert response.headers["cache-control"] == "no-store"
    body: dict[str, Any] = response.json()
    return body


async def test_a_keys_life(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        wanted = {
            "org": "acme",
            "project": "web",
            "tier": "pro",
            "name": "ci",
            "models": ["m"],
            "scopes": ["inference"],
        }
        expires_at = int(time.time()) + 1000
        made = checked(await http.post(KEYS, json={**wanted, "expires_at": expires_at}), "POST", KEYS)
        assert made.items() >= {**wanted, "status": "active", "expires_at": expires_at}.items()
        assert made["secret"].startswith(made["prefix"] + "-") and made["id"].startswith("key_")
        url, path = f"{KEYS}/{made['id']}", f"{KEYS}/{{key_id}}"
        got = checked(await http.get(url), "GET", path)
        assert got == {k: v for k, v in made.items() if k != "secret"}
        changes = {
            "tier": "free",
            "models": None,
            "expires_at": None,
            "disabled": True,
            "scopes": ["batch"],
            "name": "",
        }
        changed = checked(await http.post(url, json=changes), "POST", path)
        assert (changed["tier"], changed["models"], changed["expires_at"]) == ("free", None, None)
        assert (changed["status"], changed["scopes"], changed["name"]) == ("disabled", ["batch"], "")
        same = checked(await http.post(url, json={"tier": None}), "POST", path)
        assert same == changed
        rotated = checked(await http.post(f"{url}/rotate", json={}), "POST", f"{path}/rotate")
        assert rotated["secret"] != made["secret"] and rotated["id"] == made["id"]
        revoked = checked(await http.delete(url), "DELETE", path)
        assert revoked["status"] == "revoked" and revoked["revoked_at"] is not None
        for again in (http.post(f"{url}/rotate"), http.post(url, json={"disabled": False})):
            assert "revoked" in error_of(await again, 409)["message"]
        entries = checked(await http.get("/admin/v1/audit"), "GET", "/admin/v1/audit")["data"]
        actions = ["key.revoke", "key.rotate", "key.update", "key.update", "key.create"]
        assert [entry["action"] for entry in entries] == actions
        assert all(e["actor"].startswith("key-") and e["request_id"].startswith("req_") for e in entries)


async def test_pages(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        for i in range(5):
            await http.post(KEYS, json={"org": f"org{i % 2}"})
        first = checked(await http.get(KEYS, params={"limit": 2}), "GET", KEYS)
        assert first["has_more"] and len(first["data"]) == 2
        rest = (await http.get(KEYS, params={"limit": 3, "after": first["data"][-1]["id"]})).json()
        assert not rest["has_more"] and len(rest["data"]) == 3
        assert len((await http.get(KEYS, params={"org": "org1"})).json()["data"]) == 2
        orgs = checked(await http.get("/admin/v1/orgs", params={"limit": 1}), "GET", "/admin/v1/orgs")
        assert orgs["has_more"] and orgs["data"][0]["id"] == "org0"
        checked(await http.post("/admin/v1/orgs", json={"org": "new"}), "POST", "/admin/v1/orgs")
        page = checked(await http.get("/admin/v1/audit", params={"limit": 2}), "GET", "/admin/v1/audit")
        then = (await http.get("/admin/v1/audit", params={"limit": 2, "after": page["data"][-1]["id"]})).json()
        assert page["has_more"] and then["data"][0]["id"] < page["data"][-1]["id"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "words"),
    [
        ("POST", KEYS, {}, 400, "org", "Missing required parameter: 'org'."),
        ("POST", KEYS, {"org": 5}, 400, "org", "expected a string, but got an integer"),
        ("POST", KEYS, {"org": "a b"}, 400, "org", "1 to 64 letters"),
        ("POST", KEYS, {"org": "a", "project": ""}, 400, "project", "1 to 64 letters"),
        ("POST", KEYS, {"org": "a", "scopes": ["all"]}, 400, "scopes[0]", "'models.read', 'inference'"),
        ("POST", KEYS, {"org": "a", "scopes": []}, 400, "scopes", "minimum length 1"),
        ("POST", KEYS, {"org": "a", "models": [""]}, 400, "models[0]", "minimum length 1"),
        ("POST", KEYS, {"org": "a", "expires_at": 5}, 400, "expires_at", "future"),
        ("POST", KEYS, {"org": "a", "expires_at": 10**15}, 400, "expires_at", "above maximum"),
        ("POST", KEYS, {"org": "a", "teir": "pro"}, 400, "teir", "Unknown parameter: 'teir'."),
        ("GET", KEYS + "?limit=0", None, 400, "limit", ">= 1"),
        ("GET", KEYS + "?limit=x", None, 400, "limit", "expected an integer"),
        ("GET", KEYS + "?page=2", None, 400, "page", "Unknown parameter: 'page'."),
        ("GET", KEYS + "?after=key_none", None, 404, "after", "there is no key"),
        ("GET", KEYS + "/key_none", None, 404, "key_id", "there is no key 'key_none'."),
        ("DELETE", KEYS + "/key_none", None, 404, "key_id", "there is no key"),
        ("POST", KEYS + "/key_none/rotate", {"grace_s": -1}, 400, "grace_s", "below minimum"),
        (
            "POST",
            "/admin/v1/projects",
            {"org": "a", "project": "p", "monthly_tokens": -1},
            400,
            "monthly_tokens",
            ">= 0",
        ),
        ("POST", "/admin/v1/orgs", {"org": "x" * 65}, 400, "org", "1 to 64 letters"),
        ("GET", "/admin/v1/usage?group_by=hour", None, 400, "group_by", "Supported values are: 'day'"),
        ("GET", "/admin/v1/usage?from=yesterday", None, 400, "from", "write it like 2030-12-31"),
        ("PUT", KEYS, {}, 405, None, "Allowed: GET, HEAD, POST."),
        ("GET", "/admin/v1/nope", None, 404, None, "Invalid URL"),
    ],
)
async def test_refusals(
    tmp_path: Path, method: str, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    async with gateway(keyed(tmp_path)) as http:
        error = error_of(await http.request(method, path, json=body), status)
        assert error["param"] == param and words in error["message"], error


async def test_it_needs_the_scope_and_a_database(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        for operation in ADMIN_OPERATIONS:
            path = operation.path.replace("{key_id}", "key_none")
            answer = await http.request(operation.method, path, headers=bearer("sk-wrong"))
            error_of(answer, 401)
    bare = GatewayConfig(api_keys=keyed(tmp_path).api_keys)
    async with gateway(bare) as http:
        error_of(await http.get(KEYS), 404)


async def test_only_tiers_there_are(tmp_path: Path) -> None:
    config = keyed(tmp_path, tiers={"free": Tier(), "pro": Tier()}, default_tier="free")
    async with gateway(config) as http:
        error = error_of(await http.post(KEYS, json={"org": "a", "tier": "gold"}), 400)
        assert (error["param"], error["message"]) == (
            "tier",
            "Invalid value: 'gold'. Supported values are: 'free', 'pro'.",
        )
        key_id = (await http.post(KEYS, json={"org": "a"})).json()["id"]
        error_of(await http.post(f"{KEYS}/{key_id}", json={"tier": "gold"}), 400)
        assert (await http.post(f"{KEYS}/{key_id}", json={"tier": "pro"})).json()["tier"] == "pro"


async def test_usage_by_time_and_group(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        for _ in range(2):
            await http.post(COMP, json={"model": MODEL, "prompt": COUNT, "max_tokens": 4})

        async def rows(**query: str) -> list[dict[str, Any]]:
            answer = await http.get("/admin/v1/usage", params=query)
            data: list[dict[str, Any]] = checked(answer, "GET", "/admin/v1/usage")["data"]
            return data

        async def all_there() -> bool:
            return sum(row["requests"] for row in await rows()) == 2

        await soon(all_there)
        [row] = await rows(group_by="model,org", org="root")
        assert row.items() >= {"model": MODEL, "org": "root", "total_tokens": 36}.items() and "day" not in row
        assert await rows(group_by="org", org="acme") == []
        assert len(await rows(group_by="day", **{"from": str(int(time.time()) - 600)})) == 1
        assert await rows(group_by="day", **{"from": "2999-01-01"}) == []
        assert await rows(group_by="day", to="2020-01-01T00:00:00Z") == []


async def test_it_is_described(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        described = (await http.get("/openapi.json", headers=bearer(ROOT_KEY))).json()
    assert described == document((*OPERATIONS, *POOL_OPERATIONS, *ADMIN_OPERATIONS))
    usage = described["paths"]["/admin/v1/usage"]["get"]["parameters"]
    assert [p["name"] for p in usage] == ["group_by", "from", "to", "org"]
