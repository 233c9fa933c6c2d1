"""`sluice usage`: what has been used, from the ledger."""

from __future__ import annotations

import json
import time
from typing import Any

from deployments.cli.accounts import Command, add_database, run_with
from deployments.cli.config_file import CommandError
from deployments.cli.keys import print_table

_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")


def add(commands: Any) -> None:
    """Declares `sluice usage`."""
    p = commands.add_parser("usage", help="sum up tokens and requests by day, model, key, organisation")
    p.add_argument(
        "--by", default="day,model", metavar="A,B", help="of day, org, project, key, model (default: %(default)s)"
    )
    p.add_argument("--since", metavar="WHEN", help="that long ago, like 7d, or a date, like 2030-12-31 (default: all)")
    p.add_argument("--org", help="only this organisation's")
    p.add_argument(
        "--prune",
        metavar="WHEN",
        help="forget the requests before that, for good; what projects have spent of their budgets stays",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    add_database(p)
    p.set_defaults(run=lambda args: run_with(args, _usage))


def _usage(command: Command) -> None:
    from deployments.accounts.ledger_store import GROUPS, LedgerStore

    by = tuple(dict.fromkeys(name.strip() for name in command.args.by.split(",") if name.strip()))
    if unknown := [name for name in by if name not in GROUPS]:
        raise CommandError(f"--by: unknown {unknown[0]!r}; known: {', '.join(GROUPS)}")
    store = LedgerStore(command.database)
    if (before := _moment(command.args.prune, "--prune")) is not None:
        num = store.prune(before)
        print(json.dumps({"pruned": num}) if command.args.json else f"{num} requests are forgotten")
        return
    rows = store.usage(by, since=_moment(command.args.since, "--since"), org=command.args.org)
    if command.args.json:
        print(json.dumps(rows, indent=2))
        return
    names = [*by, *_SUMS]
    print_table([[name.upper() for name in names], *([row[name] for name in names] for row in rows)], right=len(by))


def _moment(text: str | None, option: str) -> float | None:
    from deployments.accounts.periods import duration_s, moment

    if text is None:
        return None
    try:
        return time.time() - duration_s(text)
    except ValueError:
        pass
    try:
        return moment(text)
    except ValueError:
        raise CommandError(f"{option}: {text!r} is neither a duration like 7d nor a date like 2030-12-31") from None
