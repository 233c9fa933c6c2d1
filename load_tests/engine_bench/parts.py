"""The table of parts."""

from __future__ import annotations

from collections.abc import Callable

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
from load_tests.engine_bench.base import Figures
from load_tests.engine_bench.bench import Bench

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
