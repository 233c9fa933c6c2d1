"""Keys of the database at the gateway: who is let in, for what, for how long, and what is written down of it."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers_accounts import ROOT_KEY, WAIT_S, bearer, gateway, keyed, soon
from helpers_gateway import COUNT, MODEL, FakeBackend, demo_model, error_of

from deployments.accounts.auth import Authenticator, visible
from deployments.accounts.secret import new_secret
from deployments.accounts.static_keys import StaticKeys
from deployments.config.gateway import GatewayConfig, KeysConfig, StaticKey
from deployments.routing.errors import ReplicaLostError
from engine.errors import QueueFullError

COMP = "/v1/completions"
BODY = {"model": MODEL, "prompt": COUNT, "max_tokens": 4}


async def make(http: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
    """A new key: its id and its secret."""
    answer = await http.post("/admin/v1/keys", json={"org": "acme", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.json()["secret"]


async def status(http: httpx.AsyncClient, secret: str) -> int:
    return (await http.post(COMP, json=BODY, headers=bearer(secret))).status_code


async def refused(http: httpx.AsyncClient, secret: str) -> None:
    """Waits until the key is no longer let in."""

    async def look() -> bool:
        return await status(http, secret) == 401

    await soon(look)


# ------------------------------------------------------------------------------------------------ letting in
async def test_a_new_key_works_at_once_and_everywhere(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    async with gateway(config) as one, gateway(config) as two:
        _, secret = await make(one)
        assert [await status(http, secret) for http in (one, two, one, two)] == [200] * 4
        assert await status(one, ROOT_KEY) == 200
        for wrong in (new_secret(), secret[:-1], "sk-demo"):
            assert error_of(await one.post(COMP, json=BODY, headers=bearer(wrong)), 401)["code"] == "invalid_api_key"


async def test_what_ends_a_key_ends_it_on_every_gateway(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    async with gateway(config) as one, gateway(config) as two:
        for how in ("revoke", "disable", "expire", "rotate"):
            key_id, secret = await make(one)
            assert [await status(http, secret) for http in (one, two)] == [200, 200]
            url = f"/admin/v1/keys/{key_id}"
            match how:
                case "revoke":
                    answer = await one.delete(url)
                case "disable":
                    answer = await one.post(url, json={"disabled": True})
                case "expire":
                    answer = await one.post(url, json={"expires_at": int(time.time())})
                case "rotate":
                    answer = await one.post(f"{url}/rotate")
            assert answer.status_code == 200, answer.text
            for http in (one, two):
                await refused(http, secret)
            error = error_of(await two.post(COMP, json=BODY, headers=bearer(secret)), 401)
            assert error["code"] == "invalid_api_key"
            said = {"revoke": "is revoked", "disable": "is disabled", "expire": "is expired", "rotate": "Incorrect"}
            assert said[how] in error["message"]


async def test_rotation_with_grace_serves_both(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        key_id, old = await make(http)
        answer = await http.post(f"/admin/v1/keys/{key_id}/rotate", json={"grace_s": 3600})
        new = answer.json()["secret"]
        assert new != old and answer.json()["id"] == key_id
        assert [await status(http, secret) for secret in (old, new)] == [200, 200]


async def test_scopes(tmp_path: Path) -> None:
    uses = {
        "inference": [("POST", COMP, BODY), ("POST", "/tokenize", {"model": MODEL, "prompt": "x"})],
        "models.read": [("GET", "/v1/models", None), ("GET", f"/v1/models/{MODEL}", None)],
        "admin": [("GET", "/admin/v1/keys", None), ("GET", "/metrics", None)],
        "batch": [],
    }
    async with gateway(keyed(tmp_path)) as http:
        for scope in uses:
            _, secret = await make(http, scopes=[scope])
            for needs, calls in uses.items():
                for method, url, body in calls:
                    answer = await http.request(method, url, json=body, headers=bearer(secret))
                    if needs == scope:
                        assert answer.status_code == 200, (scope, url, answer.text)
                        continue
                    error = error_of(answer, 403)
                    assert error["code"] == "insufficient_permissions" and error["type"] == "invalid_request_error"
                    assert f"Missing scopes: {needs}." in error["message"]
        _, secret = await make(http)  # the usual scopes
        assert error_of(await http.get("/admin/v1/keys", headers=bearer(secret)), 403)


async def test_models_a_key_may_not_use_do_not_exist_for_it(tmp_path: Path) -> None:
    backend = FakeBackend(served={MODEL: demo_model(), "secret": demo_model(id="secret")})
    async with gateway(keyed(tmp_path), backend) as http:
        _, secret = await make(http, models=[MODEL, "later"])
        headers = bearer(secret)
        listed = (await http.get("/v1/models", headers=headers)).json()["data"]
        assert [model["id"] for model in listed] == [MODEL]
        missing = error_of(await http.get("/v1/models/nope", headers=headers), 404)
        hidden = error_of(await http.get("/v1/models/secret", headers=headers), 404)
        assert hidden == {**missing, "message": missing["message"].replace("nope", "secret")}
        error = error_of(await http.post(COMP, json={**BODY, "model": "secret"}, headers=headers), 404)
        assert error["code"] == "model_not_found"
        assert len((await http.get("/v1/models")).json()["data"]) == 2


def test_visible_takes_any_number_of_sets() -> None:
    models = {"a": 1, "b": 2, "c": 3}
    assert visible(models) is models and visible(models, None, None) is models
    assert visible(models, frozenset("ab"), None, frozenset("bcd")) == {"b": 2}
    assert visible(models, frozenset()) == {}


async def test_the_cache_belongs_to_the_organisation(tmp_path: Path) -> None:
    backend = FakeBackend()
    config = keyed(tmp_path)
    config = config.model_copy(update={"api_keys": (*config.api_keys, StaticKey(key="sk-a"), StaticKey(key="sk-b"))})
    async with gateway(config, backend) as http:
        a, b = (await make(http))[1], (await make(http, project="other"))[1]
        other = (await make(http, org="umbrella"))[1]
        for secret in (a, b, other, "sk-a", "sk-b"):
            assert await status(http, secret) == 200
    salts = [call[0].cache_salt for call in backend.calls]
    assert salts[0] == salts[1] and len(set(salts)) == 4


async def test_static_keys_say_what_they_belong_to() -> None:
    told = {"key": "sk-x", "org": "acme", "project": "web", "tier": "pro", "scopes": ["inference"], "models": ["m"]}
    config = GatewayConfig.model_validate({"api_keys": ["sk-bare", told]})
    keys = StaticKeys(config.api_keys)
    tenant = keys.find("sk-x")
    assert tenant is not None and tenant.id.startswith("key-")
    assert (tenant.org, tenant.project, tenant.tier) == ("acme", "web", "pro")
    assert (tenant.scopes, tenant.models) == ({"inference"}, {"m"})
    bare = keys.find("sk-bare")
    assert bare is not None and bare.org == bare.id and bare.models is None
    assert bare.scopes == {"models.read", "inference", "batch"}  # no administrator
    assert keys.find("sk-none") is None
    for wrong in ({"org": "a"}, {"key": "k", "org": "a b"}, {"key": "k", "scopes": ["all"]}, {"key": "k", "x": 1}, 5):
        with pytest.raises(ValueError, match="api_keys"):
            GatewayConfig.model_validate({"api_keys": [wrong]})
    with pytest.raises(ValueError, match="absolute path"):
        KeysConfig(database="keys.db")


async def test_nobody_needs_a_key_where_there_is_none() -> None:
    tenant = await Authenticator(StaticKeys([]), None).admit([], "admin")
    assert tenant.id == "anonymous"


# ------------------------------------------------------------------------------------------------ outages
async def test_without_a_database_static_keys_work_and_others_get_a_503(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    (tmp_path / "keys.db").mkdir()  # can't be opened
    async with gateway(config) as http:
        assert await status(http, ROOT_KEY) == 200
        answer = await http.post(COMP, json=BODY, headers=bearer(new_secret()))
        assert error_of(answer, 503)["code"] == "accounts_unavailable"
        assert answer.headers["retry-after"] == "1"
        error_of(await http.get("/admin/v1/keys"), 503)
        error_of(await http.post(COMP, json=BODY, headers=bearer("sk-demo")), 401)
        (tmp_path / "keys.db").rmdir()
        (tmp_path / "away.db").rename(tmp_path / "keys.db")

        async def works() -> bool:
            return (await http.post("/admin/v1/keys", json={"org": "acme"})).status_code == 200

        await soon(works)


# ------------------------------------------------------------------------------------------------ the ledger
async def test_a_missing_database_is_an_error_and_not_a_new_empty_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway on another machine would refuse every key, and know no budget."""
    config = keyed(tmp_path)
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    async with gateway(config) as http:
        answer = await http.post(COMP, json=BODY, headers=bearer(new_secret()))
        assert error_of(answer, 503)["code"] == "accounts_unavailable"
        assert not (tmp_path / "keys.db").exists()
        assert "`sluice keys create` makes one" in caplog.text
        (tmp_path / "keys.db").touch()  # an empty one is none either
        error_of(await http.post(COMP, json=BODY, headers=bearer(new_secret())), 503)
        (tmp_path / "away.db").rename(tmp_path / "keys.db")

        async def works() -> bool:
            return (await http.post("/admin/v1/keys", json={"org": "acme"})).status_code == 200

        await soon(works)


async def rows(http: httpx.AsyncClient, by: str = "org,project,key,model") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get("/admin/v1/usage", params={"group_by": by})).json()["data"]
    return found


async def test_what_has_run_is_in_the_ledger(tmp_path: Path) -> None:
    backend = FakeBackend(cached=8)
    async with gateway(keyed(tmp_path), backend) as http:
        key_id, secret = await make(http, project="web")
        for stream in (False, True):
            answer = await http.post(COMP, json={**BODY, "stream": stream}, headers=bearer(secret))
            assert answer.status_code == 200
        await http.post(COMP, json=BODY)
        error_of(await http.post(COMP, json={**BODY, "max_tokens": -1}, headers=bearer(secret)), 400)
        await http.get("/v1/models", headers=bearer(secret))
        backend.fail = QueueFullError("full")
        error_of(await http.post(COMP, json=BODY, headers=bearer(secret)), 503)
        backend.fail, backend.fail_at = ReplicaLostError(), 2  # breaks after two tokens
        await http.post(COMP, json={**BODY, "stream": True}, headers=bearer(secret))

        async def all_there() -> bool:
            return sum(row["requests"] for row in await rows(http)) == 4

        await soon(all_there)
        mine, root = sorted(await rows(http), key=lambda row: str(row["org"]))
        assert (mine["org"], mine["project"], mine["key"], mine["model"]) == ("acme", "web", key_id, MODEL)
        assert mine["requests"] == 3  # what was refused, and what we failed at, is not there
        assert (mine["prompt_tokens"], mine["cached_tokens"], mine["completion_tokens"]) == (3 * 14, 3 * 8, 4 + 4 + 2)
        assert (root["org"], root["total_tokens"]) == ("root", 18)
        assert root["key"].startswith("key-")
    with sqlite3.connect(tmp_path / "keys.db") as c:
        found = c.execute("select status, path, total_s > 0, request_id from usage order by at").fetchall()
    c.close()
    assert [row[0] for row in found] == [200, 200, 200, 200]
    assert all(row[1] == COMP and row[2] and row[3].startswith("req_") for row in found)


async def test_stopping_flushes(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    config = config.model_copy(update={"ledger": config.ledger.model_copy(update={"flush_s": 60.0})})
    async with gateway(config) as http:
        for _ in range(5):
            assert await status(http, ROOT_KEY) == 200
    async with gateway(config) as http:
        [row] = await rows(http, "org")
        assert row["requests"] == 5


async def test_a_budget_is_a_hard_stop(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    async with gateway(config) as one, gateway(config) as two:
        answer = await one.post("/admin/v1/projects", json={"org": "acme", "project": "default", "monthly_tokens": 36})
        assert answer.json()["spent_tokens"] == 0
        _, secret = await make(one)
        assert [await status(one, secret) for _ in range(2)] == [200, 200]  # 18 tokens each

        async def stopped() -> bool:
            return await status(one, secret) == 429 and await status(two, secret) == 429

        await soon(stopped)
        answer = await two.post(COMP, json=BODY, headers=bearer(secret))
        error = error_of(answer, 429)
        assert error["code"] == error["type"] == "insufficient_quota"
        assert error["message"].startswith(
            "You exceeded your current quota, please check your plan and billing details."
        )
        assert re.search(
            r"has used \d+ of its 36 tokens per month; the next month begins on 20\d\d-\d\d-01", error["message"]
        )
        assert answer.headers["x-should-retry"] == "false" and int(answer.headers["retry-after"]) > 0
        assert await status(two, (await make(two, project="other"))[1]) == 200
        assert (await two.get("/v1/models", headers=bearer(secret))).status_code == 200

        async def spent() -> bool:
            projects = (await two.get("/admin/v1/projects")).json()["data"]
            return bool(next(p for p in projects if p["id"] == "default")["spent_tokens"] >= 36)

        await soon(spent)  # the ledger is written twenty times a second

        await two.post("/admin/v1/projects", json={"org": "acme", "project": "default", "monthly_tokens": None})

        async def open_again() -> bool:
            return await status(one, secret) == 200

        await soon(open_again)


async def test_requests_that_run_hold_their_part_of_a_budget(tmp_path: Path) -> None:
    backend = FakeBackend()
    config = keyed(tmp_path)
    async with gateway(config, backend) as http:
        _, secret = await make(http)
        await http.post("/admin/v1/projects", json={"org": "acme", "project": "default", "monthly_tokens": 100})

        backend.fail = QueueFullError("full")  # so that nothing is spent before the gateway knows the budget

        async def known() -> bool:
            answer = await http.post(COMP, json={**BODY, "max_tokens": 90}, headers=bearer(secret))
            return answer.status_code == 429

        await soon(known)
        answer = await http.post(COMP, json={**BODY, "max_tokens": 90}, headers=bearer(secret))
        error = error_of(answer, 429)
        assert error["code"] == "insufficient_quota" and answer.headers["x-should-retry"] == "false"
        assert "this request may use up to 104, and 100 are left: ask for fewer with max_tokens" in error["message"]
        backend.fail, gate = None, asyncio.Event()
        backend.gate = lambda _: gate.wait()
        asked = [asyncio.create_task(status(http, secret)) for _ in range(20)]  # 18 tokens each
        while sum(task.done() for task in asked) < 15:
            await asyncio.sleep(0.01)
        held = await http.post(COMP, json=BODY, headers=bearer(secret))  # may be tried again
        error = error_of(held, 429)
        assert error["code"] == "rate_limit_exceeded" and held.headers["retry-after"] == "1"
        assert "has 100 tokens left this month, of which 90 are held for requests that run" in error["message"]
        gate.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answers) == [200] * 5 + [429] * 15
        backend.gate = None
        assert await status(http, secret) == 429  # 10 are left

        async def all_there() -> bool:
            return sum(row["total_tokens"] for row in await rows(http, "org")) == 90

        await soon(all_there)


async def test_a_client_that_leaves_before_the_answer_pays_for_what_was_made(tmp_path: Path) -> None:
    """Not streamed: nothing has gone out yet."""
    backend, made = FakeBackend(), asyncio.Event()

    async def gate(step: int) -> None:
        if step == 3:
            made.set()
            await asyncio.Event().wait()

    backend.gate = gate
    async with gateway(keyed(tmp_path), backend) as http:
        asked = asyncio.create_task(http.post(COMP, json=BODY))
        await made.wait()
        asked.cancel()

        async def charged() -> list[dict[str, Any]]:
            return await rows(http, "org")

        [row] = await soon(charged)
        assert (row["prompt_tokens"], row["completion_tokens"]) == (14, 3)


async def test_the_sdk_does_not_retry_a_used_up_budget(tmp_path: Path) -> None:
    async with gateway(keyed(tmp_path)) as http:
        await http.post("/admin/v1/projects", json={"org": "acme", "project": "default", "monthly_tokens": 0})
        _, secret = await make(http)

        async def stopped() -> bool:
            return await status(http, secret) == 429

        await soon(stopped)
        asked = 0

        async def count(_: httpx.Request) -> None:
            nonlocal asked
            asked += 1

        http.event_hooks["request"].append(count)
        api = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=secret, http_client=http, timeout=WAIT_S)
        with pytest.raises(openai.RateLimitError) as refused:
            await api.completions.create(model=MODEL, prompt=COUNT)
        assert refused.value.code == "insufficient_quota" and asked == 1


# ------------------------------------------------------------------------------------------------ secrecy
async def test_no_secret_in_logs_errors_or_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = keyed(tmp_path)
    async with gateway(config) as http:
        key_id, secret = await make(http)
        assert await status(http, secret) == 200
        shown = [(await http.get(f"/admin/v1/keys/{key_id}")).text, (await http.get("/admin/v1/keys")).text]
        shown.append((await http.get("/admin/v1/audit")).text)
        shown.append((await http.post(COMP, json=BODY, headers=bearer(secret + "x"))).text)
        await http.delete(f"/admin/v1/keys/{key_id}")
        await refused(http, secret)
        shown.append((await http.post(COMP, json=BODY, headers=bearer(secret))).text)
    shown += [caplog.text, repr(config), str(config)]
    random = secret.rpartition("-")[2]
    assert not [text for text in shown if random in text or ROOT_KEY in text]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert random.encode() not in files and ROOT_KEY.encode() not in files
