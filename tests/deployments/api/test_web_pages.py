"""A server without keys, and requests that a browser may have sent on behalf of a web page."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from helpers_gateway import COUNT, MODEL, FakeBackend, client, error_of

from deployments.config.gateway import GatewayConfig

COMP = "/v1/completions"
BODY = {"model": MODEL, "prompt": COUNT, "max_tokens": 1}


def config(**settings: Any) -> GatewayConfig:
    return GatewayConfig.model_validate(settings)


SAFE = ["127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost:8000", "a.localhost", "10.1.2.3", "sluice", "SLUICE:80",
        "sluice.default.svc", "sluice.svc.cluster.local", f"{socket.gethostname()}:8000"]  # fmt: skip


@pytest.mark.parametrize("host", SAFE)
async def test_names_that_no_stranger_owns(host: str) -> None:
    async with client(FakeBackend(), config()) as http:
        assert (await http.post(COMP, json=BODY, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
async def test_a_name_that_a_stranger_may_point_here(host: str) -> None:
    async with client(FakeBackend(), config()) as http:
        refused = await http.post(COMP, json=BODY, headers={"host": host})
        error = error_of(refused, 403)
        assert error["code"] == "host_not_allowed" and "gateway.allowed_hosts" in error["message"]
        for path in ("/v1/models", "/metrics"):
            assert (await http.get(path, headers={"host": host})).status_code == 403
    name = host.split(":")[0].rstrip(".")
    for allowed in (config(allowed_hosts=[name]), config(api_keys=["sk-a"])):
        async with client(FakeBackend(), allowed) as http:
            headers = {"host": host, "authorization": "Bearer sk-a"}
            assert (await http.post(COMP, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:9999"])
async def test_a_page_of_another_origin(origin: str) -> None:
    headers = {"host": "127.0.0.1:8000", "origin": origin, "authorization": "Bearer sk-a"}
    async with client(FakeBackend(), config()) as http:
        assert error_of(await http.post(COMP, json=BODY, headers=headers), 403)["code"] == "origin_not_allowed"
    for allowed in (config(cors_origins=["*"]), config(api_keys=["sk-a"])):
        async with client(FakeBackend(), allowed) as http:
            assert (await http.post(COMP, json=BODY, headers=headers)).status_code == 200


async def test_the_servers_own_pages() -> None:
    headers = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
    async with client(FakeBackend(), config()) as http:
        assert (await http.post(COMP, json=BODY, headers=headers)).status_code == 200


async def test_a_body_without_a_type_is_what_any_page_can_send() -> None:
    async with client(FakeBackend(), config()) as http:
        refused = await http.post(COMP, content=b'{"model": "m", "prompt": "x"}', headers={"content-type": ""})
    error_of(refused, 415)


async def test_nobody_administers_a_server_without_keys() -> None:
    async with client(FakeBackend(), config()) as http:
        refused = await http.get("/admin/v1/pools")
        assert "no admin API" in error_of(refused, 403)["message"]
        assert (await http.get("/metrics")).status_code != 403
