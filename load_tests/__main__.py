"""python -m load_tests run SCENARIO | compare A B"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from load_tests.errors import LoadError
from load_tests.progress import ProgressLine
from load_tests.report.compare import compare, read
from load_tests.report.html import html
from load_tests.report.result import Result, as_json, cpu_us_per_token, result_of, rows
from load_tests.report.summary import summary_text
from load_tests.runner import Run, Target, run
from load_tests.scenario import Scenario, find, load


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m load_tests", description="Load on any OpenAI-compatible endpoint.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    p = commands.add_parser("run", help="run a scenario, print its table and write its report")
    p.add_argument("scenario", help="a YAML file, or the name of one that comes with the package, such as chat")
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    p.add_argument("--model", help="default: the first the server lists")
    p.add_argument("--api-key", default=os.environ.get("SLUICE_API_KEY"), help="default: $SLUICE_API_KEY")
    p.add_argument("--seed", type=int, help="instead of the scenario's")
    p.add_argument("--out", type=Path, metavar="DIR", help="write result.json, requests.jsonl and report.html there")
    p.set_defaults(command=_run)
    p = commands.add_parser("compare", help="print the ratios between two results")
    p.add_argument("a", type=Path, help="a result.json, or the directory it lies in")
    p.add_argument("b", type=Path)
    p.set_defaults(command=_compare)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 1: requests failed. 2: nothing could be run. 130: interrupted; what had ended is reported."""
    args = parser().parse_args(argv)
    try:
        return int(args.command(args))
    except LoadError as error:
        print(f"load_tests: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    scenario = load(find(args.scenario))
    if args.seed is not None:
        scenario = scenario.model_copy(update={"seed": args.seed})
    if args.out is not None:
        _make(args.out)
    done, interrupted = _load(scenario, Target(args.base_url, args.model, args.api_key))
    if done is None:
        return 130
    result = result_of(done)
    _print(done, result)
    if args.out is not None:
        _write(args.out, done, result)
    if interrupted:
        return 130
    return 1 if result.total.errors else 0


def _load(scenario: Scenario, target: Target) -> tuple[Run | None, bool]:
    """The run (as far as it got) and whether it was interrupted."""
    line = ProgressLine()
    latest: Run | None = None

    def progress(current: Run) -> None:
        nonlocal latest
        latest = current
        line(current)

    try:
        return asyncio.run(run(scenario, target, progress)), False
    except KeyboardInterrupt:
        return latest, True
    finally:
        line.clear()


def _print(done: Run, result: Result) -> None:
    print(f"{done.scenario.name}: {done.model} at {done.base_url}\n")
    if len(result.phases) == 1:
        print(f"{summary_text(result.total)}\n")
    else:
        for name, summary in result.phases.items():
            print(f"== {name}\n{summary_text(summary)}\n")
        if sum(phase.measured for phase in done.phases) > 1:
            print(f"== measured phases together\n{summary_text(result.total)}\n")
    exact = "exactly" if done.form.exact else "about"
    print(f"prompts: {done.form.unit}s, {exact} as long as asked for")
    print(f"generator: {done.cpu_s:.2f} s of CPU time, {cpu_us_per_token(done):.0f} µs a token")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"{folder}: {error.strerror}") from None


def _write(folder: Path, done: Run, result: Result) -> None:
    (folder / "result.json").write_text(json.dumps(as_json(done, result), indent=1) + "\n")
    with (folder / "requests.jsonl").open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows(done))
    try:
        page = html(done, result)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("load_tests: no report.html, which needs matplotlib: pip install 'sluicegate[load]'", file=sys.stderr)
        return
    (folder / "report.html").write_text(page, encoding="utf-8")
    print(f"report: {folder / 'report.html'}")


def _compare(args: argparse.Namespace) -> int:
    print(compare(read(args.a), read(args.b)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
