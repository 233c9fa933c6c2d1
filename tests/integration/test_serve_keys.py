"""Keys of the database on a real server with two gateways: made and revoked by the command line while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers_server import COMPLETIONS, MODEL, WAIT_S, Server, count, until

from deployments.accounts.database import Database
from deployments.cli.main import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HTTP = "sluicegate_http_requests_total"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("keys") / "keys.db")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Server]:
    """Its settings leave no key in the config: the database has all there are."""
    spill = Path(database).parent / "spill"
    log, settings = tmp_path_factory.mktemp("early") / "server.log", f"gateway.keys.database={database}"
    with pytest.raises(AssertionError, match=r"there is no database .*`sluice keys create` makes one"):
        Server.start(log, settings)
    made = Database(database)
    made.migrate()
    made.close()
    with Server.running(
        tmp_path_factory.mktemp("keyed") / "server.log",
        "gateway_replicas=2",
        "gateway.api_keys=[]",
        f"gateway.keys.database={database}",
        f"gateway.ledger.spill_dir={spill}",
    ) as server:
        server.until_known()
        yield server


def sluice(database: str, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, str]:
    assert main([*args, "--database", database, "--json"]) == 0
    answer: dict[str, str] = json.loads(capsys.readouterr().out)
    return answer


def test_made_used_revoked_and_charged(keyed: Server, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sluice keys create" in keyed.output() and "key=YOUR_KEY" in keyed.output()
    key = sluice(database, capsys, "keys", "create", "--org", "acme")
    with keyed.sdk(key["secret"]) as api:
        answer = api.completions.create(**count())
        assert answer.choices[0].text
    # Several connections, so that both gateways are asked.
    clients = [httpx.Client(base_url=keyed.url, timeout=WAIT_S, trust_env=False) for _ in range(8)]
    headers = {"authorization": f"Bearer {key['secret']}"}
    assert {http.get("/v1/models", headers=headers).status_code for http in clients} == {200}
    assert {http.get("/admin/v1/keys", headers=headers).status_code for http in clients} == {403}
    before = keyed.until_known().by_replica(HTTP, status="401")
    sluice(database, capsys, "keys", "revoke", key["id"])

    def refused() -> bool:
        return {http.get("/v1/models", headers=headers).status_code for http in clients} == {401}

    def refused_by_both() -> bool:
        counts = keyed.metrics().by_replica(HTTP, status="401") if refused() else {}
        return sum(n > before.get(gateway, 0) for gateway, n in counts.items()) == 2

    until(refused_by_both, "refusal on every gateway")
    assert all(refused() for _ in range(5))

    other = sluice(database, capsys, "keys", "create", "--org", "zeta")
    headers = {"authorization": f"Bearer {other['secret']}"}
    for http in clients:
        assert http.post(COMPLETIONS, json=count(), headers=headers).status_code == 200
        http.close()

    # What a stream has used is charged, up to half a second of it, when its gateway is killed.
    killed = sluice(database, capsys, "keys", "create", "--org", "killed")
    headers = {"authorization": f"Bearer {killed['secret']}"}
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    seen = 0
    with (
        httpx.Client(base_url=keyed.url, timeout=WAIT_S, trust_env=False) as http,
        http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer,
        contextlib.suppress(httpx.TransportError),
    ):
        began_s, gone = time.monotonic(), False
        for line in answer.iter_lines():
            seen += line.startswith("data: {")
            if not gone and time.monotonic() - began_s > 2:
                gone = True
                for pid in keyed.processes("ServeReplica:sluicegate:Gateway"):
                    os.kill(pid, signal.SIGKILL)

    def charged() -> int:
        assert main(["usage", "--by", "org", "--org", "killed", "--database", database, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return rows[0]["completion_tokens"] if rows else 0

    charged_before = until(charged, "the next gateway charges what the killed one's stream has used")
    assert seen / 2 < charged_before <= 1500

    keyed.terminate()  # at once: what the gateways have not written yet must be written now
    assert keyed.wait() == 0
    assert main(["usage", "--by", "org,model", "--database", database, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["org"], row["model"], row["requests"], row["completion_tokens"]) for row in rows] == [
        ("acme", MODEL, 1, 24),
        ("killed", MODEL, 1, charged_before),
        ("zeta", MODEL, 8, 8 * 24),
    ]
