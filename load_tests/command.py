"""`sluice bench`: load on any OpenAI-compatible endpoint, as a table and as JSON.

It joins the command line by an entry point, see deployments.cli.main."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """See deployments.cli.main.CommandModule."""
    p = commands.add_parser("bench", help="measure an OpenAI-compatible endpoint under load")
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    p.add_argument("--model", help="default: the first the server lists")
    p.add_argument("--api-key", default=os.environ.get("SLUICE_API_KEY"), help="default: $SLUICE_API_KEY")
    p.add_argument(
        "--concurrency", type=_positive, default=8, help="closed loop: requests at a time (default: %(default)s)"
    )
    p.add_argument("--rate", type=_rate, help="open loop instead: requests per second, at Poisson times")
    p.add_argument("--requests", type=_positive, default=32, help="how many in all (default: %(default)s)")
    p.add_argument("--prompt-tokens", type=_positive, default=256, help="about so many (default: %(default)s)")
    p.add_argument("--output-tokens", type=_positive, default=64, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from load_tests.bench import BenchConfig, LoadError, as_json, bench
    from load_tests.progress import ProgressLine
    from load_tests.report.summary import summary_text

    config = BenchConfig(
        base_url=args.base_url,
        model=args.model,
        api_key=args.api_key,
        concurrency=args.concurrency,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        rate=args.rate,
        seed=args.seed,
    )
    progress = ProgressLine()
    try:
        model, summary = asyncio.run(bench(config, progress))
    except LoadError as error:
        print(f"sluice bench: {error}", file=sys.stderr)
        return 1
    finally:
        progress.clear()
    how = f"{config.rate:g} requests/s" if config.rate else f"concurrency {config.concurrency}"
    print(f"{model} at {config.base_url}: {how}, {config.prompt_tokens} -> {config.output_tokens} tokens\n")
    print(summary_text(summary))
    if args.json:
        args.json.write_text(json.dumps(as_json(config, model, summary), indent=2) + "\n")
    return 1 if summary.errors else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
