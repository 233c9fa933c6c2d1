"""The console script: parses the command line and hands over to one command's run()."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deployments.cli import autoscale, bench, chat, check, drain, env, keys, serve, usage


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sluice", description="Self-hosted LLM inference on Ray Serve.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (serve, check, drain, keys, usage, env, chat, bench, autoscale):
        module.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed while running, 2 refused before anything started."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
