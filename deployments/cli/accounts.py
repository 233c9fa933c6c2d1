"""What `sluice keys` and `sluice usage` share: how they find the database, and how they fail."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.cli.config_file import CommandError, gateway_of, mapping, read_application

if TYPE_CHECKING:
    from deployments.accounts.database import Database

DEFAULT_CONFIG = "cluster_configs/local-cpu.yaml"


@dataclass(frozen=True, slots=True)
class Command:
    """What a command works with. `tiers`: those of the config file, empty when none was read or it has none."""

    args: argparse.Namespace
    database: Database
    tiers: tuple[str, ...]


def add_database(p: argparse.ArgumentParser) -> None:
    """Declares the options that say where the database is."""
    p.add_argument("--database", metavar="URL", help="path of an SQLite file, or an SQLAlchemy URL")
    p.add_argument(
        "--config",
        metavar="FILE",
        help=f"a Serve config file with gateway.keys.database (default: $SLUICE_DATABASE, or {DEFAULT_CONFIG})",
    )


def run_with(args: argparse.Namespace, work: Callable[[Command], None], create: bool = False) -> int:
    """`work` with the database that `args` name, its schema up to date. `create`: made if there is none."""
    from deployments.accounts.database import Database, DatabaseUrlError
    from deployments.accounts.records import AccountError, DatabaseDownError

    try:
        setting, tiers = _place(args)
        database = Database(setting)
        try:
            database.migrate(create)
            work(Command(args, database, tiers))
        finally:
            database.close()
    except (CommandError, DatabaseUrlError, AccountError, DatabaseDownError) as error:
        print(f"sluice {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _place(args: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """The database's setting, and the tiers there are."""
    path = args.config or (DEFAULT_CONFIG if Path(DEFAULT_CONFIG).exists() else None)
    elsewhere = args.database or (None if args.config else os.environ.get("SLUICE_DATABASE"))
    if elsewhere and not args.config:
        return _absolute(elsewhere), ()
    if path is None:
        raise CommandError("no database: give --database URL, --config FILE or SLUICE_DATABASE")
    gateway = gateway_of(read_application(path)[1])
    tiers = tuple(map(str, mapping(gateway.get("tiers"))))
    setting = mapping(gateway.get("keys")).get("database")
    if args.database:
        return _absolute(args.database), tiers
    if not setting:
        raise CommandError(f"no database: {path} has no gateway.keys.database; give --database or SLUICE_DATABASE")
    return str(setting), tiers


def _absolute(setting: str) -> str:
    is_path = "://" not in setting and not setting.startswith(("~", "env:"))
    return str(Path(setting).absolute()) if is_path else setting
