"""python -m load_tests.autoscale validate: how far the scaling simulator's predictions are from a real Serve."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from load_tests.autoscale.one_to_two import one_to_two
from load_tests.autoscale.validate import TraceComparison, markdown, validate
from load_tests.errors import LoadError

_TRACES = ("burst", "diurnal", "flash_crowd")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.autoscale", description=(__doc__ or "").split(": ", 1)[1])
    verbs = p.add_subparsers(dest="verb", metavar="VERB", required=True)
    v = verbs.add_parser("validate", help="a real Serve with paced engines and the simulator, on the same traces")
    v.add_argument("--trace", action="append", metavar="NAME|FILE", help=f"default: {', '.join(_TRACES)}")
    v.add_argument("--seconds", type=float, default=150.0, help="that each trace is played for (default: %(default)s)")
    v.add_argument("--rate", type=float, default=3.5, help="mean requests per second (default: %(default)s)")
    v.add_argument("--seed", type=int, default=0)
    v.add_argument("--repeat", type=int, default=2, metavar="N", help="real runs of each trace (default: %(default)s)")
    v.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    r = verbs.add_parser("one-to-two", help="the real engine, one thread a replica, from one replica to two")
    r.add_argument("--seconds", type=float, default=60.0, help="of load (default: %(default)s)")
    r.add_argument("--seed", type=int, default=0)
    r.add_argument("--repeat", type=int, default=2, metavar="N", help="real runs (default: %(default)s)")
    r.add_argument("--out", type=Path, metavar="FILE", help="write the tables there, as Markdown")
    args = p.parse_args(argv)
    if args.verb == "one-to-two":
        return _one_to_two(args)
    results: list[TraceComparison] = []
    try:
        for result in validate(args.trace or _TRACES, args.seconds, args.rate, args.seed, args.repeat, _say):
            results.append(result)
            if args.out is not None:
                _write(args.out, results)
    except LoadError as error:
        print(f"load_tests.autoscale: {error}", file=sys.stderr)
        return 1
    print(markdown(results))
    return 0 if all(r.close for r in results) else 2


def _one_to_two(args: argparse.Namespace) -> int:
    try:
        found, close = one_to_two(args.seconds, args.seed, args.repeat, _say)
    except LoadError as error:
        print(f"load_tests.autoscale: {error}", file=sys.stderr)
        return 1
    print(found)
    if args.out is not None:
        args.out.write_text(f"# The real engine from one replica to two\n\n{found}\n")
    return 0 if close else 2


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(stem: Path, results: Sequence[TraceComparison]) -> None:
    stem.with_suffix(".json").write_text(json.dumps([r.as_dict() for r in results], indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"# Predicted by the simulator, and real\n\n{markdown(results)}\n")


if __name__ == "__main__":
    sys.exit(main())
