"""What is not the model: scheduler, sampler, detokenizer, and the engine's step around them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.base import Capacity
from engine.kv.manager import PagedKVCache
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.text.output import TextStream
from engine.types import FinishReason, GenerateRequest, NewSequence, SamplingParams, SeqSlice, Sequence, StepPlan
from load_tests.engine_bench import breakdown
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.executors import Instant, result_of
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.timing import seconds

_TEXT = (
    "The quick brown fox jumps over the lazy dog; 1234567890 numbers, naïve café, Größe, 東京タワー and a 🦊. "
    "def add(a, b):\n    return a + b\n\nNothing here is meant to be read, only to look like what models write. "
)
_PROMPT, _OUTPUT = 128, 4096
_CROWD, _POOL = 4000, 1_000_000
_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
}


def run(bench: Bench) -> list[Figures]:
    return [_steps(bench), _sampler(bench), _text(bench), breakdown.run(bench)]


# ------------------------------------------------------------------------------------------------ scheduling


def _steps(bench: Bench) -> Figures:
    rows: list[MeasuredRow] = []
    steps = 40 if bench.quick else 400
    for running, waiting in ((64, 0), (64, _CROWD), (512, 0), (512, _CROWD)):
        schedule_s, update_s, plan = scheduler_step(running, steps, waiting, _POOL if waiting else 0)
        engine_s = engine_step(bench, running, steps // 4)
        build = partial(build_batch, plan.slices, bench.subject.config.block_size, torch.device("cpu"))
        batch_s = seconds(build, bench.budget_s / 3, clock=time.process_time)
        bench.say(f"scheduler, {running} running, {waiting} waiting: {(schedule_s + update_s) * 1e6:.0f} µs per step")
        rows.append(
            {
                "running": running,
                "waiting": waiting,
                "schedule_us": schedule_s * 1e6,
                "update_us": update_s * 1e6,
                "us_per_sequence": (schedule_s + update_s) / running * 1e6,
                "build_batch_us": batch_s * 1e6,
                "engine_us": engine_s * 1e6,
            }
        )
    columns = {
        "running": "sequences",
        "waiting": "waiting",
        "schedule_us": "schedule µs",
        "update_us": "update µs",
        "us_per_sequence": "both per sequence µs",
        "build_batch_us": "build batch µs",
        "engine_us": "engine step without model µs",
    }
    notes = (
        "engine step without model: Engine.step() with an executor that answers at once, text included",
        f"with sequences waiting: by priority, fair among tenants, host memory on, a pool of {_POOL} blocks",
    )
    return Figures("scheduling", "Per decode step, nothing computed, CPU time", columns, rows, notes)


def _config(running: int) -> tuple[EngineConfig, Capacity]:
    """Room for everyone and everything, in an engine of `running` sequences."""
    config = EngineConfig(model="none", max_num_seqs=running, max_num_batched_tokens=running * _PROMPT)
    blocks = running * ((_PROMPT + _OUTPUT) // config.block_size + 2)
    return config, Capacity(blocks, _PROMPT + _OUTPUT, vocab_size=1 << 16, eos_ids=frozenset(), fingerprint="none")


def scheduler_step(running: int, steps: int, waiting: int = 0, spare: int = 0) -> tuple[float, float, StepPlan]:
    """(seconds of schedule(), seconds of update()) per decode step with prefix caching on, and the last plan. With
    sequences waiting everything that the scheduler can do is on. `spare`: blocks that nobody needs."""
    config, capacity = _config(running)
    capacity = replace(capacity, num_blocks=capacity.num_blocks + spare)
    if waiting:
        config = replace(config, scheduling_policy="priority", fair_sharing=True)
        capacity = replace(capacity, num_host_slots=capacity.num_blocks)
    kv = PagedKVCache(capacity.num_blocks, config.block_size, config.enable_prefix_caching, {}, capacity.num_host_slots)
    scheduler = Scheduler(config, kv, capacity.max_model_len, capacity.eos_ids)
    params = SamplingParams(max_tokens=_OUTPUT)
    for i in range(running + waiting):
        tokens = [i, *range(_PROMPT - 1)]
        request = GenerateRequest(str(i), tuple(tokens), params, i % 3 if i < running else 3, tenant=str(i % 100))
        scheduler.add(Sequence(i, request, tokens, _PROMPT))
    schedules: list[float] = []
    updates: list[float] = []
    while True:
        start = time.process_time()
        plan = scheduler.schedule(0.0)
        schedules.append(time.process_time() - start)
        assert plan is not None and len(plan.slices) == running
        result = result_of(plan, (1,))
        start = time.process_time()
        scheduler.update(plan, result, 0.0)
        updates.append(time.process_time() - start)
        if len(updates) > steps:
            return median(schedules[1:]), median(updates[1:]), plan  # the first step is the prefill


def engine_step(bench: Bench, running: int, steps: int) -> float:
    config, capacity = _config(running)
    tokenizer = bench.subject.text.tokenizer
    executor = Instant(replace(capacity, vocab_size=bench.subject.capacity.vocab_size), tokenizer.encode(_TEXT))
    engine = Engine(config, executor=executor, text=bench.subject.text)
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True)
    for i in range(running):
        engine.add(GenerateRequest(str(i), (i % executor.capacity.vocab_size, *(1,) * (_PROMPT - 1)), params))
    engine.step()
    taken = seconds(engine.step, float("inf"), most=steps, clock=time.process_time)
    engine.abort_all(FinishReason.ABORT)
    engine.close()
    return taken


# -------------------------------------------------------------------------------------------------- sampling


def _sampler(bench: Bench) -> Figures:
    rows: list[MeasuredRow] = []
    counts = (1, 32, 64)
    logits = _real_logits(bench, max(counts))
    for count in counts:
        row: dict[str, float | str | None] = {"rows": count}
        for name, params in _SAMPLING.items():
            row[f"{name}_us"] = sampler_step(logits[:count], params, bench.budget_s / 3) * 1e6
        bench.say(f"sampler, {count} rows: " + ", ".join(f"{name} {row[f'{name}_us']:.0f} µs" for name in _SAMPLING))
        rows.append(row)
    columns = {"rows": "rows", "greedy_us": "greedy µs", "temperature_us": "temperature µs", "top_p_us": "top_p µs"}
    title = f"Sampling, per step, {logits.shape[1]} tokens in the vocabulary"
    return Figures("sampler", title, columns, rows, ("the logits are the model's own, of a text",))


def _real_logits(bench: Bench, rows: int) -> Tensor:
    subject = bench.subject
    ids = subject.text.tokenizer.encode(_TEXT * rows)[:rows]
    num_blocks = -(-rows // subject.config.block_size)
    return subject.forward(StepPlan(0, (SeqSlice(0, tuple(ids), 0, tuple(range(num_blocks)), sample=True),)))


def sampler_step(logits: Tensor, params: SamplingParams, budget_s: float) -> float:
    """Seconds of one sample() of all rows, with a fresh copy of the logits each time, which is not counted."""
    count, vocab = logits.shape
    sampler = Sampler(vocab, logits.device)
    ids = list(range(count))
    for i in ids:
        sampler.add(NewSequence(i, params, seed=i, prompt=(1,)))
    taken: list[float] = []
    with torch.inference_mode():
        for position in range(3, 1000):
            own = logits.clone()
            start = time.perf_counter()
            sampler.sample(ids, [position] * count, own)
            taken.append(time.perf_counter() - start)
            if len(taken) > 5 and sum(taken) > budget_s:
                break
    return median(taken[2:])


# ------------------------------------------------------------------------------------------------------ text


def _text(bench: Bench) -> Figures:
    tokenizer = bench.subject.text.tokenizer
    ids = tokenizer.encode(_TEXT * 20)
    cases = {
        "plain": SamplingParams(),
        "two stop strings": SamplingParams(stop=("\n\nUser:", "</answer>")),
    }
    rows: list[MeasuredRow] = []
    for name, params in cases.items():

        def decode(params: SamplingParams = params) -> None:
            stream = TextStream(tokenizer, params)
            for token in ids:
                stream.push(token, None, False)
                stream.take()

        rows.append(
            {
                "case": name,
                "us_per_token": seconds(decode, bench.budget_s / 3, clock=time.process_time) / len(ids) * 1e6,
            }
        )
    bench.say(f"detokenizer: {rows[0]['us_per_token']:.2f} µs per token")
    columns = {"case": "request", "us_per_token": "µs per token"}
    return Figures("detokenizer", "Token to text, each token taken alone, CPU time", columns, rows)
