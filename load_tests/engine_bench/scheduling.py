"""What the scheduler's choices are worth on the real model, and what making them costs."""

from __future__ import annotations

from load_tests.engine_bench import long_prompt, overload, restore
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.overhead import scheduler_step

_WANTED_US = {64: 250, 512: 2000}
_QUEUES = (0, 4000)
_POOLS = (0, 1_000_000)  # blocks besides those needed


def run(bench: Bench) -> list[Figures]:
    return [long_prompt.run(bench), restore.run(bench), overload.run(bench), _accounting(bench)]


def _accounting(bench: Bench) -> Figures:
    steps = 20 if bench.quick else 200
    rows: list[MeasuredRow] = []
    for running, wanted in _WANTED_US.items():
        for waiting in _QUEUES:
            for pool in _POOLS:
                schedule_s, update_s, _ = scheduler_step(running, steps, waiting, pool)
                row: MeasuredRow = {
                    "running": running,
                    "waiting": waiting,
                    "pool": pool,
                    "step_us": (schedule_s + update_s) * 1e6,
                    "wanted_us": wanted,
                }
                bench.say(f"scheduler and cache: {row}")
                rows.append(row)
    columns = {
        "running": "running",
        "waiting": "waiting",
        "pool": "unused blocks",
        "step_us": "schedule and update µs",
        "wanted_us": "wanted: at most µs",
    }
    note = "with sequences waiting: by priority, fair among tenants, host memory on"
    return Figures("accounting", "Scheduler and K/V accounting per decode step, CPU time", columns, rows, (note,))
