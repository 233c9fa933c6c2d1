"""`sluice env`: the environment a Ray cluster must be started with."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from deployments.ray_serve.flags import cluster_env


def add(commands: Any) -> None:
    """Declares `sluice env`."""
    p = commands.add_parser("env", help="print the exports a Ray cluster needs before `ray start`")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    for name, value in cluster_env().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
