"""`sluice keys`: API keys in the database, whether a server runs or not."""

from __future__ import annotations

import argparse
import getpass
import json
import time
from collections.abc import Sequence
from typing import Any

from deployments.cli.accounts import Command, add_database, run_with
from deployments.cli.config_file import CommandError


def add(commands: Any) -> None:
    """Declares `sluice keys`."""
    p = commands.add_parser("keys", help="create, list, revoke and rotate API keys")
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = _action(
        actions, "create", _create, "make a key and show it, this once; the first makes the database", True
    )
    create.add_argument("--org", required=True, help="the organisation it belongs to; made if there is none")
    create.add_argument("--project", default="default", help="default: %(default)s")
    create.add_argument("--tier", default="default", help="a tier of the config (default: %(default)s)")
    create.add_argument("--name", default="", help="what it is for")
    create.add_argument(
        "--scopes", metavar="A,B", help="of models.read, inference, batch, admin (default: all but admin)"
    )
    create.add_argument("--models", metavar="M1,M2", help="only these (default: all that the tier allows)")
    create.add_argument("--expires", metavar="WHEN", help="in, like 30d, or at, like 2030-12-31 (default: never)")
    show = _action(actions, "list", _list, "show all keys, never their secrets")
    show.add_argument("--org", help="only this organisation's")
    revoke = _action(actions, "revoke", _revoke, "refuse a key from now on, for good")
    revoke.add_argument("key_id", metavar="KEY_ID")
    rotate = _action(actions, "rotate", _rotate, "give a key a new secret, and show it, this once")
    rotate.add_argument("key_id", metavar="KEY_ID")
    rotate.add_argument(
        "--grace", default="0", metavar="TIME", help="the old secret works so long, like 1h (default: 0)"
    )


def _action(actions: Any, name: str, work: Any, text: str, create: bool = False) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    add_database(p)
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=lambda args: run_with(args, work, create))
    return p


def _create(command: Command) -> None:
    from deployments.accounts.key_store import KeyStore
    from deployments.accounts.records import USUAL_SCOPES, NewKey

    args = command.args
    if command.tiers and args.tier not in (*command.tiers, "default"):
        raise CommandError(f"--tier: unknown {args.tier!r}; the config has {', '.join(command.tiers)}")
    new = NewKey(
        org=args.org,
        project=args.project,
        tier=args.tier,
        name=args.name,
        scopes=USUAL_SCOPES if args.scopes is None else _names(args.scopes),
        models=None if args.models is None else _names(args.models),
        expires_at=None if args.expires is None else _when(args.expires),
    )
    key, secret = KeyStore(command.database).create(new, _actor())
    _show_secret(key.public(time.time()), secret, args.json)


def _list(command: Command) -> None:
    from deployments.accounts.key_store import KeyStore

    keys = [key.public(time.time()) for key in KeyStore(command.database).list(command.args.org)]
    if command.args.json:
        print(json.dumps(keys, indent=2))
        return
    rows = [("ID", "PREFIX", "ORG", "PROJECT", "TIER", "STATUS", "SCOPES", "MODELS", "EXPIRES", "NAME")]
    for key in keys:
        scopes, models = ",".join(key["scopes"]), ",".join(key["models"] or ["all"])
        expires = "never" if key["expires_at"] is None else time.strftime("%Y-%m-%d", time.gmtime(key["expires_at"]))
        place = [key[name] for name in ("id", "prefix", "org", "project", "tier", "status")]
        rows.append((*place, scopes, models, expires, key["name"]))
    print_table(rows)


def _revoke(command: Command) -> None:
    from deployments.accounts.key_store import KeyStore

    key = KeyStore(command.database).revoke(command.args.key_id, _actor()).public(time.time())
    print(json.dumps(key, indent=2) if command.args.json else f"{key['id']} is revoked")


def _rotate(command: Command) -> None:
    from deployments.accounts.key_store import KeyStore
    from deployments.accounts.periods import duration_s

    try:
        grace_s = duration_s(command.args.grace)
    except ValueError as error:
        raise CommandError(f"--grace: {error}") from None
    key, secret = KeyStore(command.database).rotate(command.args.key_id, grace_s, _actor())
    _show_secret(key.public(time.time()), secret, command.args.json)


def print_table(rows: Sequence[Sequence[object]], right: int | None = None) -> None:
    """Columns as wide as they must be; those from index `right` on are numbers."""
    from autoscaling.report.tables import text_table

    heads, *rest = [[str(cell) for cell in row] for row in rows]
    print(text_table(heads, rest, right))


def _show_secret(key: dict[str, Any], secret: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(key | {"secret": secret}, indent=2))
        return
    print(f"id      {key['id']}\nsecret  {secret}\nIt is shown only now; what is kept can't give it back.")


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _when(text: str) -> float:
    from deployments.accounts.periods import duration_s, moment

    try:
        return time.time() + duration_s(text)
    except ValueError:
        pass
    try:
        return moment(text)
    except ValueError:
        message = f"--expires: {text!r} is neither a duration like 30d nor a date like 2030-12-31"
        raise CommandError(message) from None


def _actor() -> Any:
    from deployments.accounts.records import Actor

    return Actor(f"cli:{getpass.getuser()}")
