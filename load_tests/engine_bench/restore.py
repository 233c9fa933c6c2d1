"""What preemption costs its victim: its context computed again, or copied to host memory and back."""

from __future__ import annotations

import random
import time
from statistics import median

from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.requests import request

_COLUMNS = {
    "mode": "preemption_mode",
    "pause_s": "pause s",
    "other_s": "of it the other request s",
    "restore_s": "leaving and coming back s",
    "swaps": "swaps",
}


def run(bench: Bench) -> Figures:
    """One seat; a sequence with a long context gives it up to short requests and takes it back."""
    context = min(4096, bench.subject.capacity.max_model_len - 64)
    rows: list[MeasuredRow] = []
    for mode in ("recompute", "swap", "auto"):
        rows.append(_restore(bench, mode, context))
        bench.say(f"preempted with {context} tokens, {mode}: {rows[-1]}")
    title = f"A sequence of {context} tokens preempted by a short one, one seat"
    return Figures("restore", title, _COLUMNS, rows, ("medians of two, after one that does not count",))


def _restore(bench: Bench, mode: str, context: int) -> MeasuredRow:
    rng = random.Random(1)
    pauses: list[float] = []
    others: list[float] = []
    rounds = 1 if bench.quick else 3
    with bench.subject.engine(scheduling_policy="priority", preemption_mode=mode, max_num_seqs=1) as engine:
        vocab = engine.capacity.vocab_size
        engine.add(request("victim", context, 48, rng, vocab, priority=1))
        for number in range(rounds):
            seen: list[str] = []
            while seen.count("victim") < 2:
                seen += [delta.request_id for delta in engine.step()]
            start = time.perf_counter()
            engine.add(request(f"other {number}", 16, 4, rng, vocab))
            ended = 0.0
            back = False
            while not (ended and back):
                deltas = {delta.request_id: delta for delta in engine.step()}
                now = time.perf_counter()
                if (other := deltas.get(f"other {number}")) and other.finish_reason:
                    ended = now
                back = "victim" in deltas
            pauses.append(now - start)
            others.append(ended - start)
        swaps = engine.stats().num_swaps
        while engine.has_work:
            engine.step()
    pause_s, other_s = median(pauses[rounds > 1 :]), median(others[rounds > 1 :])
    return {"mode": mode, "pause_s": pause_s, "other_s": other_s, "restore_s": pause_s - other_s, "swaps": swaps}
