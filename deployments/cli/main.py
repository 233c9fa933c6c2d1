"""The console script: parses the command line and hands over to one command's run().

Packages that stand above this one add commands of their own by an entry point in the group `sluice.commands`, which
names a module with the same add() as the modules here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from deployments.cli import autoscale, chat, check, drain, env, keys, serve, usage


class CommandModule(Protocol):
    """A module with one command."""

    def add(self, commands: Any) -> None:
        """Declares the command, its arguments and its run() to argparse's sub-parsers."""


def parser(others: Iterable[CommandModule] | None = None) -> argparse.ArgumentParser:
    """For the whole command line. `others`: of other packages, by default those that are installed."""
    top = argparse.ArgumentParser(prog="sluice", description="Self-hosted LLM inference on Ray Serve.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    if others is None:
        others = [entry.load() for entry in entry_points(group="sluice.commands")]
    for module in (serve, check, drain, keys, usage, env, chat, *others, autoscale):
        module.add(commands)
    return top


def main(argv: Sequence[str] | None = None, others: Iterable[CommandModule] | None = None) -> int:
    """The exit status: 0 done, 1 failed while running, 2 refused before anything started. `others` as for parser()."""
    args = parser(others).parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
