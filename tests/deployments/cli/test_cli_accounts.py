"""`sluice keys` and `sluice usage` on a database, without a server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.accounts.database import Database
from deployments.accounts.directory import Directory
from deployments.accounts.key_store import KeyStore
from deployments.accounts.ledger_store import LedgerStore
from deployments.accounts.usage_entry import UsageEntry
from deployments.cli.main import main


class Cli:
    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = file
        self._capsys = capsys

    def __call__(self, *args: str, fails: bool = False) -> str:
        """What it prints; with `fails` its one line of complaint."""
        status = main([*args, "--database", str(self.file)])
        done = self._capsys.readouterr()
        assert status == int(fails), done.err
        if fails:
            assert done.out == "" and done.err.count("\n") == 1
            return done.err
        assert done.err == ""
        return done.out

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json"))


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "keys.db", capsys)


def test_create_list_rotate_revoke(cli: Cli) -> None:
    made = cli.json("keys", "create", "--org", "acme", "--tier", "pro", "--models", "m1, m2", "--expires", "30d")
    assert (made["org"], made["tier"], made["project"], made["models"]) == ("acme", "pro", "default", ["m1", "m2"])
    assert made["scopes"] == ["batch", "inference", "models.read"]
    assert 29 * 86400 < made["expires_at"] - time.time() <= 30 * 86400
    found = KeyStore(Database(str(cli.file))).find(made["secret"])
    assert found is not None and found.key.id == made["id"]

    text = cli("keys", "create", "--org", "zeta", "--scopes", "admin", "--name", "ops", "--expires", "2999-01-01")
    assert text.startswith("id      key_") and "secret  sk-sg-" in text and "only now" in text
    table = cli("keys", "list")
    assert [line.split()[0] for line in table.splitlines()] == ["ID", made["id"], text.split()[1]]
    assert "2999-01-01" in table and made["secret"] not in table
    assert [key["org"] for key in cli.json("keys", "list", "--org", "zeta")] == ["zeta"]

    rotated = cli.json("keys", "rotate", made["id"], "--grace", "1h")
    assert rotated["id"] == made["id"] and rotated["secret"] != made["secret"]
    assert cli("keys", "revoke", made["id"]) == f"{made['id']} is revoked\n"
    assert cli.json("keys", "revoke", made["id"])["status"] == "revoked"
    log = Directory(Database(str(cli.file))).audit(None, 10)
    assert [e.action for e in log] == ["key.revoke", "key.rotate", "key.create", "key.create"]
    assert all(e.actor.startswith("cli:") for e in log)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["create", "--org", "a b"], "org 'a b' must be"),
        (
            ["create", "--org", "a", "--scopes", "all"],
            "unknown scope 'all'; known: models.read, inference, batch, admin",
        ),
        (["create", "--org", "a", "--expires", "soon"], "--expires: 'soon' is neither a duration"),
        (["create", "--org", "a", "--expires", "2001-01-01"], "expires_at must be in the future"),
        (["list"], "there is no database"),
        (["revoke", "key_none"], "there is no key 'key_none'"),
        (["rotate", "key_none", "--grace", "1x"], "--grace: '1x' is no duration"),
    ],
)
def test_mistakes_are_one_clear_line(cli: Cli, args: list[str], words: str) -> None:
    if args[0] in ("revoke", "rotate"):
        cli("keys", "create", "--org", "acme")
    assert cli("keys", *args, fails=True).startswith("sluice keys: ")
    assert words in cli("keys", *args, fails=True)


def test_usage(cli: Cli) -> None:
    assert "`sluice keys create` makes one" in cli("usage", fails=True)
    cli("keys", "create", "--org", "acme")
    assert cli.json("usage") == []
    entry = UsageEntry("u", time.time(), "acme", "web", "key_1", "m", "/v1/completions", "r", 200, 10, 4, 5, 0.1, 0.5)
    LedgerStore(Database(str(cli.file))).add([entry])
    [row] = cli.json("usage", "--by", "org,key", "--since", "1d")
    assert (row["org"], row["key"], row["requests"], row["total_tokens"]) == ("acme", "key_1", 1, 15)
    assert cli.json("usage", "--org", "zeta") == [] and cli.json("usage", "--since", "2999-01-01") == []
    head, line = cli("usage", "--by", "model").splitlines()
    assert head.split()[0] == "MODEL" and line.split() == ["m", "1", "10", "4", "5", "15"]
    assert "--by: unknown 'hour'; known: day, org, project, key, model" in cli("usage", "--by", "hour", fails=True)
    assert "--since" in cli("usage", "--since", "later", fails=True)
    old = replace(entry, uid="old", at=time.time() - 40 * 86400)
    LedgerStore(Database(str(cli.file))).add([old])
    assert cli("usage", "--prune", "30d") == "1 requests are forgotten\n"
    assert [row["requests"] for row in cli.json("usage", "--by", "org")] == [1]
    assert "--prune" in cli("usage", "--prune", "later", fails=True)


def test_how_the_database_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLUICE_DATABASE", raising=False)
    config = tmp_path / "serve.yaml"
    gateway: dict[str, Any] = {"keys": {"database": str(tmp_path / "config.db")}, "tiers": {"free": {}, "pro": {}}}
    app = {"import_path": "deployments.app:build", "args": {"gateway": gateway, "models": []}}
    config.write_text(json.dumps({"applications": [app]}))
    make = ["keys", "create", "--org", "acme", "--config", str(config), "--tier"]
    assert main([*make, "pro"]) == 0
    assert (tmp_path / "config.db").exists()
    assert main(["keys", "list", "--config", str(config)]) == 0
    capsys.readouterr()
    assert main([*make, "gold"]) == 1
    assert capsys.readouterr().err == "sluice keys: --tier: unknown 'gold'; the config has free, pro\n"

    monkeypatch.setenv("SLUICE_DATABASE", str(tmp_path / "env.db"))
    assert main(["keys", "create", "--org", "acme"]) == 0
    assert (tmp_path / "env.db").exists()
    assert main(["keys", "list", "--database", "env:SLUICE_DATABASE"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "create", "--org", "acme", "--database", "here.db"]) == 0
    assert (tmp_path / "here.db").exists()

    capsys.readouterr()
    monkeypatch.delenv("SLUICE_DATABASE")
    gateway.clear()
    config.write_text(json.dumps({"applications": [app]}))
    for args, words in [
        ([], "no database: give --database URL, --config FILE or SLUICE_DATABASE"),
        (["--config", str(config)], "has no gateway.keys.database"),
        (["--config", "none.yaml"], "none.yaml: No such file or directory"),
        (["--database", "nosuch://user:hunter2@host/db"], "no driver for nosuch"),
    ]:
        assert main(["keys", "list", *args]) == 1
        error = capsys.readouterr().err
        assert error.startswith("sluice keys: ") and words in error and error.count("\n") == 1
        assert "hunter2" not in error
