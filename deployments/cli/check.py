"""`sluice check`: everything that is wrong with a config file, one line each."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Declares `sluice check`."""
    p = commands.add_parser("check", help="validate config files fully, unknown keys included")
    p.add_argument("files", nargs="+", metavar="FILE")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from deployments.config.serve_file import ConfigFileError, ServeFile

    status = 0
    for path in args.files:
        try:
            file = ServeFile.load(path)
        except ConfigFileError as error:
            print(*error.problems, sep="\n")
            status = 1
        else:
            print(f"{path}: ok, models: {', '.join(file.model_ids)}")
            for warning in file.warnings:
                print(f"{path}: {warning}")
            for pool, defaults in file.sampling_defaults.items():
                if changed := ", ".join(f"{name} {value:g}" for name, value in defaults.changed.items()):
                    print(f"{path}: {pool} samples with {changed} where a request does not say (generation_config)")
    return status
